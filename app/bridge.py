"""Between the screen and the engine thread: typed commands in, events out as messages.

The engine calls back on its own thread; nothing but `post_message` happens there, which is safe
from any thread and does not wait for the screen.
"""

from __future__ import annotations

from collections.abc import Callable

from textual.message import Message

from app.services import EngineHandle
from engine.commands import Command, Stop
from engine.events import EngineEvent

STOP_TIMEOUT_S = 5.0
"""Longest wait at the end of the program; one forward of a large prompt chunk can take seconds."""


class EngineEventArrived(Message):
    """The engine reported something."""

    def __init__(self, event: EngineEvent) -> None:
        super().__init__()
        self.event = event


class EngineBridge:
    """Queues commands until the engine runs, then passes them on in order."""

    def __init__(
        self,
        start_engine: Callable[[Callable[[EngineEvent], None]], EngineHandle],
        post_message: Callable[[Message], bool],
    ) -> None:
        self._start_engine = start_engine
        self._post_message = post_message
        self._handle: EngineHandle | None = None
        self._pending: list[Command] = []

    def start(self) -> EngineHandle:
        """Import and start the engine. Blocking: called on a worker thread, once."""
        return self._start_engine(self._on_event)

    def attach(self, handle: EngineHandle) -> None:
        """Use the started engine, on the UI thread; what was queued goes first."""
        self._handle = handle
        pending, self._pending = self._pending, []
        for command in pending:
            handle.submit(command)

    def submit(self, command: Command) -> None:
        """Give an order to the engine, or keep it until the engine runs."""
        if self._handle is None:
            self._pending.append(command)
        else:
            self._handle.submit(command)

    def close(self) -> None:
        """Stop the engine and wait a moment for its thread."""
        if self._handle is not None:
            self._handle.submit(Stop())
            self._handle.join(STOP_TIMEOUT_S)

    def _on_event(self, event: EngineEvent) -> None:
        self._post_message(EngineEventArrived(event))
