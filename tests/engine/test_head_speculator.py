"""A per-token draft head: which rows it is handed, when it drafts, when it stops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.speculative.draft_head import DraftHeadKind
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.head_speculator import MAX_PENDING, HeadSpeculator
from engine.speculative.speculator import DraftContext
from engine.speculative.window import FixedWindow
from tests.engine.fakes_drafters import FakeHead, FakeHeadState
from tests.engine.fakes_speculative import (
    VOCAB,
    FakeClock,
    LinearTarget,
    Turn,
    hidden_of,
    plain_stream,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PLAIN = [*PROMPT, *plain_stream("linear", PROMPT, 80)]


def rows(start: int, end: int) -> np.ndarray:
    """The target's true hidden rows of positions start .. end - 1."""
    return np.stack([hidden_of(PLAIN[: pos + 1]) for pos in range(start, end)])


def fake_head(*, folds: bool = False, resumes: bool = True, confidence: float = 0.9) -> FakeHead:
    return FakeHead(
        DraftHeadKind.PER_TOKEN,
        PLAIN.__getitem__,
        lambda pos: hidden_of(PLAIN[: pos + 1]),
        supports_fused_catch_up=folds,
        resumes_after_gap=resumes,
        confidence=confidence,
    )


def armed(head: FakeHead, num_cached: int = len(PROMPT)) -> HeadSpeculator:
    speculator = HeadSpeculator(head, LinearTarget())
    speculator.commit(PLAIN[:num_cached], rows(0, num_cached), 0)
    return speculator


def ask(speculator: HeadSpeculator, pos: int, num: int = 4, gate: float = 0.15) -> list[int]:
    return list(speculator.propose(DraftContext(PLAIN[pos], pos, num, gate)).token_ids)


def state_of(speculator: HeadSpeculator) -> FakeHeadState:
    state = speculator._state
    assert isinstance(state, FakeHeadState)
    return state


@pytest.mark.parametrize("folds", [False, True])
def test_s11_chains_one_token_per_pass(folds: bool) -> None:
    head = fake_head(folds=folds)
    assert ask(armed(head), 8) == PLAIN[9:13]
    assert head.num_steps == 4


def test_s14_stops_at_the_first_unsure_token() -> None:
    assert ask(armed(fake_head(confidence=0.1)), 8) == []
    assert ask(armed(fake_head(confidence=0.2)), 8) == PLAIN[9:13]
    assert ask(armed(fake_head(confidence=0.2)), 8, gate=0.3) == []


def test_states_the_probability_of_whole_prefixes() -> None:
    probs = armed(fake_head(confidence=0.5)).propose(DraftContext(PLAIN[8], 8, 3, 0.1)).prefix_probs
    assert probs == [0.5, 0.25, 0.125]


def test_s21_folds_the_catch_up_into_the_first_draft() -> None:
    head = fake_head(folds=True)
    speculator = armed(head)
    ask(speculator, 8, num=1)
    speculator.commit(PLAIN[8:11], rows(8, 11), 8)
    ask(speculator, 11, num=1)
    assert (head.num_folds, head.num_catch_ups) == (2, 0)
    assert sorted(state_of(speculator).rows) == list(range(11))


def test_s21_head_that_cannot_fold_is_caught_up_at_once() -> None:
    head = fake_head()
    speculator = armed(head)
    speculator.commit(PLAIN[8:10], rows(8, 10), 8)
    assert (head.num_folds, head.num_catch_ups) == (0, 2)


def test_plain_steps_pile_up_and_are_folded_together() -> None:
    head = fake_head(folds=True)
    speculator = armed(head)
    for pos in range(8, 12):
        speculator.commit(PLAIN[pos : pos + 1], rows(pos, pos + 1), pos)
    ask(speculator, 12, num=1)
    assert head.num_folds == 1
    assert sorted(state_of(speculator).rows) == list(range(12))


def test_c4_rows_of_a_long_park_are_ingested_on_the_way() -> None:
    """Re-arming would pay a catch-up over the whole park inside one token's latency."""
    head = fake_head(folds=True)
    speculator = armed(head)
    for pos in range(8, 66):
        speculator.commit(PLAIN[pos : pos + 1], rows(pos, pos + 1), pos)
    assert len(speculator._pending_ids) < MAX_PENDING
    assert sorted(state_of(speculator).rows) == list(range(66 - len(speculator._pending_ids)))
    ask(speculator, 66, num=1)
    assert sorted(state_of(speculator).rows) == list(range(66))


