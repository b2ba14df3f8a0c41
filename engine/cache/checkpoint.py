"""A prefix's cache on disk, so that a system prompt is forwarded once per model, not per start.

One `.npz` per prefix, written to a temporary name piece by piece and renamed. Its header names
model content, arithmetic, layout version and the ids; anything that does not match, or cannot be
read, is ignored: the prefix is then forwarded again. Knows no turns.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backends.base import BackendError, Cache, Executable, OutOfDeviceMemory
from engine.cache.holder import Holder
from engine.errors import CheckpointUnsound

LAYOUT_VERSION = 1
"""Raised when the meaning of the file or of a cache export changes, or a backend's arithmetic."""
MAX_BYTES = 1 << 30
"""Of a folder; the most recently used prefixes stay."""
STALE_S = 86_400
"""A file half written for a day is a killed process's."""
_SUFFIX = ".checkpoint.npz"
_PART = ".part"
_STATE = "state."
_UNSOUND = (BackendError, EOFError, KeyError, MemoryError, OSError, ValueError, zipfile.BadZipFile)
"""What reading a damaged, truncated or foreign file may raise."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """Prefixes of one model on one backend, in a folder shared with others."""

    folder: Path
    content_hash: str
    """Of the model file and its layout."""
    arithmetic: str
    """Of the backend: a cache is not carried from one to another."""

    def path_for(self, token_ids: Sequence[int]) -> Path:
        """Where a prefix is kept."""
        text = json.dumps(self._header(token_ids))
        return self.folder / (hashlib.sha256(text.encode()).hexdigest()[:32] + _SUFFIX)

    def save(self, holder: Holder) -> Iterator[None]:
        """Write a prefix, one array at a time, in the room the oldest files leave.

        State:  disk only; left half way, nothing stays of it.
        Raises: OSError when it cannot be written; OutOfDeviceMemory, MemoryError.
        """
        arrays = {_STATE + key: value for key, value in holder.cache.export_state().items()}
        header = json.dumps(self._header(holder.token_ids)).encode()
        arrays["header"] = np.frombuffer(header, dtype=np.uint8)
        num_bytes = sum(array.nbytes for array in arrays.values())
        if num_bytes > MAX_BYTES:
            return
        # A system prompt may be private, and the file holds its tokens.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(num_bytes)
        path = self.path_for(holder.token_ids)
        partial = path.with_name(f"{path.name}.{os.getpid()}{_PART}")
        try:
            with zipfile.ZipFile(partial, "w") as archive:
                for key, array in arrays.items():
                    with archive.open(f"{key}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, array, allow_pickle=False)
                    yield
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def load(self, executable: Executable, token_ids: Sequence[int]) -> Holder | None:
        """A holder with this prefix, or None when there is no file of it.

        Raises: CheckpointUnsound when there is one that cannot be used; it has been removed.
                OutOfDeviceMemory.
        """
        path = self.path_for(token_ids)
        try:
            cache = self._read(path, executable, token_ids)
            os.utime(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OutOfDeviceMemory:
            raise  # the file is sound
        except _UNSOUND as error:
            with suppress(OSError):
                path.unlink()
            raise CheckpointUnsound(f"a stored prefix is made again: {error}") from error
        return Holder(executable, cache, token_ids)

    def _read(self, path: Path, executable: Executable, token_ids: Sequence[int]) -> Cache:
        # Our own handle: numpy leaves its one open when the archive is damaged.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError(f"{path.name} is not an archive")
            arrays = {key: archive[key] for key in archive.files}
        if bytes(arrays.pop("header")) != json.dumps(self._header(token_ids)).encode():
            raise ValueError(f"{path.name} belongs to another model or prompt")
        cache = executable.new_cache()
        cache.import_state(
            {key.removeprefix(_STATE): array for key, array in arrays.items()}, len(token_ids)
        )
        return cache

    def _header(self, token_ids: Sequence[int]) -> dict[str, object]:
        return {
            "version": LAYOUT_VERSION,
            "content_hash": self.content_hash,
            "arithmetic": self.arithmetic,
            "token_ids": list(token_ids),
        }

    def _make_room(self, num_bytes: int) -> None:
        """Remove what killed processes left half written, and the oldest files over `MAX_BYTES`.

        Other processes do the same in this folder: a file that has gone meanwhile is no error.
        """
        found = []
        for path in self.folder.glob(f"*{_SUFFIX}*"):
            with suppress(OSError):
                found.append((path.stat(), path))
        room = MAX_BYTES - num_bytes
        for status, path in sorted(found, key=lambda file: -file[0].st_mtime):
            if path.suffix == _PART:
                is_garbage = time.time() - status.st_mtime > STALE_S
            else:
                room -= status.st_size
                is_garbage = room < 0
            if is_garbage:
                with suppress(OSError):
                    path.unlink()
