"""Answers while they stream: what survives a stop, a crash, a lock and a delete."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from pathlib import Path

import pytest

from storage.answers import AnswerWriter
from storage.chats import ChatStore, StoredMessage
from storage.database import Database
from storage.errors import ChatGone, StorageError
from tests.storage.fakes_storage import FakeClock, start_python


def stored(database: Database, message_id: int) -> str:
    """What another process would read now."""
    other = sqlite3.connect(database.path)
    row = other.execute("SELECT content FROM messages WHERE id = ?", (message_id,)).fetchone()
    other.close()
    return str(row[0])


def test_text_is_on_disk_half_a_second_after_it_came(
    store: ChatStore, database: Database, clock: FakeClock
) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="tiny")
    writer.append("one ")
    clock.now += 0.4
    writer.append("two ")
    assert stored(database, writer.message_id) == ""
    clock.now += 0.1
    writer.append("three")
    assert stored(database, writer.message_id) == "one two three"
    clock.now += 1
    writer.append(" four")
    assert stored(database, writer.message_id) == "one two three four"
    writer.finish("complete")
    assert stored(database, writer.message_id) == "one two three four"


def test_a_paused_answer_is_flushed_by_the_timer(store: ChatStore, database: Database) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="tiny")
    writer.append("then a long pause")
    store.flush()
    assert stored(database, writer.message_id) == "then a long pause"


def test_finish_keeps_text_state_model_and_statistics(store: ChatStore) -> None:
    chat = store.create()
    store.add_message(chat.id, "user", "q")
    writer = store.begin_answer(chat.id, model="tiny Q4_1")
    writer.append("half an ans")
    writer.finish("stopped", stats={"draft_n": 4, "accepted_per_position": [3, 1]})
    writer.finish("complete")
    message = store.messages(chat.id)[-1]
    assert (message.content, message.state, message.model) == (
        "half an ans",
        "stopped",
        "tiny Q4_1",
    )
    assert message.stats == {"draft_n": 4, "accepted_per_position": [3, 1]}


def test_the_whole_text_given_at_the_end_wins(store: ChatStore) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="tiny")
    writer.append("answer STO")
    writer.finish("complete", text="answer ")
    assert store.message(writer.message_id).content == "answer "


def test_f4_a_regenerate_stopped_at_once_brings_the_old_answer_back(store: ChatStore) -> None:
    chat = store.create()
    question = store.add_message(chat.id, "user", "q")
    first = store.begin_answer(chat.id, model="tiny")
    first.append("old")
    first.finish("complete")
    store.begin_answer(chat.id, model="tiny", parent_id=question.id).finish("stopped")
    assert [m.content for m in store.messages(chat.id)] == ["q", "old"]


def test_a_first_answer_stopped_before_any_text_is_kept_and_marked(store: ChatStore) -> None:
    chat = store.create()
    store.add_message(chat.id, "user", "q")
    store.begin_answer(chat.id, model="tiny").finish("stopped")
    assert store.messages(chat.id)[-1].state == "stopped"


def test_f6_streaming_goes_on_while_another_process_holds_the_lock(
    store: ChatStore, database: Database
) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="tiny")
    other = sqlite3.connect(database.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for piece in ("a", "b", "c"):
        writer.append(piece)
        writer.flush()
    assert writer.problem is None
    assert stored(database, writer.message_id) == ""
    other.execute("ROLLBACK")
    other.close()
    writer.flush()
    assert stored(database, writer.message_id) == "abc"


def test_a_flush_never_waits_for_another_process(
    store: ChatStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="tiny")
    waits: list[bool] = []
    begin = Database._begin

    def watched(self: Database, *, wait: bool) -> None:
        waits.append(wait)
        begin(self, wait=wait)

    monkeypatch.setattr(Database, "_begin", watched)
    writer.append("a")
    store.flush()
    writer.finish("complete")
    assert waits == [False, True]
    assert database.query("PRAGMA busy_timeout")[0][0] == 5000


def test_f15_a_full_disk_keeps_the_text_for_a_second_try(
    store: ChatStore, database: Database
) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="tiny")
    database.query(f"PRAGMA max_page_count = {database.query('PRAGMA page_count')[0][0]}")
    text = "x" * 300_000
    writer.append(text)
    writer.flush()
    assert writer.problem is not None
    with pytest.raises(StorageError, match="disk is full"):
        writer.finish("complete")
    database.query("PRAGMA max_page_count = 100000")
    writer.finish("complete")
    assert store.message(writer.message_id).content == text
    assert writer.problem is None


def test_a_chat_deleted_while_it_streams_ends_without_a_crash(store: ChatStore) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="tiny")
    store.delete(chat.id)
    writer.append("text")
    writer.flush()
    assert isinstance(writer.problem, ChatGone)
    store.flush()
    with pytest.raises(ChatGone, match="deleted while its answer was written"):
        writer.finish("complete")


def test_an_answer_being_written_elsewhere_is_not_interrupted(
    store: ChatStore, database: Database
) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="tiny")
    other_window = ChatStore(database)
    assert other_window.message(writer.message_id).state == "partial"


def test_an_answer_of_a_dead_process_with_a_reused_pid_is_interrupted(
    store: ChatStore, database: Database
) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="tiny")
    with database.transaction() as db:
        db.execute("UPDATE messages SET owner_started = owner_started - 3600")
    ChatStore(database)
    assert store.message(writer.message_id).state == "interrupted"


STREAM = """
import sys
from pathlib import Path
from storage.chats import ChatStore
from storage.database import Database
store = ChatStore(Database(Path(sys.argv[1])))
chat = store.create(model="tiny")
question = store.add_message(chat.id, "user", "tell me everything")
store.save_draft(chat.id, "the next question")
if sys.argv[2] == "regenerate":
    writer = store.begin_answer(chat.id, model="tiny")
    writer.append("the old answer")
    writer.finish("complete")
