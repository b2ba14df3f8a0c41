"""What storage raises. Each error is one line for a person: what, which value, then a hint.

StorageError                 something on disk or in a download could not be used
├── DatabaseTooNew           written by a newer version; both versions are named
├── DatabaseCorrupt          the file is damaged; it is kept as it is
├── DatabaseBusy             another process kept the write lock longer than the busy timeout
├── ChatGone                 the chat was deleted, perhaps by another window
├── ModelNotFound            no file, catalog name or path of that name   (exit code 3)
├── NotEnoughSpace           the disk is too full; both numbers are named (exit code 5)
└── DownloadFailed           a download ended without a file
    ├── AccessDenied         the server wants a token, or accepted terms
    ├── ChecksumMismatch     the bytes are not the ones that were asked for
    ├── DownloadBusy         another process is downloading the same file
    ├── DownloadCancelled    a person stopped it; the part is kept
    └── OfflineError         a connection was needed and refused          (exit code 6)
"""

from __future__ import annotations


class StorageError(Exception):
    """Files or the database could not be used; `hint` says what a person can do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class DatabaseTooNew(StorageError):
    """The database was written by a newer version of the program."""


class DatabaseCorrupt(StorageError):
    """The database file is damaged or not a database; it is left untouched."""


class DatabaseBusy(StorageError):
    """Another process held the write lock for the whole busy timeout."""


class ChatGone(StorageError):
    """The chat or message does not exist (any more)."""


class ModelNotFound(StorageError):
    """A name or path leads to no model file."""


class NotEnoughSpace(StorageError):
    """The disk has no room; the message carries needed and free bytes."""


class DownloadFailed(StorageError):
    """A download ended without a whole file; what arrived is kept where it can be used."""


class AccessDenied(DownloadFailed):
    """The server refused: no token, a wrong token, or terms that were not accepted."""


class ChecksumMismatch(DownloadFailed):
    """Size or SHA-256 of what arrived is not what was asked for; nothing was installed."""


class DownloadBusy(DownloadFailed):
    """Another process is downloading this file."""


class DownloadCancelled(DownloadFailed):
    """A person stopped the download; the part is kept."""


class OfflineError(DownloadFailed):
    """A connection would be needed, and the program was told to stay offline."""
