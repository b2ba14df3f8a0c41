"""What a drafting algorithm is to the loop: propose, commit, reset (ledger S03).

Whatever an algorithm proposes, verification emits only tokens drawn from a target row. It may be
wrong; it must not be slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Decline:
    """Why nothing drafts, as a person reads it."""

    reason: str


@dataclass(frozen=True, slots=True)
class SpeculatorTraits:
    """What an algorithm says of itself; callers ask these, never its name."""

    name: str
    max_drafts: int
    """Most drafts of one proposal."""
    default_min_draft_prob: float
    """Its confidence gate when nobody says otherwise; the number means what S14 says."""
    needs_hidden: bool = False
    """Whether it chains from the target's hidden rows."""
    can_arm_after_prefix_reuse: bool = False
    """Whether it can draft after tokens whose hidden rows it never saw (S25)."""
    is_free: bool = False
    """Whether proposing costs microseconds, so that it may look on while drafting is parked."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Everything a proposal may depend on. A new signal is a new field."""

    last_token_id: int
    """The newest token; it is not in the target's cache yet."""
    pos: int
    """Where `last_token_id` stands (tokens, absolute): the number of cached tokens."""
    max_drafts: int
    """Most drafts the loop can use in this step, at least 1."""
    min_draft_prob: float
    """The confidence gate in force."""
    min_prefix_prob: float = 0.0
    """A further draft less likely than this, those before it included, costs more than it brings;
    a drafter that pays for each draft stops there."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted ids with what their algorithm believes of them."""

    token_ids: Sequence[int] = ()
    prefix_probs: Sequence[float] | None = None
    """Element i: probability that drafts 0..i are all accepted; None when it has no idea."""


NO_PROPOSAL = Proposal()


class Speculator(Protocol):
    """One algorithm drafting for one chat."""

    @property
    def traits(self) -> SpeculatorTraits:
        """What this algorithm can do."""

    def propose(self, context: DraftContext) -> Proposal:
        """Guess the tokens after `context.last_token_id`. State: nothing that outlives a commit."""

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        """Learn what the target's cache holds from `start_pos` on.

        Shapes: hidden [n, F] float32, row i belongs to token_ids[i]; None when nobody captured it.
                The array is the caller's: copy what is kept.
        State:  what was committed at or after `start_pos` before is replaced; a start beyond the
                last committed position is a gap.
        """

    def reset(self) -> None:
        """Forget the sequence: called when not one token of it stands any more."""