writer = store.begin_answer(chat.id, model="tiny", parent_id=question.id)
if sys.argv[2] == "stream":
    for number in range(20):
        writer.append(f"token{number} ")
    store.flush()
print(chat.id, flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no kill -9")
@pytest.mark.parametrize(
    ("moment", "last"),
    [
        ("stream", ("".join(f"token{n} " for n in range(20)), "interrupted")),
        ("prefill", ("", "interrupted")),
        ("regenerate", ("the old answer", "complete")),
    ],
)
def test_f4_kill_9_loses_nothing_that_was_flushed(
    tmp_path: Path, moment: str, last: tuple[str, str]
) -> None:
    path = tmp_path / "chats.db"
    child = start_python(STREAM, str(path), moment)
    assert child.stdout is not None
    chat_id = child.stdout.readline().strip()
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    database = Database(path)
    store = ChatStore(database)
    messages: list[StoredMessage] = store.messages(chat_id)
    assert messages[0].content == "tell me everything"
    assert (messages[-1].content, messages[-1].state) == last
    assert store.get(chat_id).draft == "the next question"
    assert database.query("PRAGMA integrity_check")[0][0] == "ok"
    database.close()


def resume(store: ChatStore, message_id: int, *, model: str) -> AnswerWriter:
    seen = store.message(message_id)
    return store.resume_answer(message_id, model=model, content=seen.content, state=seen.state)


def test_two_windows_do_not_go_on_with_one_answer(store: ChatStore, database: Database) -> None:
    chat = store.create()
    first = store.begin_answer(chat.id, model="tiny")
    first.append("half")
    first.finish("stopped")
    seen = {"content": "half", "state": "stopped"}
    other = ChatStore(database)
    writer = other.resume_answer(first.message_id, model="tiny", **seen)
    with pytest.raises(StorageError, match="being written in another window"):
        store.resume_answer(first.message_id, model="tiny", **seen)
    writer.append(" and more")
    writer.finish("stopped")
    with pytest.raises(StorageError, match="changed in another window"):
        store.resume_answer(first.message_id, model="tiny", **seen)
    assert store.message(first.message_id).content == "half and more"
    assert resume(store, first.message_id, model="tiny").attempt == 0


def test_the_model_named_last_is_stored_with_the_end(store: ChatStore) -> None:
    chat = store.create()
    writer = store.begin_answer(chat.id, model="a guess")
    writer.model = "tiny"
    writer.finish("complete")
    assert store.message(writer.message_id).model == "tiny"


def test_an_answer_that_ended_early_goes_on_as_the_same_message(store: ChatStore) -> None:
    chat = store.create()
    store.add_message(chat.id, "user", "q")
    first = store.begin_answer(chat.id, model="tiny")
    first.append("half an ")
    first.finish("stopped")
    writer = resume(store, first.message_id, model="other")
    assert (writer.attempt, store.message(first.message_id).state) == (first.attempt, "partial")
    writer.append("answer")
    writer.finish("complete")
    (_, answer) = store.messages(chat.id)
    assert (answer.id, answer.content, answer.state) == (
        first.message_id,
        "half an answer",
        "complete",
    )
    assert answer.model == "tiny + other"
    assert store.search("half an answer")[0].message_id == answer.id


def test_an_answer_that_goes_on_with_its_own_model_names_it_once(store: ChatStore) -> None:
    chat = store.create()
    first = store.begin_answer(chat.id, model="tiny")
    first.append("half")
    first.finish("stopped")
    for model in ("tiny", "other", "tiny"):
        resume(store, first.message_id, model=model).finish("stopped")
    assert store.message(first.message_id).model == "other + tiny"


def test_a_writer_that_dies_while_going_on_leaves_the_answer_interrupted(
    store: ChatStore, database: Database
) -> None:
    chat = store.create()
    first = store.begin_answer(chat.id, model="tiny")
    first.append("half")
    first.finish("stopped")
    resume(store, first.message_id, model="tiny")
    with database.transaction() as db:
        db.execute("UPDATE messages SET owner_pid = 0")
    assert ChatStore(database).message(first.message_id).state == "interrupted"
