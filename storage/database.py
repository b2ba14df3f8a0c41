"""Opens the one SQLite file: WAL, busy timeout, foreign keys, migrations after a backup.

Knows nothing of chats. A connection belongs to the thread that opened it (the UI thread);
sqlite3 itself refuses any other. Plain sqlite3 rather than sqlite-utils: `foretell chats list`
imports this, and that import alone took 0.24 s.
"""

from __future__ import annotations

import sqlite3
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.errors import DatabaseBusy, DatabaseCorrupt, DatabaseTooNew, StorageError
from storage.migrations import MIGRATIONS
from storage.paths import make_private_file

BUSY_TIMEOUT_MS = 5000
"""Longest wait for another process's write; a flush of a few kB holds the lock for milliseconds."""

SETUP_TIMEOUT_S = 60.0
"""Longest wait for another process that is migrating; a backup of 1 GB takes some seconds."""


class Database:
    """One connection to the database file, migrated to the newest schema."""

    def __init__(self, path: Path, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> None:
        """Open, create or migrate the file.

        Raises: DatabaseTooNew, DatabaseCorrupt, DatabaseBusy, or StorageError when the file
        cannot be read or written. The file is never replaced or deleted.
        """
        self.path = path
        make_private_file(path)
        with self._explained():
            self._connection = sqlite3.connect(path, isolation_level=None)
        try:
            with self._explained():
                self._prepare(busy_timeout_ms)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the connection; WAL contents go into the file when it is the last one."""
        self._connection.close()

    @contextmanager
    def transaction(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """One all-or-nothing write. `wait=False` gives up at once when another process writes.

        Raises: DatabaseBusy and the other StorageErrors; nothing was written then.
        """
        with self._explained():
            self._begin(wait=wait)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk makes SQLite roll back by itself; a second ROLLBACK would raise.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Every row of a SELECT. Raises: StorageError."""
        with self._explained():
            return self._connection.execute(sql, parameters).fetchall()

    def _begin(self, *, wait: bool) -> None:
        if wait:
            self._connection.execute("BEGIN IMMEDIATE")
            return
        (timeout_ms,) = self._connection.execute("PRAGMA busy_timeout").fetchone()
        self._connection.execute("PRAGMA busy_timeout = 0")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {int(timeout_ms)}")

    def _prepare(self, busy_timeout_ms: int) -> None:
        connection = self._connection
        connection.row_factory = sqlite3.Row
        connection.create_function("fold", 1, fold, deterministic=True)
        connection.execute("PRAGMA trusted_schema = ON")  # our triggers call `fold`
        connection.execute(f"PRAGMA busy_timeout = {int(busy_timeout_ms)}")
        connection.execute("PRAGMA foreign_keys = ON")
        # A deleted chat is overwritten, not only forgotten.
        connection.execute("PRAGMA secure_delete = ON")
        self._refuse_newer(self._version())
        if self._is_prepared():
            return
        from filelock import FileLock, Timeout  # 74 ms, and only a first start needs it

        # The lock file makes "switch to WAL, back up, migrate" one thing between processes:
        # the switch to WAL answers "locked" at once, without the busy timeout.
        lock = FileLock(self.path.with_name(self.path.name + ".lock"), timeout=SETUP_TIMEOUT_S)
        try:
            with lock:
                connection.execute("PRAGMA journal_mode = WAL")
                self._migrate()
        except Timeout:
            raise DatabaseBusy(
                f"{self.path} is being prepared by another process",
                hint="wait for it to finish, then start again",
            ) from None

    def _is_prepared(self) -> bool:
        (mode,) = self._connection.execute("PRAGMA journal_mode").fetchone()
        return mode == "wal" and self._version() == len(MIGRATIONS)

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    def _refuse_newer(self, version: int) -> None:
        if version > len(MIGRATIONS):
            raise DatabaseTooNew(
                f"{self.path} has schema version {version}; "
                f"this program knows versions up to {len(MIGRATIONS)}",
                hint="update foretell, or set FORETELL_HOME to another folder",
            )

    def _migrate(self) -> None:
        version = self._version()
        self._refuse_newer(version)
        if 0 < version < len(MIGRATIONS):
            self._back_up(version)
        for number, migrate in enumerate(MIGRATIONS[version:], version + 1):
            with self.transaction() as connection:
                migrate(connection)
                connection.execute(f"PRAGMA user_version = {number}")

    def _back_up(self, version: int) -> None:
        """Copy the file as it is to `chats.db.v<version>` before it is changed."""
        backup = self.path.with_name(f"{self.path.name}.v{version}")
        draft = backup.with_name(backup.name + ".new")
        draft.unlink(missing_ok=True)
        make_private_file(draft)
        self._connection.execute("VACUUM INTO ?", (str(draft),))
        draft.replace(backup)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's own errors as StorageErrors a person can act on."""
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
            raise  # a bug here, nothing a person could mend
        except sqlite3.Error as error:
            raise _explain(error, self.path) from error
        except OSError as error:
            raise StorageError(f"cannot use {self.path}: {error.strerror or error}") from error


def fold(text: str) -> str:
    """Text as it is compared by a search: letter case and composed accents do not matter."""
    return unicodedata.normalize("NFC", text).casefold()


def _explain(error: sqlite3.Error, path: Path) -> StorageError:
    name = error.sqlite_errorname or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return DatabaseBusy(
            f"{path} is locked by another process",
            hint="close the other program that is writing to it, then try again",
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return DatabaseCorrupt(
            f"{path} is damaged or not a database: {error}",
            hint=f"it is left as it is; move it away to start empty (backups: {path.name}.v*)",
        )
    if name.startswith("SQLITE_FULL"):
        return StorageError(
            f"the disk is full: {path} could not be written", hint="free some space, then try again"
        )
    if name.startswith("SQLITE_READONLY"):
        return StorageError(
            f"{path} is read-only", hint="check the permissions of the file and its folder"
        )
    if name.startswith("SQLITE_CANTOPEN"):
        return StorageError(
            f"cannot open {path}", hint="check the permissions of the file and its folder"
        )
    return StorageError(f"cannot use {path}: {error}")
