"""Background work on shared prefixes, done while no turn runs: warm one, write new ones to disk.

Each step is short, because a turn that is submitted meanwhile waits for it. Never fails a turn or a load: what goes wrong is told once, and the prefix is forwarded when a chat
needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from backends.base import BackendError, Executable
from engine.cache.checkpoint import CheckpointFolder
from engine.cache.holder import Holder
from engine.cache.holder_store import MIN_SHARED_LEN, HolderStore
from engine.errors import CheckpointUnsound

log = logging.getLogger(__name__)


class PrefixKeeper:
    """Fills the store's checkpoints from disk and by forwarding, and disk from the store."""

    def __init__(
        self,
        executable: Executable,
        store: HolderStore,
        folder: CheckpointFolder | None,
        *,
        chunk_len: int,
        notice: Callable[[str], None],
    ) -> None:
        """`chunk_len`: chunks end at multiples of it, as those of turns do."""
        self._executable = executable
        self._store = store
        self._folder = folder
        self._chunk_len = chunk_len
        self._notice = notice
        self._wanted: list[tuple[int, ...]] = []
        self._growing: Holder | None = None
        """The first of `_wanted`, as far as it is forwarded."""
        self._stored: set[tuple[int, ...]] = set()
        self._saving: Iterator[None] | None = None
        """The file that is being written."""

    def has(self, prefix: tuple[int, ...]) -> bool:
        """Whether new chats start behind this prefix already; looks on disk too.

        State: a prefix found on disk becomes a checkpoint.
        """
        if self._store.has_checkpoint(prefix):
            return True
        if self._folder is None or prefix in self._stored:
            return False
        try:
            holder = self._folder.load(self._executable, prefix)
        except (CheckpointUnsound, BackendError) as error:
            log.warning("checkpoint ignored", exc_info=error)
            self._notice(str(error))
            return False
        if holder is None:
            return False
        self._stored.add(prefix)
        self._store.add_checkpoint(holder)
        return True

    def want(self, prefix: tuple[int, ...]) -> None:
        """Have this prefix ready for the next new chat; too short ones are not worth it.

        State: one that is on disk is a checkpoint at once.
        """
        is_short = len(prefix) < MIN_SHARED_LEN
        if not is_short and prefix not in self._wanted and not self.has(prefix):
            self._wanted.append(prefix)

    def step(self) -> bool:
        """One copy, one chunk or one piece of a file; False when nothing is left to do."""
        if not self._wanted:
            return self._store_some()
        try:
            is_done = self._grow(self._wanted[0])
        except (BackendError, MemoryError) as error:
            log.warning("a prefix could not be warmed", exc_info=error)
            is_done = True
        if is_done:
            self._growing = None
            del self._wanted[0]
        return True

    def _grow(self, prefix: tuple[int, ...]) -> bool:
        """Copy a prefix out of a chat that begins with it, else forward one chunk; if it is whole.

        A turn never makes a checkpoint itself: cutting its prompt there would cost its first token
        one more pass over the weights.
        """
        if self._store.has_checkpoint(prefix):
            return True
        holder = self._store.copy_prefix(prefix)
        if holder is None:
            holder = self._growing = self._growing or Holder(self._executable)
            start = holder.length
            end = min(start - start % self._chunk_len + self._chunk_len, len(prefix))
            holder.forward(prefix[start:end], want_logits="none")
        if holder.length < len(prefix):
            return False
        self._store.add_checkpoint(holder)
        return True

    def close(self) -> None:
        """Give up the file that is being written; nothing stays of it."""
        self._saving = None

    def _store_some(self) -> bool:
        self._saving = self._saving or self._next_save()
        if self._saving is None:
            return False
        try:
            next(self._saving)
        except StopIteration:
            self._saving = None
        except (OSError, BackendError, MemoryError) as error:
            log.warning("a prefix could not be stored", exc_info=error)
            reason = str(error) or "memory is full"
            self._notice(f"system prompts are not kept between starts: {reason}")
            self._saving = self._folder = None
        return True

    def _next_save(self) -> Iterator[None] | None:
        """Writes the first checkpoint that is not on disk; None when all are."""
        if self._folder is None:
            return None
        for holder in self._store.checkpoints:
            if tuple(holder.token_ids) not in self._stored:
                self._stored.add(tuple(holder.token_ids))
                return self._folder.save(holder)
        return None
