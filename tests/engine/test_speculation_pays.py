"""What speculation brings and costs on recorded turns, with told step costs: no noise, no doubt.

A forward of R rows takes 10 (1 + 0.12 (R - 1)) ms, as measured on a small quantized model. Words
stand for tokens. Whole pipeline: drafter, window, governor and loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from engine.speculative.drafters import drafter_factory
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.options import SpeculationOptions
from engine.speculative.registry import SpeculatorRegistry, default_registry
from engine.speculative.runtime import SpeculationRuntime
from engine.speculative.target import TargetTraits
from tests.engine.fakes_speculative import FakeClock, RecitingTarget, Turn, prefill
from tests.engine.recorded_texts import RECORDED
from tests.engine.speculative_bench import take_step

PLAIN_MS = 10.0


def words_of(*texts: str) -> list[list[int]]:
    known: dict[str, int] = {}
    return [
        [known.setdefault(word, len(known)) for word in text.replace("\n", " \n ").split(" ")]
        for text in texts
    ]


class Timed:
    """A model at told costs, its runtime shared by every answer."""

    def __init__(
        self, registry: SpeculatorRegistry | None = None, row_share: float = 0.12, **options: object
    ) -> None:
        self.clock = FakeClock()
        self.row_share = row_share
        self.runtime = SpeculationRuntime(
            registry or default_registry(),
            TargetTraits(),
            None,
            options=SpeculationOptions(**options),  # type: ignore[arg-type]
            clock=self.clock,
        )
        self.execution: SpeculativeExecution | None = None
        self.kinds: list[str] = []

    def gain(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Speed of one answer against plain decoding, on a chat of its own."""
        target = RecitingTarget(
            text=[*prompt, *answer],
            clock=self.clock,
            row_ms=lambda rows: PLAIN_MS * (1 + self.row_share * (rows - 1)),
        )
        turn = Turn(prompt, max_tokens=len(answer))
        token_id = turn.draw(prefill(target, prompt, 64), len(prompt))
        armed = self.runtime.arm(target, max_tokens=len(answer), committed_ids=prompt)
        assert isinstance(armed, SpeculativeExecution)
        self.execution, began = armed, self.clock.now
        while not turn.is_over:
            assert token_id is not None
            result = take_step(armed, token_id, turn.num_remaining, turn.draw)
            token_id = result.token_ids[-1]
            self.kinds.append(result.kind)
        assert turn.emitted == list(answer)
        return (len(answer) - 1) * PLAIN_MS / ((self.clock.now - began) * 1e3)


@pytest.mark.parametrize("is_warm", [False, True], ids=["first request", "second request"])
@pytest.mark.parametrize(
    ("kind", "least"),
    [("quote", 2.8), ("quote-own", 3.5), ("code-edit", 2.0), ("json", 1.5), ("prose", 0.98)],
)
def test_recorded_answer_gains_at_least(kind: str, least: float, is_warm: bool) -> None:
    recorded = next(r for r in RECORDED if r.kind == kind)
    prompt, answer = words_of(recorded.prompt, recorded.answer)
    timed = Timed()
    if is_warm:
        timed.gain(prompt, answer)
    assert timed.gain(prompt, answer) >= least


@pytest.mark.parametrize("is_warm", [False, True], ids=["first request", "second request"])
def test_one_word_answer_costs_next_to_nothing(is_warm: bool) -> None:
    """Its few tokens look like the question's, which is no reason to draft eight of them."""
    prompt, answer = words_of(
        "<user> what is the capital of France ? <end> <assistant>",
        "The capital of France is Paris . <end>",
    )
    timed = Timed()
    if is_warm:
        timed.gain(prompt, answer)
    assert timed.gain(prompt, answer) >= 0.95


@pytest.mark.parametrize("window", [1, 4, 8, 16])
def test_d4_dead_drafter_is_parked_and_costs_little(window: int) -> None:
    """0 of 3,595 drafts accepted, and the run slower for good."""
    registry = SpeculatorRegistry()
    registry.register("dead", drafter_factory("script:0", [0], [0]))
    rng = random.Random(1)
    prompt, answer = [1, 2, 3], [rng.randrange(400) for _ in range(600)]
    timed = Timed(registry, algorithm="dead", window=window)
    assert timed.gain(prompt, answer) >= 1 - 0.02 * window
    assert timed.execution is not None
    assert timed.execution.stats.draft_n <= 30 * window
    assert timed.execution.governor_state != "holding"


def test_d4_dead_drafter_costs_nothing_once_the_window_knows() -> None:
    registry = SpeculatorRegistry()
    registry.register("dead", drafter_factory("script:0", [0], [0]))
    rng = random.Random(1)
    timed = Timed(registry, algorithm="dead")
    timed.gain([1, 2, 3], [rng.randrange(400) for _ in range(300)])
    assert timed.gain([1, 2, 3], [rng.randrange(400) for _ in range(300)]) >= 0.98


def test_free_drafter_ends_its_park_when_the_text_begins_to_repeat() -> None:
    """Prose parks the look-up; a quote behind it would otherwise run 32 steps plain."""
    quoted = list(range(100, 150))
    novel = [int(i) for i in np.random.default_rng(4).integers(0, 90, 60)]
    timed = Timed()
    timed.gain(quoted, [*novel, *quoted])
    assert "parked" in timed.kinds
    assert timed.kinds[-1] == "verify"
    assert timed.execution is not None
    assert timed.execution.stats.draft_n_accepted >= 35


def test_chosen_window_beats_the_fixed_one_where_it_matters() -> None:
    """On quotes it goes up to sixteen rows; elsewhere it is as good as a window of eight."""
    for kind, factor in (("quote", 1.05), ("quote-own", 1.1), ("code-edit", 1.0), ("prose", 0.99)):
        recorded = next(r for r in RECORDED if r.kind == kind)
        prompt, answer = words_of(recorded.prompt, recorded.answer)
        adaptive, fixed = Timed(), Timed(window=8)
        for timed in (adaptive, fixed):
            timed.gain(prompt, answer)
        assert adaptive.gain(prompt, answer) >= factor * fixed.gain(prompt, answer)
