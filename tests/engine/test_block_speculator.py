"""A block drafter: one pass per window, cut where its prefix is no longer believed."""

from __future__ import annotations

import numpy as np
import pytest

from engine.speculative.block_speculator import BlockSpeculator
from engine.speculative.draft_head import DraftHeadKind
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.governor import CostGovernor, GovernorState
from engine.speculative.speculator import DraftContext
from engine.speculative.window import FixedWindow
from tests.engine.fakes_drafters import FakeHead, FakeHeadState
from tests.engine.fakes_speculative import (
    FakeClock,
    LinearTarget,
    Turn,
    hidden_of,
    plain_stream,
    prefill,
)
from tests.engine.speculative_bench import take_step

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PLAIN = [*PROMPT, *plain_stream("linear", PROMPT, 60)]


def fake_head(confidence: float = 0.9, block_size: int = 6) -> FakeHead:
    return FakeHead(
        DraftHeadKind.BLOCK,
        PLAIN.__getitem__,
        lambda pos: hidden_of(PLAIN[: pos + 1]),
        block_size=block_size,
        confidence=confidence,
    )


def armed(head: FakeHead) -> tuple[SpeculativeExecution, LinearTarget, Turn]:
    """On a prefix it never saw: the prompt was prefilled plainly."""
    target = LinearTarget()
    execution = SpeculativeExecution(
        target, BlockSpeculator(head, target), FixedWindow(8), clock=FakeClock()
    )
    turn = Turn(PROMPT)
    turn.draw(prefill(target, PROMPT), len(PROMPT))
    execution.seed_committed(PROMPT)
    return execution, target, turn


def test_s12_drafts_a_whole_block_in_one_pass() -> None:
    head = fake_head()
    execution, _, turn = armed(head)
    execution.step(turn.emitted[-1], 20, turn.draw)
    result = take_step(execution, turn.emitted[-1], 20, turn.draw)
    assert (result.num_drafts, result.num_accepted) == (6, 6)
    assert head.num_steps == 1


@pytest.mark.parametrize(("confidence", "kept"), [(0.9, 6), (0.7, 2), (0.5, 1), (0.3, 0)])
def test_s14_cumulative_gate_cuts_the_block(confidence: float, kept: int) -> None:
    """0.7 * 0.7 is above 0.35 and 0.7 ** 3 is not."""
    head = fake_head(confidence)
    speculator = BlockSpeculator(head, LinearTarget())
    rows = [hidden_of(PLAIN[: pos + 1]) for pos in range(8)]
    speculator.commit(PLAIN[:8], np.stack(rows), 0)
    gate = speculator.traits.default_min_draft_prob
    assert len(speculator.propose(DraftContext(PLAIN[8], 8, 8, gate)).token_ids) == kept


def test_c1_adopted_prefix_costs_one_plain_step_and_no_stale_row() -> None:
    """The reused positions were never seen; the head refuses zeros and rows of other positions."""
    head = fake_head()
    execution, _, turn = armed(head)
    kinds = [take_step(execution, turn.emitted[-1], 50, turn.draw).kind for _ in range(4)]
    assert kinds == ["plain", "verify", "verify", "verify"]
    assert execution.dropped is None


def test_s39_parked_steps_leave_gaps_and_the_first_step_after_captures_a_row() -> None:
    head = fake_head()
    execution, target, turn = armed(head)
    governor = CostGovernor()
    governor.state = GovernorState.PARKED
    governor._steps_left = 3
    governor._plain_ms.append(5.0)
    execution.governor = governor
    kinds = []
    for _ in range(5):
        kinds.append(take_step(execution, turn.emitted[-1], 40, turn.draw).kind)
    assert kinds == ["parked", "parked", "parked", "plain", "verify"]
    assert [call.want_hidden for call in target.calls[-5:]] == [False, False, False, True, True]


def test_b12_state_is_private_to_a_chat() -> None:
    head = fake_head()
    speculators = [BlockSpeculator(head, LinearTarget()) for _ in range(2)]
    states = [speculator._state for speculator in speculators]
    assert all(isinstance(state, FakeHeadState) for state in states)
    assert states[0] is not states[1]


def test_does_not_draft_where_it_does_not_stand() -> None:
    """The row it holds belongs to another position than the one before the newest token."""
    speculator = BlockSpeculator(fake_head(), LinearTarget())
    rows = np.stack([hidden_of(PLAIN[: pos + 1]) for pos in range(8)])
    speculator.commit(PLAIN[:8], rows, 0)
    assert not speculator.propose(DraftContext(PLAIN[12], 12, 4, 0.0)).token_ids
    rows[:] = np.nan  # and it keeps no pointer into the caller's buffer
    assert speculator.propose(DraftContext(PLAIN[8], 8, 4, 0.0)).token_ids
