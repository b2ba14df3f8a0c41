"""The engine without a screen: load a model, answer a prompt, on the caller's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from app.cli.output import failed, note
from app.services import EngineHandle
from engine.commands import (
    CancelTurn,
    Command,
    ForgetChat,
    LoadModel,
    Stop,
    SubmitTurn,
    UpdateSpeculation,
)
from engine.events import (
    EngineEvent,
    EngineFailed,
    ModelFailed,
    ModelInfo,
    ModelLoaded,
    Notice,
    SpeculationChanged,
    TurnFailed,
    TurnFinished,
)
from engine.speculative.options import SpeculationOptions

STOP_TIMEOUT_S = 10.0
"""Longest wait for the engine thread to end; one step and the cache release take far less."""


class HeadlessEngine:
    """An engine thread whose events are read one by one by the caller."""

    def __init__(
        self, start_engine: Callable[[Callable[[EngineEvent], None]], EngineHandle]
    ) -> None:
        self._events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self._host = start_engine(self._events.put)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._host.submit(Stop())
        self._host.join(STOP_TIMEOUT_S)

    def load(self, command: LoadModel) -> ModelInfo:
        """Load a model and wait for it; what the engine has to say meanwhile goes to stderr.

        Raises: CommandFailed with the load's exit code.
        """
        self._host.submit(command)
        for event in self._read():
            if isinstance(event, Notice):
                note(event.text)
            if isinstance(event, ModelLoaded):
                return event.info
            if isinstance(event, ModelFailed):
                raise failed(event.error)
        raise AssertionError("the event stream never ends by itself")

    def answer(self, command: SubmitTurn) -> Iterator[EngineEvent]:
        """Events of one turn, TurnFinished last. Ctrl-C cancels the turn and raises.

        Raises: CommandFailed when the turn fails.
        """
        self._host.submit(command)
        try:
            for event in self._read():
                if isinstance(event, TurnFailed):
                    raise failed(event.error)
                yield event
                if isinstance(event, TurnFinished):
                    return
        except KeyboardInterrupt:
            self._host.submit(CancelTurn(command.request_id))
            raise

    def run_turn(self, turn: SubmitTurn) -> TurnFinished:
        """Answer a turn; deltas are thrown away. Raises: CommandFailed when it fails."""
        for event in self.answer(turn):
            if isinstance(event, TurnFinished):
                return event
        raise AssertionError("a turn ends with TurnFinished")

    def update_speculation(self, options: SpeculationOptions) -> None:
        """Switch the policy; returns when the engine has applied it."""
        self._host.submit(UpdateSpeculation(options))
        for event in self._read():
            if isinstance(event, SpeculationChanged):
                return

    def submit(self, command: Command) -> None:
        """Queue an order without waiting for anything."""
        self._host.submit(command)

    def next_event(self) -> EngineEvent:
        """The next event. Raises: CommandFailed when a turn or the engine failed."""
        event = self._next()
        if isinstance(event, EngineFailed | TurnFailed):
            raise failed(event.error)
        return event

    def forget(self, chat_id: str) -> None:
        """Release a chat's holder."""
        self._host.submit(ForgetChat(chat_id))

    def _read(self) -> Iterator[EngineEvent]:
        while True:
            event = self._next()
            if isinstance(event, EngineFailed):
                raise failed(event.error)
            yield event

    def _next(self) -> EngineEvent:
        """The next event; wakes up now and then so that Ctrl-C is noticed on Windows too."""
        while True:
            try:
                return self._events.get(timeout=0.5)
            except queue.Empty:
                continue
