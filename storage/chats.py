"""Chats and their messages: what a person wrote and read survives edits, stops and crashes.

Identity: a chat has a short id; a message has a number and points at the message it follows.
Form: the messages of a chat are a tree, and the chat points at its newest leaf (`head`). What is on
the screen is the path from the first message to the head. An edited question or a regenerated
answer is a new sibling: rows are only added, or an answer's own row grows. Nothing is deleted but
whole chats, and an attempt in which not one character arrived beside one that has text.
"""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from storage.answers import AnswerWriter, is_running, join_models, settle_answer, this_process
from storage.chat_search import SearchHit, search_chats
from storage.database import Database
from storage.errors import ChatGone, DatabaseBusy, StorageError

log = logging.getLogger(__name__)

Role = Literal["system", "user", "assistant"]

MessageState = Literal["complete", "partial", "interrupted", "stopped", "failed"]
"""partial: being written now. interrupted: its process died. stopped: a person stopped it."""

_ID_ALPHABET: Final = "23456789bcdfghjkmnpqrstvwxyz"
"""No vowels and no look-alikes: an id is no word, and can be read aloud and typed."""

_ID_LEN: Final = 6
"""28^6 = 480 million ids; a clash is drawn again."""

_TITLE_LEN: Final = 60


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as the list shows it."""

    id: str
    title: str
    """First line of the first question until a person renames the chat; empty before."""
    model: str
    """Name of the model it was opened with, or empty; each answer keeps its own."""
    system_prompt: str
    draft: str
    """What was typed and not sent yet."""
    head_id: int | None
    """The newest message on the shown path, or None in an empty chat."""
    num_messages: int
    """Messages of all branches."""
    created_at: float
    """Seconds since 1970, like every time here."""
    updated_at: float


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message, with where it stands in the tree."""

    id: int
    chat_id: str
    parent_id: int | None
    role: Role
    content: str
    state: MessageState
    model: str
    """Name and quantization of the model that wrote it; empty for a person's messages."""
    attempt: int
    """0 for the first answer to a question, then 1, 2, ...: the sampler's attempt number."""
    stats: Mapping[str, Any]
    """Counters of the turn as they were shown."""
    created_at: float


