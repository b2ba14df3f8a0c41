"""Chats, messages and branches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from storage.chats import ChatStore
from storage.database import Database
from storage.errors import ChatGone, StorageError
from tests.storage.fakes_storage import FakeClock, finish, start_python


def answer(store: ChatStore, chat_id: str, text: str, parent_id: int | None = None) -> int:
    writer = store.begin_answer(chat_id, model="tiny", parent_id=parent_id)
    writer.append(text)
    writer.finish("complete")
    return writer.message_id


def shown(store: ChatStore, chat_id: str) -> list[str]:
    return [message.content for message in store.messages(chat_id)]


def test_a_chat_keeps_what_was_said_in_order(store: ChatStore) -> None:
    chat = store.create(model="tiny", system_prompt="be brief")
    store.add_message(chat.id, "user", "one")
    answer(store, chat.id, "two")
    store.add_message(chat.id, "user", "three")
    assert shown(store, chat.id) == ["one", "two", "three"]
    assert store.get(chat.id).system_prompt == "be brief"
    assert [m.role for m in store.messages(chat.id)] == ["user", "assistant", "user"]


def test_chats_are_listed_newest_change_first(store: ChatStore, clock: FakeClock) -> None:
    first = store.create(title="first")
    clock.now += 1
    store.create(title="second")
    clock.now += 1
    store.add_message(first.id, "user", "again")
    assert [chat.title for chat in store.list_chats()] == ["first", "second"]
    latest = store.latest()
    assert latest is not None
    assert latest.id == first.id


def test_ids_are_short_typable_and_found_by_their_beginning(store: ChatStore) -> None:
    chats = [store.create() for _ in range(40)]
    assert len({chat.id for chat in chats}) == 40
    assert all(re.fullmatch(r"[2-9b-df-hj-kmnp-tv-z]{6}", chat.id) for chat in chats)
    assert store.find(chats[7].id.upper()).id == chats[7].id
    prefix = next(a.id[0] for a in chats if sum(b.id[0] == a.id[0] for b in chats) > 1)
    with pytest.raises(StorageError, match="ambiguous"):
        store.find(prefix)


@pytest.mark.parametrize("nonsense", ["", "nosuch", "%", "a'b"])
def test_an_unknown_id_is_gone_and_not_an_accident(store: ChatStore, nonsense: str) -> None:
    store.create()
    with pytest.raises(ChatGone):
        store.find(nonsense)


def test_the_first_question_names_a_chat_until_it_is_renamed(store: ChatStore) -> None:
    chat = store.create()
    store.add_message(chat.id, "user", "\n\n  What is [/INST] a `ring`?\nsecond line")
    assert store.get(chat.id).title == "What is [/INST] a `ring`?"
    store.rename(chat.id, "my \n title")
    store.add_message(chat.id, "user", "another question")
    assert store.get(chat.id).title == "my title"


def test_a_long_first_question_gives_a_short_title(store: ChatStore) -> None:
    chat = store.create()
    store.add_message(chat.id, "user", "漢" * 100)
    assert store.get(chat.id).title == "漢" * 59 + "…"


def test_a_draft_is_kept_until_the_question_is_sent(store: ChatStore) -> None:
    chat = store.create()
    store.save_draft(chat.id, "45 minutes of [bold work")
    assert store.get(chat.id).draft == "45 minutes of [bold work"
    store.add_message(chat.id, "user", "45 minutes of [bold work")
    assert store.get(chat.id).draft == ""


def test_texts_come_back_as_they_were_typed(store: ChatStore) -> None:
    chat = store.create()
    text = "\r\n\t'; DROP TABLE chats; -- \0 \ufeff 👩‍👩‍👧 ‮ x\x1b[31m"
    store.add_message(chat.id, "user", text)
    assert shown(store, chat.id) == [text]


def test_regenerating_adds_an_attempt_and_keeps_the_old_answer(store: ChatStore) -> None:
    chat = store.create()
    question = store.add_message(chat.id, "user", "q")
    first = answer(store, chat.id, "old answer")
    second = answer(store, chat.id, "new answer", question.id)
    assert shown(store, chat.id) == ["q", "new answer"]
    assert [m.content for m in store.attempts(second)] == ["old answer", "new answer"]
    assert [m.attempt for m in store.attempts(first)] == [0, 1]
    store.select(first)
    assert shown(store, chat.id) == ["q", "old answer"]


def test_editing_a_question_opens_a_branch_and_keeps_the_other(store: ChatStore) -> None:
    chat = store.create()
    question = store.add_message(chat.id, "user", "q1")
    answer(store, chat.id, "a1")
    store.add_message(chat.id, "user", "q2")
    edited = store.edit_message(question.id, "q1 better")
    assert shown(store, chat.id) == ["q1 better"]
    answer(store, chat.id, "a1 better")
    store.select(question.id)
    assert shown(store, chat.id) == ["q1", "a1", "q2"]
    store.select(edited.id)
    assert shown(store, chat.id) == ["q1 better", "a1 better"]


def test_f10_regenerating_in_the_middle_deletes_nothing(store: ChatStore) -> None:
    chat = store.create()
    parents = []
    for turn in range(3):
        parents.append(store.add_message(chat.id, "user", f"q{turn}").id)
        answer(store, chat.id, f"a{turn}")
    before = [message.content for message in store.all_messages(chat.id)]
    writer = store.begin_answer(chat.id, model="tiny", parent_id=parents[0])
    writer.finish("stopped")
    assert [message.content for message in store.all_messages(chat.id)] == before
    assert shown(store, chat.id)[:2] == ["q0", "a0"]


def test_f10_two_windows_on_one_chat_overwrite_nothing(tmp_path: Path) -> None:
    databases = [Database(tmp_path / "chats.db") for _ in range(2)]
    one, two = (ChatStore(database) for database in databases)
    chat = one.create()
    one.add_message(chat.id, "user", "from one")
    two.add_message(chat.id, "user", "from two")
    one.add_message(chat.id, "user", "from one again")
    assert shown(two, chat.id) == ["from one", "from two", "from one again"]
    for database in databases:
        database.close()


def test_deleting_a_chat_takes_its_messages_and_nothing_else(
    store: ChatStore, database: Database
) -> None:
    gone, kept = store.create(), store.create()
    for chat in (gone, kept):
        store.add_message(chat.id, "user", "hello")
        answer(store, chat.id, "hi")
    store.delete(gone.id)
    assert database.query("SELECT count(*) FROM messages")[0][0] == 2
    assert database.query("SELECT count(*) FROM message_texts")[0][0] == 2
    assert shown(store, kept.id) == ["hello", "hi"]


def test_the_text_of_a_deleted_chat_is_not_left_in_the_file(tmp_path: Path) -> None:
    database = Database(tmp_path / "chats.db")
    store = ChatStore(database)
    secret = "the password is hunter2-correct-horse"
    chat = store.create()
    store.add_message(chat.id, "user", secret)
    store.delete(chat.id)
    database.close()
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"SQLite format 3" in left
    assert secret.encode() not in left


def test_the_search_index_keeps_nothing_of_a_deleted_chat(tmp_path: Path) -> None:
    """The index keeps the text a second time, and deleting there only marks it as gone."""
    database = Database(tmp_path / "chats.db")
    store = ChatStore(database)
    for text in ("one", "the rune \u16a0\u16a1\u16a2", "three"):
        store.add_message(store.create(title="t").id, "user", text)
    (hit,) = store.search("\u16a0\u16a1\u16a2")
    store.delete(hit.chat_id)
    database.query("PRAGMA wal_checkpoint(TRUNCATE)")
    left = b"".join(file.read_bytes() for file in tmp_path.glob("chats.db*"))
    database.close()
    assert "\u16a1\u16a2".encode() not in left


def test_leaving_an_empty_chat_rewrites_no_index(store: ChatStore, database: Database) -> None:
    store.add_message(store.create().id, "user", "hello")
    before = database.query("SELECT * FROM message_texts_data")
    said: list[str] = []
    database._connection.set_trace_callback(said.append)
    store.delete(store.create().id)
    assert not any("optimize" in statement for statement in said)
    assert database.query("SELECT * FROM message_texts_data") == before


def test_a_chat_deleted_elsewhere_is_gone_in_every_call(store: ChatStore) -> None:
    chat = store.create()
    message = store.add_message(chat.id, "user", "hello")
    store.delete(chat.id)
    for call in (
        lambda: store.get(chat.id),
        lambda: store.messages(chat.id),
        lambda: store.add_message(chat.id, "user", "more"),
        lambda: store.begin_answer(chat.id, model="tiny"),
        lambda: store.rename(chat.id, "x"),
        lambda: store.save_draft(chat.id, "x"),
        lambda: store.delete(chat.id),
        lambda: store.edit_message(message.id, "x"),
        lambda: store.select(message.id),
        lambda: store.attempts(message.id),
    ):
        with pytest.raises(ChatGone):
            call()


WRITE = """
import sys
from pathlib import Path
from storage.chats import ChatStore
from storage.database import Database
store = ChatStore(Database(Path(sys.argv[1])))
chat = store.create(title=sys.argv[2])
sys.stdin.readline()
for number in range(100):
    store.add_message(chat.id, "user", f"{sys.argv[2]} q{number}")
    writer = store.begin_answer(chat.id, model="tiny")
    writer.append(f"{sys.argv[2]} a{number}")
    writer.flush()
    writer.finish("complete")
print(chat.id)
"""


def test_f6_two_processes_write_two_hundred_messages_each(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    database = Database(path)
    children = {name: start_python(WRITE, str(path), name) for name in ("left", "right")}
    for child in children.values():
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    ids = {name: finish(child).strip() for name, child in children.items()}
    store = ChatStore(database)
    for name, chat_id in ids.items():
        expected = [f"{name} {kind}{n}" for n in range(100) for kind in "qa"]
        assert shown(store, chat_id) == expected
    assert database.query("PRAGMA integrity_check")[0][0] == "ok"
    database.close()


def test_a_chats_system_prompt_can_be_changed(store: ChatStore) -> None:
    chat = store.create(system_prompt="be brief")
    store.set_system_prompt(chat.id, "be long")
    assert store.get(chat.id).system_prompt == "be long"
    with pytest.raises(ChatGone):
        store.set_system_prompt("nobody", "x")
