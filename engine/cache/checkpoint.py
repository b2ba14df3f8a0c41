"""A prefix's cache on disk, so that a system prompt is forwarded once per model, not per start.

One `.npz` per prefix, written to a temporary name and renamed. Its header names model content,
backend, layout version and the ids; anything that does not match, or cannot be read, is ignored:
the prefix is then forwarded again. Knows no turns.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backends.base import BackendError, Cache, Executable
from engine.cache.holder import Holder
from engine.errors import CheckpointUnsound

LAYOUT_VERSION = 1
"""Raised when the meaning of the file or of a cache export changes."""
MAX_FILES = 8
"""Prefixes kept on disk per folder, the most recently used ones."""
_SUFFIX = ".checkpoint.npz"
_STATE = "state."
_UNSOUND = (BackendError, EOFError, KeyError, MemoryError, OSError, ValueError, zipfile.BadZipFile)
"""What reading a damaged, truncated or foreign file may raise."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """Prefixes of one model on one backend, in a folder shared with others."""

    folder: Path
    content_hash: str
    """Of the model file and its layout."""
    backend: str
    """Name and device: a cache is not carried from one arithmetic to another."""

    def path_for(self, token_ids: Sequence[int]) -> Path:
        """Where a prefix is kept."""
        text = json.dumps(self._header(token_ids))
        return self.folder / (hashlib.sha256(text.encode()).hexdigest()[:32] + _SUFFIX)

    def save(self, holder: Holder) -> None:
        """Write a prefix and drop the oldest files. State: disk only.

        Raises: OSError when it cannot be written; no half file is left under the final name.
        """
        # A system prompt may be private, and the file holds its tokens.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path_for(holder.token_ids)
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        arrays = {_STATE + key: value for key, value in holder.cache.export_state().items()}
        header = json.dumps(self._header(holder.token_ids)).encode()
        arrays["header"] = np.frombuffer(header, dtype=np.uint8)
        try:
            with partial.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]  # a stub without **kwds of arrays
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self._drop_oldest()

    def load(self, executable: Executable, token_ids: Sequence[int]) -> Holder | None:
        """A holder with this prefix, or None when there is no file of it.

        Raises: CheckpointUnsound when there is one that cannot be used; it has been removed.
        """
        path = self.path_for(token_ids)
        try:
            cache = self._read(path, executable, token_ids)
            os.utime(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
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
            "backend": self.backend,
            "token_ids": list(token_ids),
        }

    def _drop_oldest(self) -> None:
        files = sorted(self.folder.glob("*" + _SUFFIX), key=lambda path: path.stat().st_mtime)
        for path in files[:-MAX_FILES]:
            path.unlink(missing_ok=True)