class ChatStore:
    """Every chat in the database. Lives on the thread that opened the database."""

    def __init__(self, database: Database, *, now: Callable[[], float] = time.time) -> None:
        """State: answers whose writing process is gone become `interrupted`."""
        self.database = database
        """For the other stores of this thread."""
        self._db = database
        self._now = now
        self._writers: list[AnswerWriter] = []
        self._interrupt_orphans()

    # Chats

    def create(self, *, title: str = "", model: str = "", system_prompt: str = "") -> Chat:
        """A new, empty chat."""
        now = self._now()
        with self._db.transaction() as db:
            chat_id = _free_id(db)
            db.execute(
                "INSERT INTO chats(id, title, model, system_prompt, created_at, updated_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (chat_id, title, model, system_prompt, now, now),
            )
        return self.get(chat_id)

    def list_chats(self) -> list[Chat]:
        """Every chat, newest change first."""
        return [
            _chat(row) for row in self._db.query(_SELECT_CHATS + "ORDER BY updated_at DESC, id")
        ]

    def get(self, chat_id: str) -> Chat:
        """The chat with this id. Raises: ChatGone."""
        rows = self._db.query(_SELECT_CHATS + "WHERE id = ?", (chat_id,))
        if not rows:
            raise _gone(chat_id)
        return _chat(rows[0])

    def find(self, beginning: str) -> Chat:
        """The one chat whose id begins so.

        Raises: ChatGone when there is none, StorageError when there are several.
        """
        typed = beginning.strip().lower()
        rows = self._db.query(
            _SELECT_CHATS + "WHERE substr(id, 1, ?) = ? LIMIT 5", (len(typed), typed)
        )
        if not typed or not rows:
            raise _gone(beginning)
        if len(rows) > 1:
            ids = ", ".join(row["id"] for row in rows)
            raise StorageError(f"chat id {beginning} is ambiguous: {ids}", hint="type more of it")
        return _chat(rows[0])

    def latest(self) -> Chat | None:
        """The chat that changed last, or None when there is none."""
        chats = self.list_chats()
        return chats[0] if chats else None

    def rename(self, chat_id: str, title: str) -> None:
        """Give a chat another title. Raises: ChatGone."""
        self._set(chat_id, "title", " ".join(title.split()))

    def set_system_prompt(self, chat_id: str, text: str) -> None:
        """Give a chat another system prompt, from its next answer on. Raises: ChatGone."""
        self._set(chat_id, "system_prompt", text)

    def save_draft(self, chat_id: str, text: str) -> None:
        """Keep what was typed and not sent; the chat does not move in the list.

        Raises: ChatGone.
        """
        self._set(chat_id, "draft", text)

    def delete(self, chat_id: str) -> None:
        """Delete a chat with every message, for good; asking first is the caller's part.

        Raises: ChatGone.
        """
        with self._db.transaction() as db:
            is_empty = _head_id(db, chat_id) is None
            db.execute("DELETE FROM chats WHERE id = ?", (chat_id,))
            if is_empty:
                return  # every chat that was opened and left without a word
            # The index only marks what is gone; merging its segments takes the text out of the file
            # (0.15 s with 2,000 messages of 1 kB). FTS5's own `secure-delete` would make the index
            # unreadable for SQLite before 3.42, and every message with it.
            db.execute("INSERT INTO message_texts(message_texts) VALUES ('optimize')")

    def search(self, text: str) -> list[SearchHit]:
        """Chats with every word of `text` in the title or in one message, newest change first."""
        return search_chats(self._db, text)

    # Messages

    def messages(self, chat_id: str) -> list[StoredMessage]:
        """The shown path, from the first message to the head. Raises: ChatGone."""
        by_id = {message.id: message for message in self.all_messages(chat_id)}
        path: list[StoredMessage] = []
        message_id = self.get(chat_id).head_id
        while message_id is not None and message_id in by_id:
            path.append(by_id[message_id])
            message_id = by_id[message_id].parent_id
        return path[::-1]

    def all_messages(self, chat_id: str) -> list[StoredMessage]:
        """Every message of every branch, in the order they were written."""
        rows = self._db.query("SELECT * FROM messages WHERE chat_id = ? ORDER BY id", (chat_id,))
        return [_message(row) for row in rows]

    def message(self, message_id: int) -> StoredMessage:
        """The message with this number. Raises: ChatGone."""
        rows = self._db.query("SELECT * FROM messages WHERE id = ?", (message_id,))
        if not rows:
            raise ChatGone(f"message {message_id} was deleted")
        return _message(rows[0])

    def add_message(self, chat_id: str, role: Role, content: str) -> StoredMessage:
        """Append a whole message after the head and move the head to it.

        State:  a first question names an untitled chat; the chat's draft is cleared by a question.
        Raises: ChatGone.
        """
        with self._db.transaction() as db:
            head_id = _head_id(db, chat_id)
            message_id = self._insert(db, chat_id, head_id, role, content, "complete")
            if role == "user":
                _name_and_clear_draft(db, chat_id, content)
        return self.message(message_id)

    def edit_message(self, message_id: int, content: str) -> StoredMessage:
        """Write another version beside a question; the old branch stays and can be selected.

        State:  the head moves to the new version, which has no answer yet.
        Raises: ChatGone.
        """
        old = self.message(message_id)
        with self._db.transaction() as db:
            _head_id(db, old.chat_id)
            new_id = self._insert(db, old.chat_id, old.parent_id, old.role, content, "complete")
        return self.message(new_id)

    def begin_answer(
        self, chat_id: str, *, model: str, parent_id: int | None = None
    ) -> AnswerWriter:
        """Start the answer to a message (default: the head) and move the head to it.

        To regenerate, pass the answer's own `parent_id`: the new answer is the next attempt beside
        the old one. The writer's `attempt` is the number for the sampler.
        State:  the writer is flushed with the others by `flush`, until it is finished.
        Raises: ChatGone.
        """
        with self._db.transaction() as db:
            head_id = _head_id(db, chat_id)
            follows = head_id if parent_id is None else parent_id
            message_id = self._insert(db, chat_id, follows, "assistant", "", "partial")
            return self._open_answer(db, message_id, model)

    def resume_answer(
        self, message_id: int, *, model: str, content: str, state: str
    ) -> AnswerWriter:
        """Open an answer again that ended early: what is appended goes behind its text.

        content, state: the answer as the person has it before them.
        State:  the answer is `partial` until it is finished; the name of another model joins the
                first one's.
        Raises: ChatGone; StorageError when it is another one by now, or being written: two
                windows that go on with one answer would mix their texts.
        """
        with self._db.transaction() as db:
            row = db.execute("SELECT * FROM messages WHERE id = ?", (message_id,)).fetchone()
            if row is None:
                raise ChatGone(f"message {message_id} was deleted")
            if row["state"] == "partial" and is_running(row["owner_pid"], row["owner_started"]):
                raise StorageError(
                    "this answer is being written in another window", hint="wait until it has ended"
                )
            if (row["content"], row["state"]) != (content, state):
                raise StorageError(
                    "this answer was changed in another window",
                    hint="open the chat again to see it",
                )
            return self._open_answer(db, message_id, model)

    def _open_answer(self, db: sqlite3.Connection, message_id: int, model: str) -> AnswerWriter:
        message = _message(
            db.execute("SELECT * FROM messages WHERE id = ?", (message_id,)).fetchone()
        )
        db.execute(
            "UPDATE messages SET state = 'partial', model = ?, owner_pid = ?, owner_started = ?"
            " WHERE id = ?",
            (join_models(message.model, model), *this_process(), message_id),
        )
        writer = AnswerWriter(
            self._db,
            message.chat_id,
            message_id,
            message.attempt,
            model=model,
            earlier_models=message.model,
            now=self._now,
        )
        self._writers.append(writer)
        return writer

    def flush(self) -> None:
        """Write what open answers have gathered; never raises, never waits for another process.

        To be called about once a second while answers stream: an answer that pauses is then safe
        too. What could not be written stays in the writer and is tried again.
        """
        for writer in self._writers:
            writer.flush()
        self._writers = [writer for writer in self._writers if not writer.is_finished]

    def attempts(self, message_id: int) -> list[StoredMessage]:
        """The message and its siblings, oldest first: attempts of an answer, edits of a question.

        Raises: ChatGone.
        """
        message = self.message(message_id)
        rows = self._db.query(
            "SELECT * FROM messages WHERE chat_id = ? AND parent_id IS ? AND role = ? ORDER BY id",
            (message.chat_id, message.parent_id, message.role),
        )
        return [_message(row) for row in rows]

    def select(self, message_id: int) -> None:
        """Show the branch of a message: the head moves to the newest leaf below it.

        Raises: ChatGone.
        """
        message = self.message(message_id)
        with self._db.transaction() as db:
            _head_id(db, message.chat_id)
            db.execute(
                "UPDATE chats SET head_id = ? WHERE id = ?",
                (_newest_leaf(db, message_id), message.chat_id),
            )

    # Parts

    def _insert(
        self,
        db: sqlite3.Connection,
        chat_id: str,
        parent_id: int | None,
        role: Role,
        content: str,
        state: MessageState,
    ) -> int:
        (attempt,) = db.execute(
            "SELECT coalesce(max(attempt) + 1, 0) FROM messages"
            " WHERE chat_id = ? AND parent_id IS ? AND role = ?",
            (chat_id, parent_id, role),
        ).fetchone()
        now = self._now()
        cursor = db.execute(
            "INSERT INTO messages(chat_id, parent_id, role, content, state, attempt, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (chat_id, parent_id, role, content, state, attempt, now),
        )
        assert cursor.lastrowid is not None, "an INSERT has a row id"
        db.execute(
            "UPDATE chats SET head_id = ?, updated_at = ? WHERE id = ?",
            (cursor.lastrowid, now, chat_id),
        )
        return cursor.lastrowid

    def _set(self, chat_id: str, column: str, value: str) -> None:
        sql = f"UPDATE chats SET {column} = ? WHERE id = ?"  # noqa: S608 - column names are ours
        with self._db.transaction() as db:
            if db.execute(sql, (value, chat_id)).rowcount == 0:
                raise _gone(chat_id)

    def _interrupt_orphans(self) -> None:
        rows = self._db.query(
            "SELECT id, owner_pid, owner_started FROM messages WHERE state = 'partial'"
        )
        orphans = [
            row["id"] for row in rows if not is_running(row["owner_pid"], row["owner_started"])
        ]
        if not orphans:
            return
        try:
            with self._db.transaction() as db:
                for message_id in orphans:
                    settle_answer(db, message_id, "interrupted")
        except DatabaseBusy:
            log.warning("another process writes: interrupted answers are marked at the next start")


