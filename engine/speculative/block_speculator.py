"""Drafts a whole window in one pass with a trained block drafter (ledger S12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.speculative.draft_head import DraftHead
from engine.speculative.speculator import (
    NO_PROPOSAL,
    DraftContext,
    Proposal,
    Speculator,
    SpeculatorTraits,
)
from engine.speculative.target import SpeculativeTarget

MIN_DRAFT_PROB = 0.35
"""Cumulative prefix probability below which a block is cut: far stricter than per token (S14)."""


class BlockSpeculator:
    """A block drafter on one chat. Its head keeps a ring of its own, refilled by every commit."""

    def __init__(self, head: DraftHead, target: SpeculativeTarget) -> None:
        self._head = head
        self._target = target
        self._traits = SpeculatorTraits(
            name=head.name,
            max_drafts=head.block_size,
            default_min_draft_prob=MIN_DRAFT_PROB,
            needs_hidden=True,
            can_arm_after_prefix_reuse=True,
        )
        self.reset()

    @property
    def traits(self) -> SpeculatorTraits:
        """Reads hidden rows; an adopted prefix costs it context for a block or two, no more."""
        return self._traits

    def reset(self) -> None:
        """Forget the sequence."""
        self._state = self._head.new_state(self._target)
        self._last_row: np.ndarray | None = None
        self._next_pos = 0

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        """Put what landed in the target into the drafter's ring."""
        self._head.catch_up(self._state, token_ids, hidden, start_pos)
        self._last_row = None if hidden is None else hidden[-1].copy()
        self._next_pos = start_pos + len(token_ids)

    def propose(self, context: DraftContext) -> Proposal:
        """One pass, cut where the prefix is no longer believed."""
        if self._last_row is None or context.pos != self._next_pos:
            return NO_PROPOSAL
        token_ids, prefix_probs = self._head.draft_block(
            self._state, context.last_token_id, self._last_row, context.pos, context.max_drafts
        )
        kept = next(
            (n for n, prob in enumerate(prefix_probs) if prob < context.min_draft_prob),
            len(token_ids),
        )
        return Proposal(token_ids[:kept], prefix_probs[:kept])


if TYPE_CHECKING:
    _: type[Speculator] = BlockSpeculator
