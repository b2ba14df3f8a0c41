"""The bench screen: runs on the engine in turns, keeps what is done, applies what it says."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.bench_runner import BenchFailed, BenchRunner, BenchStopped
from app.machine import Busy
from engine.bench import BenchReport, TurnSample, run_paired, spec_scenario
from engine.commands import CancelTurn, Command, ForgetChat, SubmitTurn, UpdateSpeculation
from engine.events import (
    EngineFailed,
    ErrorInfo,
    SpeculationChanged,
    TextDelta,
    TurnFailed,
    TurnFinished,
    TurnStats,
)
from engine.speculative.options import SpeculationOptions
from storage.bench_runs import BenchStore
from tests.app.app_fixtures import open_stage
from tests.app.fake_engine import make_model_info

PROMPTS = dict.fromkeys(("one_word", "prose", "quote_file", "quote_answer"), "Say something.")


class EchoEngine:
    """Answers every command at once, as the engine would."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.runner = BenchRunner(self.submit)
        self.is_enabled = True

    def submit(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, UpdateSpeculation):
            self.is_enabled = command.options.is_enabled
            self.runner.take(SpeculationChanged(command.options, "ngram", None))
        elif isinstance(command, SubmitTurn):
            self.runner.take(self.answer(command))

    def answer(self, turn: SubmitTurn) -> TurnFinished | TurnFailed:
        ms = 100.0 if self.is_enabled else 200.0
        stats = TurnStats(completion_tokens=11, decode_ms=ms, ttft_ms=10.0)
        return TurnFinished(turn.request_id, turn.chat_id, "stop", "text", (1, 2), stats, 5)


def test_s60_a_run_plays_each_mode_in_turns_and_reports_the_ratio() -> None:
    engine = EchoEngine()
    report = BenchReport("spec", "m")
    run_paired(
        engine.runner, spec_scenario(PROMPTS), report, passes=2, options=SpeculationOptions()
    )
    modes = [c.options.is_enabled for c in engine.commands if isinstance(c, UpdateSpeculation)]
    assert modes == [False, True, True, False, True]
    assert [round(figure.ratio, 3) for figure in report.figures()] == [2.0] * 4


def test_every_chat_of_a_run_is_released() -> None:
    engine = EchoEngine()
    report = BenchReport("spec", "m")
    run_paired(
        engine.runner, spec_scenario(PROMPTS), report, passes=1, options=SpeculationOptions()
    )
    used = {c.chat_id for c in engine.commands if isinstance(c, SubmitTurn)}
    assert used == {c.chat_id for c in engine.commands if isinstance(c, ForgetChat)}


def test_a_stop_keeps_what_is_done_and_restores_the_policy() -> None:
    engine = EchoEngine()
    report = BenchReport("spec", "m")
    stop_after: Callable[[object], None] = lambda _: engine.runner.stop()  # noqa: E731
    options = SpeculationOptions(window=3)
    with pytest.raises(BenchStopped):
        run_paired(
            engine.runner,
            spec_scenario(PROMPTS),
            report,
            passes=2,
            options=options,
            on_sample=stop_after,
        )
    assert len(report.samples) == 1
    assert engine.commands[-1] == UpdateSpeculation(options)


def test_a_stopped_turn_is_cancelled() -> None:
    commands: list[Command] = []
    runner = BenchRunner(commands.append)
    turn = SubmitTurn("bench-x", "bench-x", "hi", sampling=None)  # type: ignore[arg-type]
    thread = threading.Timer(0.0, runner.stop)
    thread.start()
    with pytest.raises(BenchStopped):
        runner.run_turn(turn)
    thread.join()
    assert commands[-1] == CancelTurn("bench-x")


def test_a_failed_turn_ends_the_run_with_its_reason() -> None:
    engine = EchoEngine()
    error = ErrorInfo("failure", "the device is gone")
    engine.answer = lambda turn: TurnFailed(turn.request_id, turn.chat_id, error)  # type: ignore[method-assign]
    with pytest.raises(BenchFailed, match="the device is gone"):
        run_paired(
            engine.runner,
            spec_scenario(PROMPTS),
            BenchReport("spec", "m"),
            passes=1,
            options=SpeculationOptions(),
        )


