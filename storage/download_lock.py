"""One process at a time works on a file that is being downloaded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from storage.errors import DownloadBusy


def download_lock(target: Path) -> AbstractContextManager[object]:
    """Hold the lock of a file's download; the system drops it when the process ends.

    The empty lock file stays: deleting it would let two processes hold "the" lock.
    Raises: DownloadBusy when another process, or another thread, holds it.
    """
    from filelock import FileLock, Timeout  # 74 ms, and listing models does not need it

    lock = FileLock(target.with_name(f".{target.name}.lock"), blocking=False)
    try:
        return lock.acquire()
    except Timeout:
        raise DownloadBusy(
            f"{target.name} is being downloaded by another process",
            hint="wait for it to finish, or stop it there; its part can be continued afterwards",
        ) from None
