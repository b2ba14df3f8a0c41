"""Every chat's holder under one memory budget, and the prefixes new chats start from.

Three kinds of holders live here: the one of each chat, at most one resume point per chat (where its
cache cannot rewind), and shared checkpoints of system prompts. A chat's drafter is kept beside its
holder and leaves with it. Knows no turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from backends.base import Executable, OutOfDeviceMemory
from engine.cache.holder import Holder

if TYPE_CHECKING:
    from engine.speculative.execution import SpeculativeExecution

log = logging.getLogger(__name__)

T = TypeVar("T")

MIN_SHARED_LEN = 16
"""Copying another holder must save at least this many tokens over the chat's own."""
MAX_CHECKPOINTS = 8
"""Shared prefixes kept in memory; one system prompt needs one."""
COPIED_PER_SAVED = 8
"""Tokens of cache that may be copied per token saved: a copy keeps the memory of its source."""


@dataclass(slots=True, eq=False)
class _ChatEntry:
    holder: Holder
    resume_point: Holder | None = None
    execution: SpeculativeExecution | None = None
    is_running: bool = False

    @property
    def num_bytes(self) -> int:
        extra = self.resume_point.num_bytes if self.resume_point else 0
        return self.holder.num_bytes + extra


class HolderStore:
    """Holders by chat id, least recently used first."""

    def __init__(self, executable: Executable, *, budget_bytes: int, share_unit: int = 1) -> None:
        """`share_unit`: a prefix is copied to another chat in multiples of this many tokens.

        More than 1 on a backend whose rows depend on how a prompt was cut into chunks: then only
        checkpoints, cut at the same positions, serve other chats, so that a chat gets the same
        stream alone and in company.
        """
        self._executable = executable
        self._budget_bytes = budget_bytes
        self._share_unit = share_unit
        self._chats: dict[str, _ChatEntry] = {}
        self._checkpoints: list[Holder] = []
        self.growing: Holder | None = None
        """A checkpoint in the making; the first to go when the room is needed."""

    @property
    def num_bytes(self) -> int:
        """Memory of everything kept here."""
        chats = sum(entry.num_bytes for entry in self._chats.values())
        shared = [*self._checkpoints, *([self.growing] if self.growing else [])]
        return chats + sum(holder.num_bytes for holder in shared)

    @property
    def checkpoints(self) -> tuple[Holder, ...]:
        """The shared prefixes, least recently used first; never changed by a chat."""
        return tuple(self._checkpoints)

    def get(self, chat_id: str) -> Holder | None:
        """The chat's holder, or None. State: unchanged."""
        entry = self._chats.get(chat_id)
        return entry.holder if entry else None

    def acquire(self, chat_id: str, prompt_ids: Sequence[int]) -> Holder:
        """The chat's holder, cut back or replaced to hold the longest known start of a prompt.

        At least the prompt's last token is left to forward, for its logits.
        State: the entry runs until `release`; other holders and checkpoints are only copied. A
               kept drafter stays with the chat, whichever holder the chat goes on with.
        """
        wanted = prompt_ids[:-1]
        entry = self._chats.pop(chat_id, None)
        holder = self._continue_own(entry, wanted)
        holder = self._copy_longer(holder, wanted) or holder
        self._chats[chat_id] = _ChatEntry(holder, is_running=True)
        if entry:
            self._chats[chat_id].execution = entry.execution
        if entry and entry.resume_point is not holder:
            # Still a true start of this chat, until a later one is kept.
            self._chats[chat_id].resume_point = entry.resume_point
        return holder

    def release(self, chat_id: str) -> None:
        """The chat's turn is over. State: it is the most recently used; others may be evicted.

        Its own cache stays until another turn needs the room: a cache that grew by doubling may
        be over the budget alone, and would be forwarded again with every message.
        """
        entry = self._chats.pop(chat_id, None)
        if entry is None:
            return
        self._chats[chat_id] = entry
        self.make_room(0)
        entry.is_running = False
        if self.num_bytes > self._budget_bytes:
            entry.resume_point = None

    def discard(self, chat_id: str) -> None:
        """Drop a chat's holder and resume point (chat deleted, or its cache broken)."""
        self._chats.pop(chat_id, None)

    def clear(self) -> None:
        """Drop everything, what runs too. State: empty."""
        self._chats.clear()
        self._checkpoints.clear()
        self.growing = None

    def execution(self, chat_id: str) -> SpeculativeExecution | None:
        """The drafter kept with a running chat, or None."""
        return self._chats[chat_id].execution

    def keep_execution(self, chat_id: str, execution: SpeculativeExecution | None) -> None:
        """Keep a drafter with a running chat. State: it goes when the chat goes."""
        self._chats[chat_id].execution = execution

    def drop_executions(self) -> None:
        """Forget every kept drafter (the policy changed)."""
        for entry in self._chats.values():
            entry.execution = None

    def set_resume_point(self, chat_id: str, holder: Holder) -> None:
        """Keep a copy to continue from where the chat's own cache cannot rewind."""
        self._chats[chat_id].resume_point = holder

    def add_checkpoint(self, holder: Holder) -> None:
        """Keep a prefix that new chats are copied from; the holder is the store's from now on."""
        self._checkpoints.append(holder)
        del self._checkpoints[:-MAX_CHECKPOINTS]

    def has_checkpoint(self, token_ids: Sequence[int]) -> bool:
        """Whether exactly this prefix is kept."""
        return any(holder.token_ids == list(token_ids) for holder in self._checkpoints)

    def copy_prefix(self, token_ids: Sequence[int]) -> Holder | None:
        """A copy of exactly this prefix out of a holder that is not much longer, or None.

        State: unchanged; nothing is evicted for it.
        """
        num = len(token_ids)
        for source in self._sources():
            if source.length > num * COPIED_PER_SAVED or not self.has_room(source.num_bytes):
                continue
            if source.reusable_len(token_ids) == num and (copy := self._copy(source, num)):
                return copy
        return None

    def has_room(self, num_bytes: int) -> bool:
        """Whether this much fits the budget beside everything that is kept."""
        return self.num_bytes + num_bytes <= self._budget_bytes

    def make_room(self, num_bytes: int) -> None:
        """Evict least recently used idle chats, then checkpoints, until this much fits."""
        while not self.has_room(num_bytes) and self.evict_one():
            pass

    def with_room(self, action: Callable[[], T]) -> T:
        """Do it; while memory is full, again without what nobody used for longest (S50).

        Raises: what `action` raises, OutOfDeviceMemory and MemoryError once nothing idle is left.
        """
        while True:
            try:
                return action()
            except (OutOfDeviceMemory, MemoryError):
                if not self.evict_one():
                    raise

    def evict_one(self) -> bool:
        """Drop the least recently used thing that nobody uses now; False when there is none.

        A resume point goes before its chat, chats before shared prefixes.
        """
        if self.growing:
            self.growing = None
            return True
        for chat_id, entry in self._chats.items():
            if entry.is_running:
                continue
            log.info("evict chat=%s bytes=%d", chat_id, entry.num_bytes)
            if entry.resume_point:
                entry.resume_point = None
            else:
                del self._chats[chat_id]
            return True
        if self._checkpoints:
            del self._checkpoints[0]
            return True
        return False

    def _continue_own(self, entry: _ChatEntry | None, wanted: Sequence[int]) -> Holder:
        """The chat's own holder or resume point, whichever reaches further, rewound to it."""
        if entry is None:
            return self.with_room(lambda: Holder(self._executable))
        own = [entry.holder, *([entry.resume_point] if entry.resume_point else [])]
        lengths = [holder.reusable_len(wanted) for holder in own]
        length = max(lengths)
        if length == 0:
            return self.with_room(lambda: Holder(self._executable))
        best = own[lengths.index(length)]
        best.rewind_to(length)
        return best

    def _copy_longer(self, own: Holder, wanted: Sequence[int]) -> Holder | None:
        """A copy of another holder that serves clearly more of the prompt than the chat's own."""
        best, best_len = None, own.length + MIN_SHARED_LEN - 1
        for source in self._sources():
            length = source.reusable_len(wanted)
            length -= length % self._share_unit
            is_cheap = source.length <= (length - own.length) * COPIED_PER_SAVED
            if length > best_len and is_cheap:
                best, best_len = source, length
        if best is None:
            return None
        if best in self._checkpoints:
            self._checkpoints.remove(best)
            self._checkpoints.append(best)
        return self._copy(best, best_len)

    def _copy(self, source: Holder, length: int) -> Holder | None:
        self.make_room(source.num_bytes)
        holder = source.try_clone()
        if holder is None or not holder.can_rewind_to(length):
            return None
        holder.rewind_to(length)
        return holder

    def _sources(self) -> list[Holder]:
        """Whom a prefix may be copied from; a list, because room for a copy evicts some of them."""
        sources = list(reversed(self._checkpoints))
        if self._share_unit == 1:
            for entry in self._chats.values():
                sources.append(entry.holder)
                if entry.resume_point:
                    sources.append(entry.resume_point)
        return sources
