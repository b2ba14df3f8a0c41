"""What a step teaches: the window the price of its rows, the governor the price of all of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.speculative.execution import SpeculativeExecution
from engine.speculative.governor import CostGovernor, StepSample
from engine.speculative.speculator import DraftContext
from engine.speculative.window import AdaptiveWindow
from tests.engine.fakes_drafters import ScriptedSpeculator
from tests.engine.fakes_speculative import FakeClock, LinearTarget, Turn, prefill
from tests.engine.speculative_bench import PROMPT

DRAFT_MS, ROW_MS = 50.0, 10.0


class NotingGovernor(CostGovernor):
    """Always lets draft; keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[StepSample] = []

    @property
    def may_draft(self) -> bool:
        return True

    def record_speculative(self, sample: StepSample) -> None:
        self.samples.append(sample)


def costs_of(drafts: Sequence[int]) -> tuple[AdaptiveWindow, list[StepSample]]:
    """Window and governor after five steps that drafted dearly and verified `drafts`."""
    clock = FakeClock()
    target = LinearTarget(clock=clock, row_ms=lambda rows: ROW_MS * rows)

    def draft(_: DraftContext) -> Sequence[int]:
        clock.advance_ms(DRAFT_MS)
        return drafts

    window, governor = AdaptiveWindow(), NotingGovernor()
    execution = SpeculativeExecution(
        target,
        ScriptedSpeculator(draft),
        window,
        governor=governor,
        costs=window,
        clock=clock,
    )
    turn = Turn(PROMPT)
    turn.draw(prefill(target, PROMPT), len(PROMPT))
    execution.seed_committed(PROMPT)
    for _ in range(5):
        execution.step(turn.emitted[-1], turn.num_remaining, turn.draw)
    return window, governor.samples


@pytest.mark.parametrize("drafts", [[], [0]])
def test_s38_drafting_is_no_part_of_what_rows_cost(drafts: list[int]) -> None:
    """A head that drafted and verified nothing once made a plain step look dear."""
    num_rows = 1 + len(drafts)
    window, samples = costs_of(drafts)
    assert window.costs.ms(num_rows) == pytest.approx(ROW_MS * num_rows)
    assert [sample.ms for sample in samples] == pytest.approx([DRAFT_MS + ROW_MS * num_rows] * 5)
