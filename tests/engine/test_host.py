"""The engine thread: commands from anywhere, events in order, an end that hangs nobody."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.base import BackendUnavailable
from engine.commands import (
    CancelTurn,
    LoadModel,
    MeasureRows,
    Stop,
    SubmitTurn,
    UpdateSpeculation,
)
from engine.events import (
    EngineEvent,
    EngineFailed,
    EngineReady,
    EngineStopped,
    ModelFailed,
    ModelLoaded,
    ModelLoading,
    RowsMeasured,
    SpeculationChanged,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from engine.host import EngineHost
from engine.speculative.options import SpeculationOptions
from tests.engine.fakes_engine import GREEDY, FakeExecutable, FakeLoader, fake_model

LOAD = LoadModel(Path("tiny.gguf"), "tiny")
PATIENCE_S = 20.0


class _Events:
    """Events as they come, taken by a test that never sleeps."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self.seen: list[EngineEvent] = []

    def __call__(self, event: EngineEvent) -> None:
        self._queue.put(event)

    def until(self, kind: type) -> EngineEvent:
        while True:
            event = self._queue.get(timeout=PATIENCE_S)
            self.seen.append(event)
            if isinstance(event, kind):
                return event


@pytest.fixture
def events() -> _Events:
    return _Events()


@pytest.fixture
def host(events: _Events) -> Iterator[EngineHost]:
    host = EngineHost(FakeLoader(), events, prepare=lambda: "fake")
    yield host
    assert _stop(host)


def _stop(host: EngineHost) -> bool:
    host.submit(Stop())
    return host.join(PATIENCE_S)


def _turn(request_id: str, **fields: object) -> SubmitTurn:
    settings: dict[str, object] = {"max_tokens": 5, **fields}
    return SubmitTurn(request_id, request_id, "hello", GREEDY, **settings)  # type: ignore[arg-type]


def test_a_turn_runs_from_submit_to_finish(host: EngineHost, events: _Events) -> None:
    host.submit(LOAD)
    host.submit(_turn("one"))
    finished = events.until(TurnFinished)
    assert isinstance(finished, TurnFinished)
    assert len(finished.token_ids) == 5
    kinds = [type(event) for event in events.seen]
    assert kinds[:3] == [EngineReady, ModelLoading, ModelLoaded]


def test_the_backend_is_prepared_on_the_engine_thread(events: _Events) -> None:
    threads = []

    def prepare() -> str:
        threads.append(threading.current_thread().name)
        return "native"

    host = EngineHost(FakeLoader(), events, prepare=prepare)
    ready = events.until(EngineReady)
    assert ready == EngineReady("native")
    assert threads == ["foretell-engine"]
    assert _stop(host)


def test_events_come_in_order_on_one_thread() -> None:
    threads: set[str] = set()
    done = threading.Event()
    seen: list[EngineEvent] = []

    def on_event(event: EngineEvent) -> None:
        threads.add(threading.current_thread().name)
        seen.append(event)
        if isinstance(event, EngineStopped):
            done.set()

    host = EngineHost(FakeLoader(), on_event)
    host.submit(LOAD)
    for n in range(3):
        host.submit(_turn(str(n)))
    host.submit(Stop())
    assert done.wait(PATIENCE_S)
    assert threads == {"foretell-engine"}
    assert isinstance(seen[-1], EngineStopped)


def test_a_named_system_prompt_is_warmed_once_it_is_quiet(events: _Events) -> None:
    warmed = threading.Event()
    executable = FakeExecutable(on_forward=warmed.set)
    host = EngineHost(FakeLoader(fake_model(executable)), events)
    host.submit(replace(LOAD, system_prompt="You answer in one line, always."))
    assert warmed.wait(PATIENCE_S)
    assert _stop(host)
    assert executable.num_forwards == 1


def test_a_cancel_reaches_a_running_turn(host: EngineHost, events: _Events) -> None:
    host.submit(LOAD)
    host.submit(_turn("long", max_tokens=100_000))
    events.until(TurnStarted)
    host.submit(CancelTurn("long"))
    finished = events.until(TurnFinished)
    assert isinstance(finished, TurnFinished)
    assert finished.finish_reason == "cancelled"


