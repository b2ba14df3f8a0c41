"""The database file: migrations, refusals, and two processes at once."""

from __future__ import annotations

import sqlite3
import stat
import sys
from pathlib import Path

import pytest

from storage import database as database_module
from storage.chat_search import search_chats
from storage.chats import ChatStore
from storage.database import Database
from storage.errors import DatabaseBusy, DatabaseCorrupt, DatabaseTooNew, StorageError
from storage.migrations import MIGRATIONS
from tests.storage.fakes_storage import finish, start_python


def raw(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def test_a_new_database_has_the_newest_schema_and_the_safe_settings(database: Database) -> None:
    assert database.query("PRAGMA user_version")[0][0] == len(MIGRATIONS)
    assert database.query("PRAGMA journal_mode")[0][0] == "wal"
    assert database.query("PRAGMA foreign_keys")[0][0] == 1
    assert database.query("PRAGMA busy_timeout")[0][0] == 5000


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_no_one_else_can_read_the_database(database: Database) -> None:
    with database.transaction() as db:
        db.execute("INSERT INTO chats(id, created_at, updated_at) VALUES ('x', 0, 0)")
    for file in database.path.parent.iterdir():
        if file.suffix != ".lock":
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def make_old_database(path: Path, version: int) -> None:
    with raw(path) as connection:
        for number, migrate in enumerate(MIGRATIONS[:version], 1):
            migrate(connection)
            connection.execute(f"PRAGMA user_version = {number}")
        connection.execute("INSERT INTO chats(id, created_at, updated_at) VALUES ('old', 0, 0)")
    connection.close()


def test_an_old_database_is_migrated_after_a_backup(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    make_old_database(path, 1)
    opened = Database(path)
    assert opened.query("PRAGMA user_version")[0][0] == len(MIGRATIONS)
    assert ChatStore(opened).get("old").id == "old"
    opened.close()
    backup = raw(tmp_path / "chats.db.v1")
    assert backup.execute("PRAGMA user_version").fetchone() == (1,)
    assert backup.execute("SELECT id FROM chats").fetchall() == [("old",)]
    backup.close()


def test_old_messages_are_found_by_folded_words_after_the_migration(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    make_old_database(path, 3)
    with raw(path) as connection:
        connection.execute(
            "INSERT INTO messages(chat_id, role, content, state, created_at)"
            " VALUES ('old', 'user', 'die Straße', 'complete', 0)"
        )
    connection.close()
    opened = Database(path)
    assert [hit.chat_id for hit in search_chats(opened, "strasse")] == ["old"]
    opened.close()


def test_a_window_of_the_version_before_goes_on_writing_after_the_migration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.db"
    monkeypatch.setattr(database_module, "MIGRATIONS", MIGRATIONS[:-1])
    before = Database(path)
    monkeypatch.undo()
    after = Database(path)
    chat = ChatStore(before).create()
    ChatStore(before).add_message(chat.id, "user", "die Straße")
    assert [hit.chat_id for hit in search_chats(after, "strasse")] == [chat.id]
    before.close()
    after.close()


def test_a_failing_migration_leaves_the_old_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE half (id)")
        db.execute("SELECT * FROM nowhere")

    path = tmp_path / "chats.db"
    Database(path).close()
    monkeypatch.setattr(database_module, "MIGRATIONS", (*MIGRATIONS, broken))
    with pytest.raises(StorageError, match="nowhere"):
        Database(path)
    monkeypatch.undo()
    opened = Database(path)
    assert opened.query("PRAGMA user_version")[0][0] == len(MIGRATIONS)
    assert opened.query("SELECT count(*) FROM sqlite_master WHERE name = 'half'")[0][0] == 0
    opened.close()


def test_a_newer_database_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    Database(path).close()
    with raw(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(DatabaseTooNew, match=rf"version 99.*up to {len(MIGRATIONS)}"):
        Database(path)


@pytest.mark.parametrize(
    "content", [b"not a database at all, just text" * 40, b"SQLite format 3\0"]
)
def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "chats.db"
    path.write_bytes(content)
    with pytest.raises(DatabaseCorrupt, match="damaged or not a database"):
        Database(path)
    assert path.read_bytes() == content


def test_a_database_damaged_in_the_middle_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    Database(path).close()
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * (4096 - 100)
    path.write_bytes(content)
    with pytest.raises(DatabaseCorrupt):
        Database(path)
    assert path.read_bytes() == bytes(content)


def test_a_folder_in_place_of_the_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "chats.db").mkdir()
    with pytest.raises(StorageError, match=r"chats\.db"):
        Database(tmp_path / "chats.db")


def test_a_read_only_database_says_so(tmp_path: Path, database: Database) -> None:
    database._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StorageError, match="read-only"), database.transaction() as db:
        db.execute("INSERT INTO chats(id, created_at, updated_at) VALUES ('x', 0, 0)")


def test_a_full_disk_says_so_and_writes_nothing(database: Database) -> None:
    pages = database.query("PRAGMA page_count")[0][0]
    database.query(f"PRAGMA max_page_count = {pages}")
    store = ChatStore(database)
    chat = store.create()
    with pytest.raises(StorageError, match="disk is full"):
        store.add_message(chat.id, "user", "x" * 500_000)
    database.query("PRAGMA max_page_count = 100000")
    assert store.messages(chat.id) == []
    store.add_message(chat.id, "user", "x" * 500_000)


def test_a_lock_held_too_long_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    opened = Database(path, busy_timeout_ms=20)
    other = raw(path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseBusy, match="locked by another process"):
        ChatStore(opened).create()
    other.execute("ROLLBACK")
    assert ChatStore(opened).create().id
    other.close()
    opened.close()


def test_a_failed_transaction_changes_nothing(database: Database) -> None:
    store = ChatStore(database)
    chat = store.create(title="before")

    def fail_halfway() -> None:
        with database.transaction() as db:
            db.execute("UPDATE chats SET title = 'after'")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert store.get(chat.id).title == "before"


MIGRATE = """
import sys
from pathlib import Path
from storage.database import Database
print("ready", flush=True)
sys.stdin.readline()
database = Database(Path(sys.argv[1]))
print(database.query("PRAGMA user_version")[0][0], database.query("SELECT id FROM chats")[0][0])
"""


def test_two_starters_migrate_once(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    make_old_database(path, 1)
    children = [start_python(MIGRATE, str(path)) for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [finish(child).split() for child in children] == [[str(len(MIGRATIONS)), "old"]] * 2
    backup = raw(tmp_path / "chats.db.v1")
    assert backup.execute("PRAGMA user_version").fetchone() == (1,)
    backup.close()


def test_two_starters_create_one_database(tmp_path: Path) -> None:
    code = MIGRATE.replace('database.query("SELECT id FROM chats")[0][0]', '"made"')
    children = [start_python(code, str(tmp_path / "chats.db")) for _ in range(2)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        assert finish(child).split() == ["ready", str(len(MIGRATIONS)), "made"]
