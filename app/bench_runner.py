"""Runs a bench on a worker thread over the engine the screen uses, one turn at a time.

Events arrive on the UI thread and are handed over by a queue; the worker only ever waits here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from engine.commands import (
    CancelTurn,
    Command,
    ForgetChat,
    MeasureRows,
    SubmitTurn,
    UpdateSpeculation,
)
from engine.events import (
    EngineEvent,
    EngineFailed,
    ErrorInfo,
    RowsMeasured,
    SpeculationChanged,
    TurnFailed,
    TurnFinished,
)
from engine.speculative.options import SpeculationOptions

POLL_S = 0.1
"""How soon a waiting worker notices Esc."""

PREFIX = "bench-"
"""Every request of a bench starts with it (engine.bench names its chats so)."""


class BenchStopped(Exception):
    """A person stopped the bench; what is done is kept."""


class BenchFailed(Exception):
    """A turn or the engine failed while it was measured."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


class BenchRunner:
    """A `TurnRunner` over commands and events."""

    def __init__(self, submit: Callable[[Command], None]) -> None:
        self._submit = submit
        self._events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def take(self, event: EngineEvent) -> bool:
        """Keep an event of the bench; False when it is somebody else's. Any thread."""
        if isinstance(event, SpeculationChanged | RowsMeasured | EngineFailed):
            self._events.put(event)
            return False
        request_id = getattr(event, "request_id", "")
        if not request_id.startswith(PREFIX):
            return False
        if isinstance(event, TurnFinished | TurnFailed):
            self._events.put(event)
        return True

    def stop(self) -> None:
        """End the bench at the next step. Any thread."""
        self._stopped.set()

    def run_turn(self, turn: SubmitTurn) -> TurnFinished:
        """Answer a turn. Raises: BenchStopped, BenchFailed."""
        self._submit(turn)
        try:
            event = self._wait(TurnFinished)
        except BenchStopped:
            self._submit(CancelTurn(turn.request_id))
            raise
        assert isinstance(event, TurnFinished), "waited for it"
        if event.finish_reason == "cancelled":  # another model is loaded: no figure of this one
            raise BenchStopped
        return event

    def update_speculation(self, options: SpeculationOptions) -> None:
        """Switch the policy; returns when it took effect, or at once after a stop."""
        self._submit(UpdateSpeculation(options))
        if not self._stopped.is_set():
            self._wait(SpeculationChanged)

    def forget(self, chat_id: str) -> None:
        """Release a chat's holder."""
        self._submit(ForgetChat(chat_id))

    def measure_rows(self, command: MeasureRows) -> RowsMeasured:
        """Cost by row count. Raises: BenchStopped, BenchFailed."""
        self._submit(command)
        event = self._wait(RowsMeasured)
        assert isinstance(event, RowsMeasured), "waited for it"
        return event

    def _wait(self, kind: type[EngineEvent]) -> EngineEvent:
        while not self._stopped.is_set():
            try:
                event = self._events.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(event, EngineFailed):
                self._stopped.set()  # nothing is answered any more: wait for nothing
            if isinstance(event, TurnFailed | EngineFailed):
                raise BenchFailed(event.error)
            if isinstance(event, kind):
                return event
        raise BenchStopped
