"""The draft length chosen per step, against the analytic optimum on simulated costs (C8)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.speculative.window import AdaptiveWindow, FixedWindow, RowCosts, WindowPolicy

Cost = Callable[[int], float]

COSTS: dict[str, Cost] = {
    "flat": lambda rows: 10.0 + 0.1 * rows,
    "linear": lambda rows: 10.0 + 2.0 * rows,
    "dear rows": lambda rows: 2.0 + 8.0 * rows,
    "step at 4": lambda rows: 10.0 + 0.5 * rows + (20.0 if rows > 4 else 0.0),
    "step at 9": lambda rows: 10.0 + 0.5 * rows + (25.0 if rows > 8 else 0.0),
}


class Simulated:
    """Windows with a constant chance per draft, on a told cost curve."""

    def __init__(self, cost: Cost, accept: float, *, seed: int = 0, tells: bool = False) -> None:
        self.window = AdaptiveWindow()
        self.cost, self.accept = cost, accept
        self.tells = tells
        """Whether the drafter states its (true) confidence."""
        self._rng = random.Random(seed)
        self.widths: list[int] = []
        self.ms = 0.0
        self.num_tokens = self.num_right = self.num_verifies = 0
        for _ in range(3):
            self.window.costs.record(1, cost(1))

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            num = self.window.max_drafts
            probs = [self.accept ** (i + 1) for i in range(num)] if self.tells else None
            width = self.window.choose(
                probs, num, num_right=self.num_right, num_verifies=self.num_verifies
            )
            accepted = 0
            while accepted < num and self._rng.random() < self.accept:
                accepted += 1
            judged = min(width + 1, num)
            self.window.costs.record(width + 1, self.cost(width + 1))
            self.window.acceptance.record(probs, judged, min(accepted, judged))
            self.num_right += min(accepted, judged)
            self.num_verifies += width > 0
            self.widths.append(width)
            self.ms += self.cost(width + 1)
            self.num_tokens += min(accepted, width) + 1

    def best_rate(self) -> float:
        """Tokens per millisecond at the best constant width."""
        return max(self.rate(width) for width in range(WindowPolicy().ceiling + 1))

    def rate(self, width: int) -> float:
        expected = sum(self.accept**i for i in range(width + 1))
        return expected / self.cost(width + 1)


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("accept", [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("cost", COSTS)
def test_c8_converges_to_the_best_width(cost: str, accept: float, tells: bool) -> None:
    sim = Simulated(COSTS[cost], accept, tells=tells)
    sim.run(400)
    settled = sim.widths[-200:]
    rate = sum(sim.rate(width) for width in settled) / len(settled)
    assert rate >= 0.93 * sim.best_rate()


@pytest.mark.parametrize("cost", COSTS)
def test_c8_useless_drafts_cost_next_to_nothing(cost: str) -> None:
    """Never below 97 % of plain decoding once the first windows have shown it."""
    sim = Simulated(COSTS[cost], 0.0)
    sim.run(30)
    sim.ms = sim.num_tokens = 0
    sim.num_right = 3  # no longer held back as an unproven turn is
    sim.run(1000)
    assert sim.num_tokens / sim.ms >= 0.97 / COSTS[cost](1)


@pytest.mark.parametrize("seed", range(5))
def test_c8_width_does_not_flap_at_a_pivot(seed: int) -> None:
    """Two widths equally good: at most one change in twenty rounds, on average."""
    sim = Simulated(COSTS["linear"], 0.62, seed=seed)
    sim.run(200)
    sim.widths.clear()
    sim.run(400)
    num_changes = sum(a != b for a, b in zip(sim.widths, sim.widths[1:], strict=False))
    assert num_changes <= 400 / 20


def test_c8_fully_accepted_windows_do_not_ratchet_the_width_down() -> None:
    """A window accepted whole says nothing of the draft it did not have."""
    sim = Simulated(COSTS["flat"], 1.0)
    sim.run(100)
    assert sim.widths[-1] == WindowPolicy().ceiling


def test_text_that_turns_predictable_is_noticed_while_nothing_is_drafted() -> None:
    """The first draft is judged although no row was spent on it."""
    sim = Simulated(COSTS["dear rows"], 0.0)
    sim.run(200)
    assert sim.widths[-1] == 0
    sim.accept = 1.0
    sim.run(100)
    assert sim.widths[-1] > 0


def test_fixed_window_until_there_are_samples() -> None:
    window = AdaptiveWindow()
    assert window.max_drafts == 8
    assert window.choose(None, 8, num_right=3) == 8
    for _ in range(3):
        window.costs.record(1, 10.0)
    assert window.choose(None, 8, num_right=3) == 8
    for _ in range(3):
        window.costs.record(9, 30.0)
    assert window.choose([0.01] * 8, 8, num_right=3) == 0


def test_stated_confidence_is_used_as_soon_as_a_plain_step_is_known() -> None:
    """Until a verify was measured its rows count as a quarter of a plain step each."""
    window = AdaptiveWindow()
    for _ in range(3):
        window.costs.record(1, 10.0)
    assert window.choose([0.1, 0.05], 2, num_right=3) == 0
    assert window.choose([0.6, 0.1], 2, num_right=3) == 1
    assert window.choose([0.99**i for i in range(1, 9)], 8, num_right=3) == 8


def test_unproven_turn_risks_two_likely_drafts_at_most() -> None:
    """A one-word answer has no time to earn a rejected window back."""
    window = AdaptiveWindow()
    for _ in range(3):
        window.costs.record(1, 10.0)
    sure = [0.9**i for i in range(1, 9)]
    assert window.choose(sure, 8) == 2
    assert window.choose(sure, 8, num_right=3) > 2
    assert window.choose([0.45, 0.4], 2) == 0
    assert window.choose([0.55, 0.5], 2) > 0
    assert window.choose([0.55, 0.5], 2, num_verifies=1) == 0
    assert not window.promises_to_pay([0.55, 0.5], 2, num_verifies=3)


def test_s23_preferred_window_is_the_ceiling_of_the_default() -> None:
    window = AdaptiveWindow(preferred=3)
    assert window.max_drafts == 3
    for num_rows in (1, 4):
        for _ in range(3):
            window.costs.record(num_rows, 10.0)
    assert window.max_drafts == 3
    assert window.choose(None, 3, num_right=3) <= 3


def test_s23_typed_number_is_never_changed() -> None:
    window = FixedWindow(16)
    assert window.max_drafts == 16
    assert window.choose([0.0] * 16, 16) == 16


def test_unmeasured_row_counts_are_read_between_their_neighbours() -> None:
    costs = RowCosts(WindowPolicy())
    costs.record(1, 10.0)
    costs.record(9, 26.0)
    assert costs.ms(1) == 10.0
    assert 10.0 < costs.ms(5) < 18.0  # hopeful: below the straight line
    assert costs.ms(17) == pytest.approx(42.0)


def test_first_forward_of_a_shape_is_forgotten() -> None:
    """It allocates and warms up, and would scare the window off this row count for good."""
    costs = RowCosts(WindowPolicy())
    costs.record(9, 500.0)
    costs.record(9, 20.0)
    assert costs.ms(9) == 20.0


def test_length_that_was_slow_once_gets_another_chance() -> None:
    """A hiccup at one row count would otherwise keep the window off it for good."""
    costs = RowCosts(WindowPolicy(forget_after=50))
    for num_rows, ms in ((1, 10.0), (16, 40.0), (8, 900.0), (8, 900.0)):
        costs.record(num_rows, ms)
    assert costs.ms(8) == 900.0
    for _ in range(51):
        costs.record(1, 10.0)
        costs.record(16, 40.0)
    assert costs.ms(8) < 40.0


def test_confidence_that_is_wrong_is_corrected() -> None:
    window = AdaptiveWindow()
    for _ in range(100):
        window.acceptance.record([0.95], 1, 0)
    assert window.acceptance.prefix_probs([0.95], 1)[0] < 0.3


def test_park_is_cut_short_only_for_a_clear_promise() -> None:
    window = AdaptiveWindow()
    assert not window.promises_to_pay([1.0] * 8, 8)  # not even a plain step is known
    for _ in range(3):
        window.costs.record(1, 10.0)
    assert window.promises_to_pay([0.95**i for i in range(1, 9)], 8, num_right=3)
    assert not window.promises_to_pay([0.3, 0.1], 2)
    assert not window.promises_to_pay(None, 0)


def test_further_draft_must_earn_its_making_and_its_row() -> None:
    window = AdaptiveWindow()
    assert window.min_prefix_prob == 0.0
    for _ in range(3):
        window.costs.record(1, 10.0)
        window.costs.record(9, 18.0)
    assert window.min_prefix_prob == pytest.approx(0.1)
    for _ in range(200):
        window.record_draft(4, 8.0)
    assert window.min_prefix_prob == pytest.approx(0.3)