def test_other_chats_events_are_left_to_them() -> None:
    runner = BenchRunner(lambda _: None)
    delta = TextDelta("turn-1", "chat", "hello", TurnStats(), 3)
    assert not runner.take(delta)
    assert runner.take(TextDelta("bench-1", "bench-1", "hello", TurnStats(), 3))


def test_an_engine_that_fails_ends_the_run_with_its_reason() -> None:
    engine = EchoEngine()
    options = SpeculationOptions()

    def submit(command: Command) -> None:
        if isinstance(command, SubmitTurn):
            engine.runner.take(EngineFailed(ErrorInfo("failure", "a bug")))
        elif len(engine.commands) == 0:
            engine.submit(command)

    engine.runner._submit = submit
    with pytest.raises(BenchFailed, match="a bug"):
        run_paired(
            engine.runner,
            spec_scenario(PROMPTS),
            BenchReport("spec", "m"),
            passes=1,
            options=options,
        )


def test_a_turn_cut_short_by_another_model_is_no_figure() -> None:
    engine = EchoEngine()
    engine.answer = lambda turn: TurnFinished(  # type: ignore[method-assign]
        turn.request_id, turn.chat_id, "cancelled", "", (), TurnStats(), 0
    )
    report = BenchReport("spec", "m")
    with pytest.raises(BenchStopped):
        run_paired(
            engine.runner, spec_scenario(PROMPTS), report, passes=1, options=SpeculationOptions()
        )
    assert report.samples == []


async def test_quitting_ends_a_running_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.screens.bench.measure_busy", lambda: Busy(0.0, ""))
    async with open_stage(tmp_path) as stage:
        await stage.pilot.press("f4")
        await stage.settle()
        await stage.pilot.press("enter")
        await stage.until(lambda: bool(stage.engine.sent(SubmitTurn)))
        assert (runner := stage.app.bench) is not None
        await stage.pilot.press("ctrl+q")
    assert runner._stopped.is_set()


def _samples(turn: str, spec_ms: float) -> list[TurnSample]:
    """A pair, the plain half 200 ms."""
    stats = [TurnStats(completion_tokens=11, decode_ms=ms, ttft_ms=10.0) for ms in (200.0, spec_ms)]
    return [TurnSample(turn, 0, bool(i), stats[i], (1, 2)) for i in range(2)]


async def test_a_run_belongs_to_the_model_and_options_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stored under the hash of whatever was loaded when it ended."""
    changed = SpeculationOptions(window=9)
    async with open_stage(tmp_path) as stage:
        app = stage.app

        def change() -> None:
            app.model = dataclasses.replace(app.model, info=make_model_info(content_hash="other"))
            app.change_settings(dataclasses.replace(app.settings, speculation=changed))

        def run(runner: BenchRunner, _: object, report: BenchReport, **settings: Any) -> None:
            report.samples += [*_samples("prose", 200.0), *_samples("quote_file", 100.0)]
            app.call_from_worker(change)
            runner.update_speculation(settings["options"])
            raise BenchStopped

        monkeypatch.setattr("app.screens.bench.measure_busy", lambda: Busy(0.0, ""))
        monkeypatch.setattr("app.screens.bench.run_paired", run)
        app.model = dataclasses.replace(app.model, info=make_model_info(content_hash="measured"))
        started_with = app.settings.speculation
        await stage.pilot.press("f4")
        await stage.settle()
        await stage.pilot.press("enter")
        await stage.until(lambda: app.bench is None and "gains 2.0x" in stage.words)
        (kept,) = BenchStore(stage.store.database).list_runs()
        assert kept.model_sha256 == "measured"
        assert kept.options == dataclasses.asdict(started_with)
        assert stage.engine.sent(UpdateSpeculation)[-1].options == changed
        await stage.pilot.press("a")
        await stage.settle()
        assert stage.saved[-1].speculation == started_with
