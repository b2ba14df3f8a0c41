"""What the benches measure and how it is summed up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.bench_report import prompts, report_dict
from app.bench_tables import tables_of
from app.machine import Busy
from engine.bench import (
    BenchReport,
    PairedFigure,
    TurnSample,
    agent_scenario,
    recommend,
    spec_scenario,
)
from engine.bench_concurrent import Cell, cells, run_cell, turns_of
from engine.commands import SubmitTurn
from engine.events import EngineEvent, TurnFinished, TurnStats


def sample(turn: str, index: int, is_speculative: bool, tok_s: float, ids: int = 1) -> TurnSample:
    stats = TurnStats(completion_tokens=11, decode_ms=10_000 / tok_s, ttft_ms=20.0)
    return TurnSample(turn, index, is_speculative, stats, (ids,))


def report(*samples: TurnSample) -> BenchReport:
    return BenchReport("spec", "m", list(samples))


def test_s60_the_four_turns_are_played_in_order() -> None:
    scenario = spec_scenario(prompts())
    assert [turn.name for turn in scenario.turns] == [
        "one_word",
        "prose",
        "quote_file",
        "quote_answer",
    ]


def test_s61_agent_turns_share_a_long_prompt_of_tools() -> None:
    scenario = agent_scenario(prompts())
    assert len(scenario.turns) >= 3
    assert "write_file" in scenario.system


def test_s65_a_figure_is_the_median_ratio_of_its_pairs_with_the_spread() -> None:
    (figure,) = report(
        sample("prose", 0, False, 100.0),
        sample("prose", 0, True, 150.0),
        sample("prose", 1, True, 90.0),
        sample("prose", 1, False, 100.0),
        sample("prose", 2, False, 100.0),
        sample("prose", 2, True, 110.0),
    ).figures()
    assert figure.ratios == pytest.approx((1.5, 0.9, 1.1))
    assert figure.ratio == pytest.approx(1.1)
    assert figure.streams_match


def test_s65_a_mode_without_its_other_half_is_no_figure() -> None:
    assert report(sample("prose", 0, True, 100.0)).figures() == []


def test_s65_a_busy_machine_is_said_with_the_program_that_uses_most() -> None:
    assert Busy(0.02, "idle").warning is None
    assert "compiler" in (Busy(0.6, "compiler").warning or "")


def test_streams_that_differ_are_shouted() -> None:
    run = report(sample("prose", 0, False, 1.0, ids=1), sample("prose", 0, True, 1.0, ids=2))
    (table,) = tables_of("spec", report_dict(run, run.figures()))
    assert "DIFFERENT" in table.text()[1]


def figure(turn: str, ratio: float) -> PairedFigure:
    return PairedFigure(turn, 100.0, 100.0 * ratio, (ratio,), (1.0,), 9, 8, 3, (3, 3, 2), "", True)


@pytest.mark.parametrize(
    ("quotes", "prose", "is_enabled", "words"),
    [
        (
            (1.9, 1.9),
            1.0,
            True,
            "1.9x when quoting and costs nothing on prose: leave it on, window 4",
        ),
        ((1.9, 1.9), 0.9, True, "costs 10% on prose"),
        ((1.0, 1.0), 1.0, False, "gains nothing"),
        ((1.15, 0.8), 1.0, False, "gains nothing"),
    ],
)
def test_the_recommendation_is_a_setting_and_the_sentence_for_it(
    quotes: tuple[float, float], prose: float, is_enabled: bool, words: str
) -> None:
    """The sentence went by the median of the quoting turns, the key by the best of them."""
    turns = zip(("quote_file", "quote_answer"), quotes, strict=True)
    figures = [figure("prose", prose), *(figure(turn, ratio) for turn, ratio in turns)]
    advice = recommend(figures, window=4)
    assert (advice.is_enabled, advice.window) == (is_enabled, 4)
    assert words in advice.text


def test_a_run_stopped_early_recommends_nothing() -> None:
    advice = recommend([], window=None)
    assert advice.is_enabled is None
    assert advice.text.startswith("Stopped")


def test_s63_the_table_has_one_two_and_four_chats_together_and_staggered() -> None:
    assert cells() == [(1, 0), (2, 0), (2, 600), (4, 0), (4, 600)]


def test_s63_a_cell_counts_all_tokens_over_the_whole_time() -> None:
    cell = Cell(2, 600, True)
    turns = turns_of(cell, ["a", "b"], "run")
    slept: list[float] = []
    submitted: list[SubmitTurn] = []
    clock = iter((0.0, 2.0))

    def finish() -> Iterator[EngineEvent]:
        for turn, ttft_ms in zip(turns, (10.0, 30.0), strict=True):
            yield TurnFinished(
                turn.request_id,
                turn.chat_id,
                "length",
                "",
                (1,) * 50,
                TurnStats(ttft_ms=ttft_ms),
                60,
            )

    result = run_cell(
        cell,
        turns,
        submit=submitted.append,
        next_event=finish().__next__,
        clock=clock.__next__,
        sleep=slept.append,
    )
    assert submitted == turns
    assert slept == [0.6]
    assert (result.tok_s, result.ttft_ms) == (50.0, 20.0)


def test_an_answer_of_one_token_is_no_figure() -> None:
    """Its rate is 0: the ratio was NaN, in the median of its turn and in what calls itself JSON."""
    only_first = TurnSample(
        "one_word", 0, False, TurnStats(completion_tokens=1, ttft_ms=20.0), (1,)
    )
    same = TurnSample("one_word", 0, True, TurnStats(completion_tokens=1, ttft_ms=20.0), (1,))
    assert report(only_first, same).figures() == []
