"""The database schema, one numbered step after the other; `PRAGMA user_version` is the record.

A step never changes once it was released. Each runs in one transaction with its record.
Times are seconds since 1970 (UTC, float). Text is stored as it was typed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable


def m001_chats_and_messages(db: sqlite3.Connection) -> None:
    """Chats, and their messages as a tree.

    A message points at the one it follows, and a chat at its newest leaf. An edited question or a
    regenerated answer is a sibling, so that nothing a person has read is ever overwritten.
    `owner_pid` and `owner_started` name the process that is writing an answer: another process
    that opens the file must not call it interrupted while it is being written.
    """
    db.execute("""
        CREATE TABLE chats (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL DEFAULT '',
            model TEXT NOT NULL DEFAULT '',
            system_prompt TEXT NOT NULL DEFAULT '',
            draft TEXT NOT NULL DEFAULT '',
            is_archived INTEGER NOT NULL DEFAULT 0,
            head_id INTEGER REFERENCES messages(id) ON DELETE SET NULL,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL
        )""")
    db.execute("""
        CREATE TABLE messages (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            chat_id TEXT NOT NULL REFERENCES chats(id) ON DELETE CASCADE,
            parent_id INTEGER REFERENCES messages(id) ON DELETE CASCADE,
            role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
            content TEXT NOT NULL,
            state TEXT NOT NULL
                CHECK (state IN ('complete', 'partial', 'interrupted', 'stopped', 'failed')),
            model TEXT NOT NULL DEFAULT '',
            attempt INTEGER NOT NULL DEFAULT 0,
            stats TEXT NOT NULL DEFAULT '{}',
            owner_pid INTEGER,
            owner_started REAL,
            created_at REAL NOT NULL
        )""")
    db.execute("CREATE INDEX chats_by_update ON chats(updated_at DESC)")
    db.execute("CREATE INDEX messages_by_chat ON messages(chat_id)")
    db.execute("CREATE INDEX messages_by_parent ON messages(parent_id)")
    db.execute("CREATE INDEX partial_messages ON messages(state) WHERE state = 'partial'")


def m002_full_text_search(db: sqlite3.Connection) -> None:
    """Trigram index over message texts: it finds parts of words, and Chinese and Japanese too.

    The index keeps its own copy of the text, so that a delete needs no old value. Answers enter it
    when they are final: re-indexing a long answer once a second while it grows would not be cheap.
    """
    db.execute("CREATE VIRTUAL TABLE message_texts USING fts5(content, tokenize='trigram')")
    db.execute("""
        CREATE TRIGGER message_added AFTER INSERT ON messages WHEN new.state <> 'partial' BEGIN
            INSERT INTO message_texts(rowid, content) VALUES (new.id, new.content);
        END""")
    db.execute("""
        CREATE TRIGGER message_changed AFTER UPDATE OF content, state ON messages
        WHEN new.state <> 'partial' BEGIN
            DELETE FROM message_texts WHERE rowid = old.id;
            INSERT INTO message_texts(rowid, content) VALUES (new.id, new.content);
        END""")
    db.execute("""
        CREATE TRIGGER message_deleted AFTER DELETE ON messages BEGIN
            DELETE FROM message_texts WHERE rowid = old.id;
        END""")


def m003_bench_runs(db: sqlite3.Connection) -> None:
    """Bench results, comparable over time: which bytes ran, how, and on what machine."""
    db.execute("""
        CREATE TABLE bench_runs (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            kind TEXT NOT NULL,
            model TEXT NOT NULL,
            model_sha256 TEXT NOT NULL DEFAULT '',
            options TEXT NOT NULL DEFAULT '{}',
            machine TEXT NOT NULL DEFAULT '{}',
            report TEXT NOT NULL,
            created_at REAL NOT NULL
        )""")
    db.execute("CREATE INDEX bench_runs_by_time ON bench_runs(created_at DESC)")


def m004_folded_search(db: sqlite3.Connection) -> None:
    """The index holds folded texts: a folded "strasse" is no part of "Straße" as it was typed.

    `fold` is a function of the program that every connection brings along. The table is made anew,
    so that its segments keep nothing of texts that were deleted before.
    """
    db.execute("DROP TRIGGER message_added")
    db.execute("DROP TRIGGER message_changed")
    db.execute("DROP TABLE message_texts")
    db.execute("CREATE VIRTUAL TABLE message_texts USING fts5(content, tokenize='trigram')")
    db.execute("""
        CREATE TRIGGER message_added AFTER INSERT ON messages WHEN new.state <> 'partial' BEGIN
            INSERT INTO message_texts(rowid, content) VALUES (new.id, fold(new.content));
        END""")
    db.execute("""
        CREATE TRIGGER message_changed AFTER UPDATE OF content, state ON messages
        WHEN new.state <> 'partial' BEGIN
            DELETE FROM message_texts WHERE rowid = old.id;
            INSERT INTO message_texts(rowid, content) VALUES (new.id, fold(new.content));
        END""")
    db.execute(
        "INSERT INTO message_texts(rowid, content)"
        " SELECT id, fold(content) FROM messages WHERE state <> 'partial'"
    )


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    m001_chats_and_messages,
    m002_full_text_search,
    m003_bench_runs,
    m004_folded_search,
)
"""Step n is MIGRATIONS[n - 1]; the newest version of the schema is their number."""
