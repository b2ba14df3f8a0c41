"""One speculative step on its way through the phases: what was drafted, forwarded and drawn.

It holds and counts; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

import numpy as np

from backends.base import RowOutput
from engine.speculative.speculator import NO_PROPOSAL, Proposal


class DrawRow(Protocol):
    """Draws a token from a row of the target."""

    def __call__(self, row: np.ndarray, position: int, argmax: int | None = None) -> int | None:
        """The token at `position` from its logits [V]; None once an earlier one ended the turn."""


class Role(Enum):
    """What a step's time is evidence of."""

    SPECULATIVE = "speculative"
    """The drafter ran for it, whether or not it proposed anything (S38)."""
    BASELINE = "baseline"
    """The governor asked for the model's own decode: parked, or measuring (S39)."""
    NEITHER = "neither"
    """No room for a draft, no drafter or no governor."""


@dataclass(slots=True)
class Step:
    """Grows from phase to phase: rows, then drawn tokens."""

    base: int
    """Cached tokens before it."""
    rows: list[int]
    """The newest token and the drafts behind it."""
    is_parked: bool
    role: Role
    proposal: Proposal = NO_PROPOSAL
    """What the drafter said, chosen or not."""
    drawn: list[int] = field(default_factory=list)
    hidden: np.ndarray | None = None
    """[len(drawn), F], an own copy."""
    snapshot: object = None

    @property
    def kind(self) -> Literal["verify", "parked", "plain"]:
        """What it became."""
        if self.num_drafts:
            return "verify"
        return "parked" if self.is_parked else "plain"

    @property
    def num_drafts(self) -> int:
        """Drafts that are verified."""
        return len(self.rows) - 1

    @property
    def num_accepted(self) -> int:
        """Drafts that were emitted."""
        return len(self.drawn) - 1

    @property
    def num_judged(self) -> int:
        """Proposed drafts whose place was drawn: the one behind the verified ones, too."""
        return min(len(self.proposal.token_ids), len(self.rows), len(self.drawn))

    @property
    def num_right(self) -> int:
        """Judged drafts before the first wrong one."""
        pairs = list(zip(self.proposal.token_ids, self.drawn, strict=False))[: self.num_judged]
        return next((n for n, (draft, drawn) in enumerate(pairs) if draft != drawn), len(pairs))

    def make_plain(self) -> None:
        """Give the drafts up. State: one row; its time is no evidence."""
        del self.rows[1:]
        self.role = Role.NEITHER

    def draw(self, output: RowOutput, draw: DrawRow) -> None:
        """Draw row by row; go on while the drawn token is the next row's input.

        Row r draws position base + r + 1.
        State: drawn tokens, at least one; a None ends the loop, so rows past a stop are rejected.
        """
        assert output.logits is not None, "a verify needs logits"
        for row, logits in enumerate(output.logits):
            token_id = draw(logits, self.base + row + 1, output.best_of(row))
            if token_id is None:
                break
            self.drawn.append(token_id)
            if self.rows[row + 1 : row + 2] != [token_id]:
                break
        assert self.drawn, "a step was asked for after the turn had ended"

    def __str__(self) -> str:
        """One line for the debug log (S64)."""
        probs = self.proposal.prefix_probs
        return (
            f"step={self.kind} pos={self.base} proposed={len(self.proposal.token_ids)} "
            f"first_prob={f'{probs[0]:.2f}' if probs else '-'} "
            f"verified={self.num_drafts} accepted={self.num_accepted}"
        )
