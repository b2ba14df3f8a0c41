"""Commands before the engine runs, events from another thread, errors in one line."""

from __future__ import annotations

import threading
from collections.abc import Callable

from textual.message import Message

from app.bridge import EngineBridge, EngineEventArrived
from app.errors import describe, describe_info
from engine.commands import CancelTurn, Command, ForgetChat, Stop
from engine.events import EngineEvent, ErrorInfo, Notice
from storage.errors import NotEnoughSpace


class ThreadedEngine:
    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.emit: Callable[[EngineEvent], None] = lambda event: None

    def start(self, on_event: Callable[[EngineEvent], None]) -> ThreadedEngine:
        self.emit = on_event
        return self

    def submit(self, command: Command) -> None:
        self.commands.append(command)

    def join(self, timeout_s: float) -> bool:
        return isinstance(self.commands[-1], Stop)


def test_commands_given_before_the_start_go_first_and_in_order() -> None:
    engine = ThreadedEngine()
    bridge = EngineBridge(engine.start, lambda message: True)
    bridge.submit(ForgetChat("a"))
    bridge.submit(CancelTurn("b"))
    bridge.attach(bridge.start())
    bridge.submit(ForgetChat("c"))
    assert engine.commands == [ForgetChat("a"), CancelTurn("b"), ForgetChat("c")]


def test_events_of_the_engine_thread_become_messages_in_order() -> None:
    posted: list[Message] = []
    engine = ThreadedEngine()
    bridge = EngineBridge(engine.start, lambda message: not posted.append(message))
    bridge.attach(bridge.start())
    events = [Notice(str(number)) for number in range(50)]
    thread = threading.Thread(target=lambda: [engine.emit(event) for event in events])
    thread.start()
    thread.join()
    assert [m.event for m in posted if isinstance(m, EngineEventArrived)] == events


def test_closing_stops_the_engine_and_an_engine_that_never_ran_needs_nothing() -> None:
    engine = ThreadedEngine()
    bridge = EngineBridge(engine.start, lambda message: True)
    bridge.close()
    assert engine.commands == []
    bridge.attach(bridge.start())
    bridge.close()
    assert engine.commands == [Stop()]


def test_an_error_is_a_title_a_message_and_a_hint() -> None:
    described = describe(NotEnoughSpace("needs 10 GB, 4 GB are free", hint="free some space"))
    assert described.title == "Not enough space"
    assert described.line == "needs 10 GB, 4 GB are free: free some space"
    missing = describe(FileNotFoundError(2, "No such file or directory", "/m.gguf"))
    assert missing.line == "/m.gguf: No such file or directory"
    assert describe_info(ErrorInfo("does_not_fit", "[/]")).line == "[/]"
