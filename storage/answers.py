"""Writes an answer while it streams, so that a crash costs at most the last second of it.

The text is appended to the answer's own row. A flush never waits for another process and never
raises: the person goes on reading, the text stays here and is tried again. Only `finish` insists.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from storage.database import Database
from storage.errors import ChatGone, DatabaseBusy, StorageError

if TYPE_CHECKING:
    from storage.chats import MessageState

FLUSH_INTERVAL_S: Final = 0.5
"""Shortest time between two flushes that `append` makes by itself."""

_JOINED_MODELS: Final = " + "
"""Between the names of the models that wrote one answer."""

_START_TOLERANCE_S: Final = 5.0
"""A process's start time moves a little when the system clock is set."""


class AnswerWriter:
    """The open answer of one turn. Lives on the thread that owns the database."""

    def __init__(
        self,
        database: Database,
        chat_id: str,
        message_id: int,
        attempt: int,
        *,
        model: str,
        earlier_models: str = "",
        now: Callable[[], float],
    ) -> None:
        self.chat_id = chat_id
        self.message_id = message_id
        self.attempt = attempt
        self.model = model
        """Who writes; stored with the end, for it may be known only after the beginning."""
        self._earlier_models = earlier_models
        self.is_finished = False
        self.problem: StorageError | None = None
        """Why the last flush did not get through, or None; worth one notice, not a stop."""
        self._db = database
        self._now = now
        self._pending: list[str] = []
        self._flushed_at = now()

    def append(self, text: str) -> None:
        """Add text to the answer; written at once when the last flush is old enough."""
        self._pending.append(text)
        if self._now() - self._flushed_at >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered. Never raises, never waits; a failure is kept in `problem`."""
        if self.is_finished or not self._pending or isinstance(self.problem, ChatGone):
            return
        self._flushed_at = self._now()
        try:
            with self._db.transaction(wait=False) as db:
                self._write_pending(db)
        except DatabaseBusy:
            return  # another window writes just now; the text goes with the next flush
        except StorageError as error:
            self.problem = error
            return
        self._pending.clear()
        self.problem = None

    def finish(
        self,
        state: MessageState,
        *,
        stats: Mapping[str, Any] | None = None,
        text: str | None = None,
    ) -> None:
        """Write the rest and give the answer its final state.

        text: the whole answer, when it is known better than by its pieces (a stop string was cut).
        State:  an attempt without one character beside one with text is dropped, and the head goes
                back to the other. Finishing twice does nothing.
        Raises: ChatGone when the chat was deleted meanwhile; StorageError when the answer could
                not be written: its text is still here, and `finish` may be called again.
        """
        if self.is_finished:
            return
        with self._db.transaction() as db:
            self._write_pending(db)
            if text is not None:
                db.execute("UPDATE messages SET content = ? WHERE id = ?", (text, self.message_id))
            db.execute(
                "UPDATE messages SET stats = ?, model = ? WHERE id = ?",
                (
                    json.dumps(dict(stats or {})),
                    join_models(self._earlier_models, self.model),
                    self.message_id,
                ),
            )
            db.execute("UPDATE chats SET updated_at = ? WHERE id = ?", (self._now(), self.chat_id))
            settle_answer(db, self.message_id, state)
        self._pending.clear()
        self.is_finished = True
        self.problem = None

    def _write_pending(self, db: sqlite3.Connection) -> None:
        cursor = db.execute(
            "UPDATE messages SET content = content || ? WHERE id = ?",
            ("".join(self._pending), self.message_id),
        )
        if cursor.rowcount == 0:
            raise ChatGone(
                f"chat {self.chat_id} was deleted while its answer was written",
                hint="copy the answer from the screen if you need it",
            )


def join_models(earlier: str, model: str) -> str:
    """The names of all that wrote an answer, the last one last; empty: nothing was added."""
    names = [name for name in earlier.split(_JOINED_MODELS) if name and name != model]
    return _JOINED_MODELS.join([*names, model]) if model else earlier


def settle_answer(db: sqlite3.Connection, message_id: int, state: MessageState) -> None:
    """Give an answer its final state, or drop it when it is empty beside an older attempt.

    State: to be called inside a transaction.
    """
    row = db.execute("SELECT * FROM messages WHERE id = ?", (message_id,)).fetchone()
    sibling = db.execute(
        "SELECT max(id) AS id FROM messages WHERE chat_id = ? AND parent_id IS ? AND role = ?"
        " AND id <> ? AND content <> ''",
        (row["chat_id"], row["parent_id"], row["role"], message_id),
    ).fetchone()
    if row["content"] == "" and state != "complete" and sibling["id"] is not None:
        db.execute("UPDATE chats SET head_id = ? WHERE head_id = ?", (sibling["id"], message_id))
        db.execute("DELETE FROM messages WHERE id = ?", (message_id,))
        return
    db.execute(
        "UPDATE messages SET state = ?, owner_pid = NULL, owner_started = NULL WHERE id = ?",
        (state, message_id),
    )


def this_process() -> tuple[int, float]:
    """(process id, start time in seconds since 1970): a pid alone is used again."""
    import psutil  # 24 ms, and listing chats does not need it

    return os.getpid(), psutil.Process().create_time()


def is_running(pid: int | None, started: float | None) -> bool:
    """Whether the process that was started then is still there."""
    import psutil

    if pid is None or started is None:
        return False
    try:
        return bool(abs(psutil.Process(pid).create_time() - started) < _START_TOLERANCE_S)
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