@pytest.mark.parametrize("folds", [False, True])
def test_s31_gap_discards_pending_rows_and_waits_for_a_fresh_one(folds: bool) -> None:
    head = fake_head(folds=folds)
    speculator = armed(head)
    speculator.commit(PLAIN[8:11], None, 8)
    assert ask(speculator, 11) == []
    assert state_of(speculator).gaps == [11]
    speculator.commit(PLAIN[11:12], rows(11, 12), 11)
    assert ask(speculator, 12) == PLAIN[13:17]
    assert sorted(state_of(speculator).rows) == [11]


def test_jump_in_position_is_a_gap_too() -> None:
    head = fake_head(folds=True)
    speculator = armed(head)
    speculator.commit(PLAIN[20:21], rows(20, 21), 20)
    assert ask(speculator, 21) == PLAIN[22:26]
    assert sorted(state_of(speculator).rows) == [20]


def test_does_not_draft_where_it_does_not_stand() -> None:
    assert ask(armed(fake_head()), 12) == []


def test_reset_forgets_the_row_to_chain_from() -> None:
    speculator = armed(fake_head())
    speculator.reset()
    assert ask(speculator, 8) == []


def test_resumes_as_its_head_says() -> None:
    for resumes in (True, False):
        traits = HeadSpeculator(fake_head(resumes=resumes), LinearTarget()).traits
        assert traits.can_arm_after_prefix_reuse is resumes


@pytest.mark.parametrize("folds", [False, True])
def test_b14_rows_are_copied_before_the_caller_overwrites_them(folds: bool) -> None:
    """Depth one was fine and depth two not: a pointer into a buffer the next decode reused."""
    speculator = HeadSpeculator(fake_head(folds=folds), LinearTarget())
    buffer = rows(0, len(PROMPT))
    speculator.commit(PROMPT, buffer, 0)
    buffer[:] = np.nan
    assert ask(speculator, 8) == PLAIN[9:13]


@pytest.mark.parametrize("pattern", [[4], [3, 0, 2, 4], [0], [1, 4]])
@pytest.mark.parametrize("folds", [False, True])
def test_b13_head_state_equals_one_built_cold_over_the_committed_tokens(
    folds: bool, pattern: Sequence[int]
) -> None:
    """Fully accepted windows left a hole: positions went p, p + 2, p + 4 and acceptance decayed.

    The head itself checks every row it is handed against the target's true one (B14).
    """
    head = fake_head(folds=folds)
    guesses = iter(range(10**6))
    accepts = [pattern[next(guesses) % len(pattern)] for _ in range(100)]
    target = LinearTarget()
    speculator = HeadSpeculator(head, target)
    execution = SpeculativeExecution(target, speculator, FixedWindow(4), clock=FakeClock())
    logits = execution.prefill(PROMPT).logits
    assert logits is not None
    turn = Turn(PROMPT, max_tokens=50)
    token_id = turn.draw(logits[-1].copy(), len(PROMPT))
    round_starts: list[int] = []

    def scripted(pos: int) -> int:
        right = accepts[len(round_starts)]
        distance = pos - target.cached_len
        return PLAIN[pos] if distance <= right else (PLAIN[pos] + 1) % VOCAB

    head.plain = scripted
    while not turn.is_over:
        assert token_id is not None
        token_id = execution.step(token_id, turn.num_remaining, turn.draw)[-1]
        round_starts.append(target.cached_len)
        pending = speculator._pending_ids
        held = sorted(state_of(speculator).rows)
        assert held + list(range(len(held), len(held) + len(pending))) == list(
            range(target.cached_len)
        )
    assert execution.dropped is None
    assert turn.emitted == PLAIN[len(PROMPT) : len(PROMPT) + 50]


def test_stops_where_a_further_draft_no_longer_pays() -> None:
    """Each draft is a pass of the head: fifteen were made for a window that verified three."""
    head = fake_head(confidence=0.5)
    context = DraftContext(PLAIN[8], 8, 8, 0.1, min_prefix_prob=0.2)
    assert list(armed(head).propose(context).token_ids) == PLAIN[9:11]
    assert head.num_steps == 3
