"""The engine thread: a queue of commands in, one callback of events out.

Only this thread touches the model. The one catch-all of the program is here: a bug ends the engine
with `EngineFailed`, answers every command that was still waiting for one, and never hangs a caller.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from engine.commands import (
    Command,
    LoadModel,
    MeasureRows,
    Stop,
    SubmitTurn,
    UpdateSpeculation,
)
from engine.contracts import Clock, ModelLoader
from engine.engine import InferenceEngine
from engine.events import (
    EngineEvent,
    EngineFailed,
    EngineReady,
    EngineStopped,
    ErrorInfo,
    ModelFailed,
    RowsMeasured,
    SpeculationChanged,
    TurnFailed,
    TurnFinished,
)
from engine.executor import TURN_ERRORS
from engine.options import EngineOptions
from engine.session import describe_error
from engine.speculative.registry import SpeculatorRegistry

log = logging.getLogger(__name__)

QUIET_S = 0.2
"""Background work starts after so much silence: a turn often follows a load or a turn at once."""


class EngineHost:
    """Runs an `InferenceEngine` on a thread of its own, from construction to a `Stop`."""

    def __init__(
        self,
        loader: ModelLoader,
        on_event: Callable[[EngineEvent], None],
        *,
        prepare: Callable[[], str] = lambda: "",
        clock: Clock = time.perf_counter,
        registry: SpeculatorRegistry | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        """Start the thread.

        `on_event` is called on it, in order. `prepare` imports the backend there and names it.
        """
        self._on_event = on_event
        self._prepare = prepare
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._open_turns: dict[str, str] = {}
        self._current: Command | None = None
        """What is being applied."""
        self._lock = threading.Lock()
        self._stop_asked = threading.Event()
        self._gone: ErrorInfo | None = None
        self._engine = InferenceEngine(
            loader,
            self._report,
            clock=clock,
            registry=registry,
            options=options,
            is_stopping=self._stop_asked.is_set,
        )
        self._thread = threading.Thread(target=self._run, name="foretell-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Queue a command; callable from every thread, never blocks.

        Once the engine has ended, a command that promises an answer gets it at once, on the calling
        thread.
        """
        with self._lock:
            gone = self._gone
            if gone is None:
                if isinstance(command, SubmitTurn):
                    self._open_turns[command.request_id] = command.chat_id
                if isinstance(command, Stop):
                    self._stop_asked.set()
                self._commands.put(command)
                return
        self._refuse(command, gone)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end after a `Stop`; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        gone = ErrorInfo("failure", "the engine has stopped")
        ending: EngineEvent = EngineStopped()
        try:
            self._report(EngineReady(self._prepare()))
            try:
                self._serve()
            finally:
                self._engine.close()
        except TURN_ERRORS as error:
            # Not one turn's: the backend could not be prepared, say. Its own words say why.
            log.exception("the engine could not go on")
            gone = describe_error(error)
            ending = EngineFailed(gone)
        except Exception as error:
            log.exception("the engine failed")
            text = f"the engine failed: {error or type(error).__name__}"
            gone = ErrorInfo("failure", text, "start the program again; the log has the details")
            ending = EngineFailed(gone)
        self._close(gone)
        self._on_event(ending)

    def _serve(self) -> None:
        """Apply commands between two steps; sleep only when there is nothing to do."""
        wait_s: float | None = None
        has_been_quiet = False
        while True:
            command = self._next_command(wait_s)
            if command is not None:
                self._current = command
                self._engine.apply(command)
                self._current = None
                if isinstance(command, Stop):
                    return
                wait_s, has_been_quiet = 0.0, False
            elif self._engine.step():
                wait_s = 0.0
            elif not has_been_quiet:
                wait_s, has_been_quiet = QUIET_S, True
            else:
                wait_s = 0.0 if self._engine.work_in_background() else None

    def _next_command(self, wait_s: float | None) -> Command | None:
        """The next command, or None after so many seconds; None waits for ever."""
        try:
            return self._commands.get(block=wait_s != 0.0, timeout=wait_s or None)
        except queue.Empty:
            return None

    def _report(self, event: EngineEvent) -> None:
        if isinstance(event, TurnFinished | TurnFailed):
            self._open_turns.pop(event.request_id, None)
        self._on_event(event)

    def _close(self, gone: ErrorInfo) -> None:
        """Refuse commands from now on and fail what was never answered."""
        with self._lock:
            self._gone = gone
            open_turns = dict(self._open_turns)
            self._open_turns.clear()
        for request_id, chat_id in open_turns.items():
            self._on_event(TurnFailed(request_id, chat_id, gone))
        for command in self._unanswered():
            if not isinstance(command, SubmitTurn):
                self._refuse(command, gone)

    def _refuse(self, command: Command, gone: ErrorInfo) -> None:
        """Answer what promises an answer."""
        match command:
            case SubmitTurn(request_id=request_id, chat_id=chat_id):
                self._on_event(TurnFailed(request_id, chat_id, gone))
            case LoadModel(name=name):
                self._on_event(ModelFailed(name, gone))
            case UpdateSpeculation(options):
                self._on_event(SpeculationChanged(options, None, gone.message))
            case MeasureRows():
                self._on_event(RowsMeasured(()))

    def _unanswered(self) -> list[Command]:
        commands = [] if self._current is None else [self._current]
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except queue.Empty:
                return commands
