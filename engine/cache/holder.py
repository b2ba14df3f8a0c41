"""One chat's retained cache together with the ids of the tokens in it.

Whoever has the holder has the chat. Cache and ids change together or not at all, so every forward,
rewind and restore of a chat goes through here. Knows nothing of turns, text or drafting.

While a turn runs, and after it finished, a chat's holder holds the prompt and every emitted token
but the last: that one has been drawn and not yet forwarded. Speculation changes nothing in this.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from backends.base import BackendError, Cache, Executable, RowOutput, Segment, WantLogits
from engine.errors import HolderBroken

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class HolderSnapshot:
    """A holder as it was: an own copy of the cache, and the ids in it."""

    cache: Cache
    token_ids: tuple[int, ...]


class Holder:
    """A cache on one executable and the ids of its tokens, always of one length."""

    def __init__(
        self, executable: Executable, cache: Cache | None = None, token_ids: Sequence[int] = ()
    ) -> None:
        self.executable = executable
        self._cache = executable.new_cache() if cache is None else cache
        self._token_ids = list(token_ids)
        self.check_integrity()

    @property
    def cache(self) -> Cache:
        """The cache itself, for reading, exporting and measuring; change it through the holder."""
        return self._cache

    @property
    def token_ids(self) -> list[int]:
        """Ids of the cached tokens, oldest first; a view to read, not to change."""
        return self._token_ids

    @property
    def length(self) -> int:
        """Cached tokens."""
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory of the cache, capacity included."""
        return self._cache.num_bytes

    def forward(
        self,
        token_ids: Sequence[int],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
    ) -> RowOutput:
        """Append tokens and score them.

        Shapes: token_ids [R] -> logits [rows wanted, V] float32; hidden [R, F] or None.
        State:  cache and ids grow by R; neither changes when it raises.
        Raises: OutOfDeviceMemory, BackendError; HolderBroken when cache and ids had parted before.
        """
        return forward_holders(
            [self], [token_ids], want_logits=want_logits, want_hidden=want_hidden
        )

    def ensure_capacity(self, length: int) -> None:
        """Make room for `length` tokens. State: capacity only."""
        self._cache.ensure_capacity(length)

    def can_rewind_to(self, length: int) -> bool:
        """Whether dropping every position >= length is exact."""
        return length == self.length or self._cache.can_rewind_to(length)

    def rewind_to(self, length: int) -> None:
        """Drop every position >= length (tokens, absolute). State: cache and ids.

        Raises: BackendError where `can_rewind_to` is false; nothing has changed then.
        """
        if length == self.length:
            return
        self._cache.rewind_to(length)
        del self._token_ids[length:]

    def clone(self) -> Holder:
        """An independent copy that shares no buffer.

        State: self unchanged. Raises: OutOfDeviceMemory, MemoryError.
        """
        return Holder(self.executable, self._cache.clone(), self._token_ids)

    def try_clone(self) -> Holder | None:
        """The same, or None where there is no memory: for copies that only save time later."""
        try:
            return self.clone()
        except (BackendError, MemoryError) as error:
            log.warning("a cache of %d tokens is not copied: %s", self.length, error)
            return None

    def snapshot(self) -> HolderSnapshot:
        """Remember cache and ids by a copy, for caches that cannot rewind. State: unchanged."""
        return HolderSnapshot(self._cache.clone(), tuple(self._token_ids))

    def restore(self, snapshot: HolderSnapshot) -> None:
        """Go back to a snapshot, which is used up by this. State: cache and ids."""
        self._cache, self._token_ids = snapshot.cache, list(snapshot.token_ids)

    def common_len(self, token_ids: Sequence[int]) -> int:
        """Leading tokens that are the same here and in `token_ids`. State: unchanged."""
        return common_prefix_len(self._token_ids, token_ids)

    def reusable_len(self, token_ids: Sequence[int]) -> int:
        """Most leading tokens of `token_ids` this cache can give back exactly; State: unchanged.

        A cache that keeps every position gives back the whole common prefix; a ring or recurrent
        one may have moved on, and then gives back nothing.
        """
        length = self.common_len(token_ids)
        return length if self.can_rewind_to(length) else 0

    @property
    def is_intact(self) -> bool:
        """Whether the cache holds exactly as many tokens as there are ids."""
        return self._cache.length == len(self._token_ids)

    def check_integrity(self) -> None:
        """Raises: HolderBroken when cache and ids have parted; the holder must be dropped."""
        if not self.is_intact:
            raise HolderBroken(
                f"the cache holds {self._cache.length} tokens instead of {len(self._token_ids)}",
                hint="send the message again",
            )

    def settle_after_error(self) -> None:
        """Take back rows a failed forward left behind. State: cache back to the ids if it can."""
        if self._cache.length > self.length and self._cache.can_rewind_to(self.length):
            self._cache.rewind_to(self.length)

    def _extend(self, token_ids: Sequence[int]) -> None:
        self._token_ids.extend(token_ids)


def forward_holders(
    holders: Sequence[Holder],
    token_ids: Sequence[Sequence[int]],
    *,
    want_logits: WantLogits = "all",
    want_hidden: bool = False,
) -> RowOutput:
    """Append tokens to several chats in one pass, `token_ids[i]` to `holders[i]`.

    Shapes: logits [rows wanted, V] float32, chats in order; hidden [R, F] or None.
    State:  each holder grows by its tokens; none changes when it raises.
    Raises: OutOfDeviceMemory, BackendError; HolderBroken when cache and ids had parted before.
    """
    for holder in holders:
        holder.check_integrity()
    segments = [Segment(ids, holder.cache) for holder, ids in zip(holders, token_ids, strict=True)]
    try:
        output = holders[0].executable.forward(
            segments, want_logits=want_logits, want_hidden=want_hidden
        )
    except (BackendError, OSError, MemoryError):
        for holder in holders:
            holder.settle_after_error()
        raise
    for holder, ids in zip(holders, token_ids, strict=True):
        holder._extend(ids)
    return output


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens two sequences share."""
    num = min(len(a), len(b))
    if list(a[:num]) == list(b[:num]):
        return num
    return next(i for i in range(num) if a[i] != b[i])
