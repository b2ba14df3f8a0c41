"""Drafters that are scripted, and a trained head that checks every row it is handed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.speculative.draft_head import DraftHeadKind, DraftStep
from engine.speculative.speculator import DraftContext, Proposal, SpeculatorTraits
from tests.engine.fakes_speculative import FEATURES


class ScriptedSpeculator:
    """Proposes what a function of (position, room) says; records what it is told."""

    def __init__(
        self,
        guess: Callable[[DraftContext], Sequence[int]],
        *,
        traits: SpeculatorTraits | None = None,
        probs: Sequence[float] | None = None,
    ) -> None:
        self.traits = traits or SpeculatorTraits(
            "scripted", 64, 0.0, can_arm_after_prefix_reuse=True
        )
        self._guess = guess
        self._probs = probs
        self.contexts: list[DraftContext] = []
        self.commits: list[tuple[tuple[int, ...], np.ndarray | None, int]] = []
        self.num_resets = 0

    def propose(self, context: DraftContext) -> Proposal:
        self.contexts.append(context)
        ids = self._guess(context)
        return Proposal(ids, None if self._probs is None else self._probs[: len(ids)])

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        self.commits.append(
            (tuple(token_ids), None if hidden is None else hidden.copy(), start_pos)
        )

    def reset(self) -> None:
        self.num_resets += 1


@dataclass
class FakeHeadState:
    """What a head keeps of one chat: rows by position, and where it was restarted."""

    rows: dict[int, tuple[int, tuple[float, ...]]] = field(default_factory=dict)
    carry: np.ndarray | None = None
    gaps: list[int] = field(default_factory=list)


@dataclass
class FakeHead:
    """A draft head that knows the plain stream and checks every row it is handed (B13, B14).

    `plain` maps an absolute position to the token plain decoding puts there. `hidden_at` gives the
    target's true hidden row of a position; whatever is handed over must equal it.
    """

    kind: DraftHeadKind
    plain: Callable[[int], int]
    hidden_at: Callable[[int], np.ndarray]
    name: str = "fake-head"
    block_size: int = 16
    resumes_after_gap: bool = True
    supports_fused_catch_up: bool = False
    confidence: float = 0.9
    num_steps: int = 0
    num_folds: int = 0
    num_catch_ups: int = 0
    is_closed: bool = False

    def new_state(self, target: object) -> FakeHeadState:
        return FakeHeadState()

    def close(self) -> None:
        self.is_closed = True

    def draft_step(
        self, state: FakeHeadState, token_id: int, hidden: np.ndarray, pos: int
    ) -> DraftStep:
        self.num_steps += 1
        assert np.isfinite(hidden).all()
        if hidden[0] >= 0:  # a target row; the head's own rows are marked negative
            np.testing.assert_array_equal(hidden, self.hidden_at(pos - 1))
        own = -np.ones(FEATURES, dtype=np.float32)
        return DraftStep(self.plain(pos + 1), self.confidence, own)

    def draft_block(
        self, state: FakeHeadState, token_id: int, hidden: np.ndarray, pos: int, num: int
    ) -> tuple[list[int], list[float]]:
        self.num_steps += 1
        np.testing.assert_array_equal(hidden, self.hidden_at(pos - 1))
        ids = [self.plain(pos + 1 + i) for i in range(min(num, self.block_size))]
        return ids, [self.confidence ** (i + 1) for i in range(len(ids))]

    def catch_up(
        self,
        state: FakeHeadState,
        token_ids: Sequence[int],
        hidden: np.ndarray | None,
        start_pos: int,
    ) -> None:
        self.num_catch_ups += 1
        if hidden is None:
            state.gaps.append(start_pos + len(token_ids))
            state.rows.clear()
            return
        assert len(hidden) == len(token_ids)
        for offset, token_id in enumerate(token_ids):
            np.testing.assert_array_equal(hidden[offset], self.hidden_at(start_pos + offset))
            state.rows[start_pos + offset] = (token_id, tuple(hidden[offset].tolist()))

    def catch_up_and_step(
        self, state: FakeHeadState, token_ids: Sequence[int], hidden: np.ndarray, start_pos: int
    ) -> DraftStep:
        self.num_folds += 1
        self.catch_up(state, token_ids[:-1], hidden, start_pos)
        self.num_catch_ups -= 1
        return self.draft_step(state, token_ids[-1], hidden[-1], start_pos + len(token_ids) - 1)