_SELECT_CHATS: Final = (
    "SELECT *, (SELECT count(*) FROM messages WHERE chat_id = chats.id) AS num_messages FROM chats "
)


def _chat(row: sqlite3.Row) -> Chat:
    return Chat(
        id=row["id"],
        title=row["title"],
        model=row["model"],
        system_prompt=row["system_prompt"],
        draft=row["draft"],
        head_id=row["head_id"],
        num_messages=row["num_messages"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _message(row: sqlite3.Row) -> StoredMessage:
    return StoredMessage(
        id=row["id"],
        chat_id=row["chat_id"],
        parent_id=row["parent_id"],
        role=row["role"],
        content=row["content"],
        state=row["state"],
        model=row["model"],
        attempt=row["attempt"],
        stats=json.loads(row["stats"]),
        created_at=row["created_at"],
    )


def _gone(chat_id: str) -> ChatGone:
    return ChatGone(
        f"there is no chat {chat_id}", hint="it may have been deleted; list chats to see what is"
    )


def _head_id(db: sqlite3.Connection, chat_id: str) -> int | None:
    row = db.execute("SELECT head_id FROM chats WHERE id = ?", (chat_id,)).fetchone()
    if row is None:
        raise _gone(chat_id)
    head_id: int | None = row["head_id"]
    return head_id


def _free_id(db: sqlite3.Connection) -> str:
    while True:
        chat_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LEN))
        if db.execute("SELECT 1 FROM chats WHERE id = ?", (chat_id,)).fetchone() is None:
            return chat_id


def _newest_leaf(db: sqlite3.Connection, message_id: int) -> int:
    # A child is always newer than its parent, so the newest message of a branch is a leaf.
    (leaf,) = db.execute(
        "WITH RECURSIVE branch(id) AS (SELECT ? UNION ALL"
        " SELECT messages.id FROM messages JOIN branch ON parent_id = branch.id)"
        " SELECT max(id) FROM branch",
        (message_id,),
    ).fetchone()
    return int(leaf)


def _name_and_clear_draft(db: sqlite3.Connection, chat_id: str, question: str) -> None:
    first_line = next((line.strip() for line in question.splitlines() if line.strip()), "")
    title = first_line if len(first_line) <= _TITLE_LEN else first_line[: _TITLE_LEN - 1] + "…"
    db.execute(
        "UPDATE chats SET draft = '', title = CASE title WHEN '' THEN ? ELSE title END"
        " WHERE id = ?",
        (title, chat_id),
    )
