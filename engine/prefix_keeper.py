"""Background work on shared prefixes, done while no turn runs: warm one, write new ones to disk.

Each step is short, because a turn that is submitted meanwhile waits for it. Never fails a turn or
a load: what goes wrong is told once, and the prefix is forwarded when a chat needs it.
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
        """The first is `store.growing`, as far as it is forwarded."""
        self._stored: set[tuple[int, ...]] = set()
        self._saving: Iterator[None] | None = None
        """The file that is being written."""

    def want(self, prefix: tuple[int, ...]) -> None:
        """Have this prefix ready for the next new chat; too short ones are not worth it."""
        if len(prefix) >= MIN_SHARED_LEN and prefix not in self._wanted:
            self._wanted.append(prefix)

    def restore(self, prefix: tuple[int, ...]) -> None:
        """Make a prefix that is on disk a checkpoint, where the budget has room for it."""
        is_known = len(prefix) < MIN_SHARED_LEN or self._store.has_checkpoint(prefix)
        if self._folder is None or is_known or not self._fits(prefix):
            return
        try:
            holder = self._folder.load(self._executable, prefix)
        except CheckpointUnsound as error:
            log.warning("checkpoint ignored", exc_info=error)
            self._notice(str(error))
            self._stored.discard(prefix)
            return
        except BackendError as error:
            log.warning("no memory for a stored prefix", exc_info=error)
            return
        if holder is None:
            self._stored.discard(prefix)  # another process may have removed it for room
            return
        self._stored.add(prefix)
        self._store.add_checkpoint(holder)

    def _fits(self, prefix: tuple[int, ...]) -> bool:
        return self._store.has_room(len(prefix) * self._executable.cache_bytes_per_token)

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
            self._store.growing = None
            del self._wanted[0]
        return True

    def _grow(self, prefix: tuple[int, ...]) -> bool:
        """Copy a prefix from disk or a chat, else forward one chunk; whether that was the last.

        One the budget has no room for is given up: it would be evicted and made again for ever. A
        turn never makes a checkpoint itself: cutting its prompt there would cost its first token
        one more pass over the weights.
        """
        if self._store.growing is None:
            self.restore(prefix)
            if self._store.has_checkpoint(prefix) or not self._fits(prefix):
                return True
        holder = self._store.copy_prefix(prefix) or self._grown(prefix)
        if holder is None or holder.length < len(prefix):
            return holder is None
        self._store.growing = None
        self._store.add_checkpoint(holder)
        return True

    def _grown(self, prefix: tuple[int, ...]) -> Holder | None:
        """The prefix with one more chunk forwarded; None where its cache is over the budget."""
        holder = self._store.growing
        if holder is None:
            holder = Holder(self._executable)
            holder.ensure_capacity(len(prefix))
            if not self._store.has_room(holder.num_bytes):
                return None
            self._store.growing = holder
        start = holder.length
        end = min(start - start % self._chunk_len + self._chunk_len, len(prefix))
        holder.forward(prefix[start:end], want_logits="none")
        return holder

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
