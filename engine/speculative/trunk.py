"""The target on one chat's holder: its cache and ids act as a `SpeculativeTarget`.

One class serves both regimes: a chat alone forwards its rows by itself, and the same holder is one
of several in a batched forward (`engine.cache.holder.forward_holders`); what a batched step added
is told to the drafter by `SpeculativeExecution.catch_up`. Knows nothing of drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from backends.base import Cache, RowOutput, WantLogits
from engine.cache.holder import Holder, HolderSnapshot
from engine.speculative.target import SpeculativeTarget, TargetTraits

T = TypeVar("T")


class WithRoom(Protocol):
    """Does something that takes memory of the device."""

    def __call__(self, action: Callable[[], T]) -> T:
        """What `action` returns. Raises: what `action` raises in the end."""


def _as_it_is(action: Callable[[], T]) -> T:
    return action()


class Trunk:
    """A model bound to one chat's holder."""

    def __init__(
        self,
        holder: Holder,
        traits: TargetTraits,
        *,
        vocab_size: int,
        max_context_len: int,
        with_room: WithRoom = _as_it_is,
    ) -> None:
        """`with_room` may free memory and try again when the device is full."""
        self.holder = holder
        self._with_room = with_room
        self._traits = traits
        self._vocab_size = vocab_size
        self._max_context_len = max_context_len

    @property
    def traits(self) -> TargetTraits:
        """What this trunk can do."""
        return self._traits

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._vocab_size

    @property
    def cached_len(self) -> int:
        """Tokens the holder's cache holds."""
        return self.holder.length

    @property
    def cache(self) -> Cache:
        """The holder's present cache, only to be read."""
        return self.holder.cache

    @property
    def max_context_len(self) -> int:
        """Most tokens the holder may hold."""
        return self._max_context_len

    def forward_rows(
        self,
        token_ids: Sequence[int],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
    ) -> RowOutput:
        """Append tokens to the holder and score the wanted rows in one pass.

        Shapes: token_ids [R] -> logits [rows wanted, V] float32; hidden [R, F] or None.
        State:  cache and ids grow by R; nothing changes when it raises.
        """

        def forward() -> RowOutput:
            return self.holder.forward(token_ids, want_logits=want_logits, want_hidden=want_hidden)

        # Drafts are worth nobody's cache: a verify that finds no room becomes a plain step, and the
        # drafter is dropped for the turn.
        is_verify = want_logits == "all" and len(token_ids) > 1
        return forward() if is_verify else self._with_room(forward)

    def snapshot_state(self) -> object:
        """A copy of the holder where a verify's rows do not stay usable, else None."""
        if self._traits.verify_persists_accepted_kv:
            return None
        return self.holder.snapshot()

    def restore_state(self, snapshot: object) -> None:
        """Go back to a snapshot, which is used up. State: cache and ids as they were."""
        assert isinstance(snapshot, HolderSnapshot), "this trunk rewinds; it took no snapshot"
        self.holder.restore(snapshot)

    def rewind_to(self, length: int) -> None:
        """Drop every position >= length. State: cache (ring and recurrent state too) and ids."""
        self.holder.rewind_to(length)

    def on_verify_resolved(self, num_rows: int, num_accepted: int) -> None:
        """Nothing to do: these caches put evicted rows and row states back in `rewind_to`."""


if TYPE_CHECKING:
    _: type[SpeculativeTarget] = Trunk
