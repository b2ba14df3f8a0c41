"""What speculation needs from the model it speeds up, and nothing about drafting (ledger S01)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.base import Cache, RowOutput, WantLogits


@dataclass(frozen=True, slots=True)
class TargetTraits:
    """What a trunk says of itself; callers ask these, never a name."""

    verify_persists_accepted_kv: bool = True
    """Rows a verify accepted stay usable: rollback only rewinds (S16)."""
    preferred_window: int | None = None
    """Narrows the default window, never a number a person typed (S23)."""
    is_speculation_profitable: bool = True
    """False: weight-free drafting would not pay, or the trunk needs its drafter (S09)."""
    refusal: str | None = None
    """Why this trunk cannot reproduce its own decode: then nothing ever drafts (S09)."""


class SpeculativeTarget(Protocol):
    """A trunk bound to one chat's cache: appends rows, scores them, takes them back.

    Positions and lengths are absolute, in tokens.
    """

    @property
    def traits(self) -> TargetTraits:
        """What this trunk can do."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def cached_len(self) -> int:
        """Tokens the bound cache holds."""

    @property
    def cache(self) -> Cache:
        """The bound cache, for a drafter that looks at its keys; only to be read."""

    @property
    def max_context_len(self) -> int:
        """Most tokens the bound cache may hold."""

    def forward_rows(
        self,
        token_ids: Sequence[int],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
    ) -> RowOutput:
        """Append tokens to the cache and score the wanted rows in one pass.

        Shapes: token_ids [R] -> logits [rows wanted, V] float32; hidden [R, F] or None.
        State:  cache grows by R; nothing changes when it raises.
        """

    def snapshot_state(self) -> object:
        """Remember what `rewind_to` alone cannot bring back (recurrent state); None if nothing."""

    def restore_state(self, snapshot: object) -> None:
        """Go back to a snapshot. State: cache as it was, length included."""

    def rewind_to(self, length: int) -> None:
        """Drop every position >= length. State: cache length."""

    def on_verify_resolved(self, num_rows: int, num_accepted: int) -> None:
        """A verify of `num_rows` rows ended with `num_accepted` accepted drafts.

        Called before any rollback decision, on full acceptance too: a ring cache puts evicted
        rows back here, a recurrent trunk picks the state slot.
        """