def test_stopping_cancels_what_runs_and_releases_the_model(events: _Events) -> None:
    executable = FakeExecutable()
    host = EngineHost(FakeLoader(fake_model(executable)), events)
    host.submit(LOAD)
    host.submit(_turn("long", max_tokens=100_000))
    events.until(TurnStarted)
    assert _stop(host)
    assert isinstance(events.until(TurnFinished), TurnFinished)
    assert isinstance(events.until(EngineStopped), EngineStopped)
    assert executable.is_closed


def test_a_stop_interrupts_a_load(events: _Events) -> None:
    loading = threading.Event()
    stopping = threading.Event()

    class SlowLoader:
        def check(self, path: Path, *, progress: Callable[[str, float], None], **_: object) -> Any:
            loading.set()
            assert stopping.wait(PATIENCE_S)
            progress("reading", 0.5)
            raise AssertionError("the load went on")

    host = EngineHost(SlowLoader(), events)
    host.submit(LOAD)
    assert loading.wait(PATIENCE_S)
    host.submit(Stop())
    stopping.set()
    assert host.join(PATIENCE_S)
    failed = events.until(ModelFailed)
    assert isinstance(failed, ModelFailed)
    assert "interrupted" in failed.error.message


def test_a_bug_ends_the_engine_and_answers_every_open_turn(events: _Events) -> None:
    executable = FakeExecutable(fail_at=3, error=KeyError("a bug"))
    host = EngineHost(FakeLoader(fake_model(executable)), events)
    host.submit(LOAD)
    host.submit(_turn("one"))
    host.submit(_turn("two"))
    failed = events.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert "a bug" in failed.error.message
    answered = {e.request_id for e in events.seen if isinstance(e, TurnFailed)}
    assert answered == {"one", "two"}
    assert not [e for e in events.seen if isinstance(e, TurnFinished)]
    assert host.join(PATIENCE_S)
    assert executable.is_closed


def test_a_bug_answers_the_command_it_is_in_and_those_behind_it(events: _Events) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def on_forward() -> None:
        reached.set()
        assert go_on.wait(PATIENCE_S)

    executable = FakeExecutable(fail_at=1, error=KeyError("a bug"), on_forward=on_forward)
    host = EngineHost(FakeLoader(fake_model(executable)), events)
    host.submit(LOAD)
    host.submit(MeasureRows((1, 2), rounds=1, context_len=8))
    assert reached.wait(PATIENCE_S)
    host.submit(UpdateSpeculation(SpeculationOptions()))
    host.submit(replace(LOAD, name="next"))
    go_on.set()
    events.until(EngineFailed)
    answers = [e for e in events.seen if isinstance(e, RowsMeasured | SpeculationChanged)]
    assert [type(answer) for answer in answers] == [RowsMeasured, SpeculationChanged]
    assert [e.name for e in events.seen if isinstance(e, ModelFailed)] == ["next"]


def test_after_the_end_what_promises_an_answer_is_answered_at_once(events: _Events) -> None:
    host = EngineHost(FakeLoader(), events)
    assert _stop(host)
    events.until(EngineStopped)
    host.submit(_turn("late"))
    assert isinstance(events.until(TurnFailed), TurnFailed)
    host.submit(LOAD)
    assert isinstance(events.until(ModelFailed), ModelFailed)
    host.submit(UpdateSpeculation(SpeculationOptions()))
    changed = events.until(SpeculationChanged)
    assert isinstance(changed, SpeculationChanged)
    assert changed.declined == "the engine has stopped"
    host.submit(MeasureRows((1,), rounds=1))
    assert events.until(RowsMeasured) == RowsMeasured(())
    host.submit(CancelTurn("late"))
    assert _stop(host)


def test_a_backend_that_cannot_be_imported_is_an_engine_failure(events: _Events) -> None:
    def prepare() -> str:
        raise ImportError("no backend here")

    host = EngineHost(FakeLoader(), events, prepare=prepare)
    host.submit(_turn("one"))
    failed = events.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert "no backend here" in failed.error.message
    assert host.join(PATIENCE_S)


def test_a_backend_that_cannot_run_here_says_so_in_its_own_words(events: _Events) -> None:
    def prepare() -> str:
        raise BackendUnavailable("cuda needs an NVIDIA GPU", hint="use --backend auto")

    host = EngineHost(FakeLoader(), events, prepare=prepare)
    failed = events.until(EngineFailed)
    assert isinstance(failed, EngineFailed)
    assert (failed.error.message, failed.error.hint) == (
        "cuda needs an NVIDIA GPU",
        "use --backend auto",
    )
    assert host.join(PATIENCE_S)
