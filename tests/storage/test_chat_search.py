"""Search over titles and texts; whatever is typed is text."""

from __future__ import annotations

import pytest

from storage.chat_search import search_chats
from storage.chats import ChatStore
from storage.database import Database


def found(database: Database, text: str) -> list[str]:
    return [hit.title for hit in search_chats(database, text)]


@pytest.fixture
def library(store: ChatStore) -> ChatStore:
    for title, text in (
        ("rings", "A sliding-window cache wraps: it's a ring (of W rows) AND more"),
        ("kanji", "昨日は漢字の練習をしました。東京へ行きたい"),
        ("accents", "Das Café in der Straße hat ÄPFEL"),
        ("decomposed", "re\u0301sume\u0301"),
        ("100% sure_thing", "percent signs % and under_scores"),
    ):
        chat = store.create(title=title)
        store.add_message(chat.id, "user", text)
    return store


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("漢字", ["kanji"]),
        ("練", ["kanji"]),
        ("練習を", ["kanji"]),
        ("SLIDING", ["rings"]),
        ("indo", ["rings"]),
        ("it's", ["rings"]),
        ("(of", ["rings"]),
        ("AND", ["100% sure_thing", "rings"]),
        ("ring wraps", ["rings"]),
        ("ring 漢字", []),
        ("äp", ["accents"]),
        ("äpfel", ["accents"]),
        ("café", ["accents"]),
        ("cafe\u0301", ["accents"]),
        ("Straße", ["accents"]),
        ("STRASSE", ["accents"]),
        ("résumé", ["decomposed"]),
        ("RE\u0301SUM", ["decomposed"]),
        ("100%", ["100% sure_thing"]),
        ("e_t", ["100% sure_thing"]),
        ("%", ["100% sure_thing"]),
        ("kanj", ["kanji"]),
        ('a"b', []),
        ("sliding-window", ["rings"]),
        ("NEAR(", []),
        ("*", []),
        ("a-b OR content:", []),
        ("\0", []),
        ("\0漢字 ", ["kanji"]),
        ("   ", []),
    ],
)
def test_typed_text_finds_what_contains_it(
    library: ChatStore, database: Database, text: str, titles: list[str]
) -> None:
    assert sorted(found(database, text)) == sorted(titles)


def test_titles_are_searched_too_and_come_without_a_message(
    library: ChatStore, database: Database
) -> None:
    (hit,) = search_chats(database, "accents")
    assert hit.message_id is None


def test_a_hit_shows_the_text_around_it_on_one_line(store: ChatStore, database: Database) -> None:
    chat = store.create(title="t")
    store.add_message(chat.id, "user", "start " * 40 + "\nthe needle\nis here" + " end" * 40)
    (hit,) = search_chats(database, "needle")
    assert "the needle is here" in hit.snippet
    assert "\n" not in hit.snippet
    assert len(hit.snippet) < 140


def test_several_messages_of_a_chat_are_one_hit(store: ChatStore, database: Database) -> None:
    chat = store.create(title="t")
    for number in range(3):
        last = store.add_message(chat.id, "user", f"needle {number}")
    (hit,) = search_chats(database, "needle")
    assert (hit.num_hits, hit.message_id) == (3, last.id)


def test_an_answer_is_found_once_it_is_finished(store: ChatStore, database: Database) -> None:
    chat = store.create(title="t")
    writer = store.begin_answer(chat.id, model="tiny")
    writer.append("needle in the answer")
    store.flush()
    writer.finish("complete")
    assert [hit.message_id for hit in search_chats(database, "needle")] == [writer.message_id]


def test_newest_chats_come_first_and_the_limit_holds(store: ChatStore, database: Database) -> None:
    for number in range(5):
        chat = store.create(title=f"needle {number}")
        with database.transaction() as db:
            db.execute("UPDATE chats SET updated_at = ? WHERE id = ?", (number, chat.id))
    assert [hit.title for hit in search_chats(database, "needle", limit=2)] == [
        "needle 4",
        "needle 3",
    ]
