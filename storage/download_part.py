"""A download on its way to its final name: the part, its note, its hash, the space it needs.

The part lies beside its target as `NAME.part`, with `NAME.part.json` saying what it is a part of.
The final name appears in one step, and only when size and SHA-256 are right.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from storage.errors import ChecksumMismatch, DownloadCancelled, NotEnoughSpace, StorageError
from storage.model_files import PART_SUFFIX
from storage.paths import make_private_dir

CHUNK_BYTES: Final = 1 << 20

SPACE_RESERVE_BYTES: Final = 64 << 20
"""Left free on the disk, so that chats can still be saved after a download."""

_GGUF_MAGIC: Final = b"GGUF"
"""Source: GGUF specification, first four bytes of a file."""

FreeSpace = Callable[[Path], int]
"""Folder -> bytes that can still be written there."""


def free_space(folder: Path) -> int:
    """Bytes that can still be written to the disk of a folder."""
    return shutil.disk_usage(folder).free


def require_space(name: str, num_missing: int, folder: Path, num_free: int) -> None:
    """Refuse what does not fit beside the reserve. Raises: NotEnoughSpace with both numbers."""
    if num_missing + SPACE_RESERVE_BYTES > num_free:
        raise NotEnoughSpace(
            f"{name} needs {_mb(num_missing)} more in {folder}, "
            f"but only {_mb(num_free)} are free ({_mb(SPACE_RESERVE_BYTES)} are left for chats)",
            hint="free some space, or set FORETELL_HOME to a folder on another disk",
        )


@dataclass(slots=True)
class PartNote:
    """What a part is a part of; kept beside it."""

    source: str
    """The address it comes from, without tokens or query."""
    size_bytes: int | None = None
    sha256: str | None = None
    etag: str | None = None
    num_sources: int = 0
    """Of a file joined from several packages: those whose bytes are in the part, whole."""
    num_joined_bytes: int = 0
    """Bytes of these; what follows them was cut off in the middle of a package."""


class DownloadPart:
    """One part, open for appending. Use it as a context manager; leaving keeps the part."""

    def __init__(
        self, target: Path, wanted: PartNote, *, get_free_space: FreeSpace = free_space
    ) -> None:
        """Open the part of a target; what another file has left there is discarded."""
        self.target = target
        self.path = target.with_name(target.name + PART_SUFFIX)
        self.num_bytes = 0
        """Bytes in the part, all of them hashed."""
        self.note = wanted
        self.wanted_size_bytes = wanted.size_bytes
        self.wanted_sha256 = wanted.sha256
        self._note_path = self.path.with_name(self.path.name + ".json")
        self._get_free_space = get_free_space
        self._hash = hashlib.sha256()
        make_private_dir(target.parent)
        old = self._read_note()
        if old is None or not _is_same(old, wanted):
            self.path.unlink(missing_ok=True)
        else:
            self.note = dataclasses.replace(
                old,
                source=wanted.source,
                size_bytes=wanted.size_bytes or old.size_bytes,
                sha256=wanted.sha256 or old.sha256,
            )
        try:
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise self._explain(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if self.path.exists() and self.path.stat().st_size == 0:
            self.discard()

    def cut(self, num_bytes: int) -> None:
        """Drop what lies behind so many bytes. State: to be called before `read_kept`."""
        self._file.truncate(min(num_bytes, self.path.stat().st_size))

    def read_kept(self, on_bytes: Callable[[int], None], is_cancelled: Callable[[], bool]) -> None:
        """Hash what an earlier run has left, so that the whole file can be checked at the end."""
        self._file.seek(0)
        while chunk := self._file.read(CHUNK_BYTES):
            if is_cancelled():
                raise DownloadCancelled(f"{self.target.name} was cancelled; its part is kept")
            self._hash.update(chunk)
            self.num_bytes += len(chunk)
            on_bytes(self.num_bytes)

    def save_note(self) -> None:
        """Write down what the part is, in one step."""
        draft = self._note_path.with_name(self._note_path.name + ".new")
        try:
            draft.write_text(json.dumps(dataclasses.asdict(self.note), indent=1), "utf-8")
            os.replace(draft, self._note_path)
        except OSError as error:
            raise self._explain(error) from error

    def require_space(self, num_extra: int = 0) -> None:
        """Refuse before the first byte when the rest does not fit. Raises: NotEnoughSpace.

        num_extra: bytes needed beside the file itself for a while.
        """
        if self.note.size_bytes is None:
            return
        missing = self.note.size_bytes - self.num_bytes + num_extra
        folder = self.target.parent
        require_space(self.target.name, missing, folder, self._get_free_space(folder))

    def write(self, chunk: bytes) -> None:
        """Append bytes. Raises: NotEnoughSpace (the part is kept), ChecksumMismatch when the file
        grows past its size or does not begin like a GGUF file.
        """
        if self.num_bytes == 0 and not chunk.startswith(_GGUF_MAGIC[: len(chunk)]):
            self.restart()
            raise ChecksumMismatch(
                f"{self.note.source} is no GGUF file (it begins with {chunk[:16]!r})",
                hint="check the address; it may be a web page about the file",
            )
        size = self.note.size_bytes
        if size is not None and self.num_bytes + len(chunk) > size:
            self.restart()
            raise ChecksumMismatch(
                f"{self.note.source} sends more than the {size} bytes it should have",
                hint="the file was replaced; try again, or another source",
            )
        self._append(chunk)

    def restart(self) -> None:
        """Throw the bytes away, because they belong to another version of the file."""
        self._file.truncate(0)
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        # What a server said of the old version must not be demanded of the new one.
        self.note = PartNote(self.note.source, self.wanted_size_bytes, self.wanted_sha256)

    def discard(self) -> None:
        """Remove the part and its note."""
        self._file.close()
        self.path.unlink(missing_ok=True)
        self._note_path.unlink(missing_ok=True)

    def install(self) -> str:
        """Check size and hash, then give the file its final name; returns its SHA-256.

        Raises: ChecksumMismatch, and the bytes are discarded: nobody knows which are wrong.
        """
        digest = self._hash.hexdigest()
        size, expected = self.note.size_bytes, self.note.sha256
        if size is not None and self.num_bytes != size:
            self.discard()
            raise ChecksumMismatch(
                f"{self.target.name} has {self.num_bytes} bytes instead of {size}",
                hint="it was not installed; try again",
            )
        if expected is not None and digest != expected:
            self.discard()
            raise ChecksumMismatch(
                f"{self.target.name} has SHA-256 {digest} instead of {expected}",
                hint="it was not installed; try again, or another source",
            )
        os.fsync(self._file.fileno())
        self._file.close()
        try:
            os.replace(self.path, self.target)
        except PermissionError as error:
            raise StorageError(
                f"cannot replace {self.target}: it is in use", hint="close the chat that uses it"
            ) from error
        self._note_path.unlink(missing_ok=True)
        return digest

    def _append(self, chunk: bytes) -> None:
        num_written = 0
        try:
            while num_written < len(chunk):
                num_written += self._file.write(chunk[num_written:])
        except OSError as error:
            raise self._explain(error) from error
        finally:
            self._hash.update(chunk[:num_written])
            self.num_bytes += num_written

    def _explain(self, error: OSError) -> StorageError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NotEnoughSpace(
                f"the disk became full at {_mb(self.num_bytes)} of {self.target.name}",
                hint="free some space and pull again: it goes on from there",
            )
        return StorageError(
            f"cannot write {self.path}: {error.strerror}", hint="check the folder's permissions"
        )

    def _read_note(self) -> PartNote | None:
        try:
            return PartNote(**json.loads(self._note_path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None  # no note, or a damaged one: the part cannot be trusted


def _is_same(old: PartNote, wanted: PartNote) -> bool:
    """Whether a part may be continued: the same hash from any mirror, or the same address."""
    if old.sha256 and wanted.sha256:
        return old.sha256 == wanted.sha256
    has_same_size = not (old.size_bytes and wanted.size_bytes) or (
        old.size_bytes == wanted.size_bytes
    )
    return old.source == wanted.source and has_same_size


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
