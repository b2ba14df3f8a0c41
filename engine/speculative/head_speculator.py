"""Drafts one token per pass with a trained head, each pass chaining the head's own row (S11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.speculative.draft_head import DraftHead, DraftStep
from engine.speculative.options import MAX_WINDOW
from engine.speculative.speculator import (
    NO_PROPOSAL,
    DraftContext,
    Proposal,
    Speculator,
    SpeculatorTraits,
)
from engine.speculative.target import SpeculativeTarget

MIN_DRAFT_PROB = 0.15
"""Top-1 probability over the head's top-10 logits below which a draft is not worth a row (S14)."""
MAX_PENDING = 64
"""Rows that may wait for the next first draft: a parked head that cannot resume after a gap would
otherwise pay for all of them within one token."""


class HeadSpeculator:
    """A per-token draft head on one chat.

    `_pending` are tokens that landed in the target but not yet in the head, with their hidden
    rows; a head that can fold ingests them in the call that makes the next first draft (S21).
    """

    def __init__(self, head: DraftHead, target: SpeculativeTarget) -> None:
        self._head = head
        self._target = target
        self._traits = SpeculatorTraits(
            name=head.name,
            max_drafts=MAX_WINDOW,
            default_min_draft_prob=MIN_DRAFT_PROB,
            needs_hidden=True,
            can_arm_after_prefix_reuse=head.resumes_after_gap,
        )
        self.reset()

    @property
    def traits(self) -> SpeculatorTraits:
        """Chains hidden rows; arms after a gap if its head does."""
        return self._traits

    def reset(self) -> None:
        """Forget the sequence: a fresh head state, no hidden row to chain from."""
        self._state = self._head.new_state(self._target)
        self._carry: np.ndarray | None = None
        self._next_pos = 0
        self._drop_pending()

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        """Hand what landed in the target to the head, now or folded into the next first draft.

        State: tokens without hidden rows, or a jump in position, are a gap: pending rows from
               before it are worthless and drafting waits for a fresh row (S31).
        """
        if hidden is None or start_pos != self._next_pos:
            self._drop_pending()
            self._carry = None
        self._next_pos = start_pos + len(token_ids)
        if hidden is None:
            self._head.catch_up(self._state, token_ids, None, start_pos)
            return
        self._carry = hidden[-1].copy()
        if self._head.supports_fused_catch_up:
            self._hold(token_ids, hidden, start_pos)
        else:
            self._head.catch_up(self._state, token_ids, hidden, start_pos)

    def propose(self, context: DraftContext) -> Proposal:
        """Draft until the gate, the window or the first unsure token."""
        if self._carry is None or context.pos != self._next_pos:
            return NO_PROPOSAL
        step = self._first_step(context)
        token_ids: list[int] = []
        prefix_probs: list[float] = []
        running = 1.0
        while step.confidence >= context.min_draft_prob:
            running *= step.confidence
            if token_ids and running < context.min_prefix_prob:
                break
            token_ids.append(step.token_id)
            prefix_probs.append(running)
            if len(token_ids) == context.max_drafts:
                break
            step = self._head.draft_step(
                self._state, step.token_id, step.hidden, context.pos + len(token_ids)
            )
        return Proposal(token_ids, prefix_probs)

    def _first_step(self, context: DraftContext) -> DraftStep:
        assert self._carry is not None, "no hidden row to chain from"
        if not self._pending_ids:
            return self._head.draft_step(
                self._state, context.last_token_id, self._carry, context.pos
            )
        step = self._head.catch_up_and_step(
            self._state,
            [*self._pending_ids, context.last_token_id],
            np.concatenate(self._pending_rows),
            self._pending_start,
        )
        self._drop_pending()
        return step

    def _hold(self, token_ids: Sequence[int], hidden: np.ndarray, start_pos: int) -> None:
        if not self._pending_ids:
            self._pending_start = start_pos
        self._pending_ids.extend(token_ids)
        self._pending_rows.append(hidden.copy())
        if len(self._pending_ids) >= MAX_PENDING:
            rows = np.concatenate(self._pending_rows)
            self._head.catch_up(self._state, self._pending_ids, rows, self._pending_start)
            self._drop_pending()

    def _drop_pending(self) -> None:
        self._pending_ids: list[int] = []
        self._pending_rows: list[np.ndarray] = []
        self._pending_start = 0


if TYPE_CHECKING:
    _: type[Speculator] = HeadSpeculator
