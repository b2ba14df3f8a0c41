"""A chat as a document."""

from __future__ import annotations

import json

from storage.chat_export import export_json, export_markdown
from storage.chats import ChatStore


def make_chat(store: ChatStore) -> str:
    chat = store.create(model="tiny", system_prompt="be brief")
    question = store.add_message(chat.id, "user", "What is `x`?\n\n```c\nint x;\n```")
    for text, state in (("old", "complete"), ("new 漢字", "stopped")):
        writer = store.begin_answer(chat.id, model="tiny Q4_1", parent_id=question.id)
        writer.append(text)
        writer.finish("complete" if state == "complete" else "stopped", stats={"n": 1})
    return chat.id


def test_markdown_has_the_shown_path_word_for_word(store: ChatStore) -> None:
    chat_id = make_chat(store)
    text = export_markdown(store.get(chat_id), store.messages(chat_id))
    assert text.startswith("# What is `x`?\n\nChat ")
    assert "## System\n\nbe brief\n" in text
    assert "## User\n\nWhat is `x`?\n\n```c\nint x;\n```\n" in text
    assert text.endswith("## Assistant (tiny Q4_1, stopped)\n\nnew 漢字\n")
    assert "old" not in text
    assert "model tiny" not in text


def test_json_has_every_branch_with_models_and_statistics(store: ChatStore) -> None:
    chat_id = make_chat(store)
    document = json.loads(export_json(store.get(chat_id), store.all_messages(chat_id)))
    assert [m["content"] for m in document["messages"]][1:] == ["old", "new 漢字"]
    assert document["messages"][2]["stats"] == {"n": 1}
    assert document["messages"][2]["parent_id"] == document["messages"][0]["id"]
    assert document["chat"]["system_prompt"] == "be brief"
    assert "model" not in document["chat"]
    assert document["chat"]["created_at"] == "1970-01-01T00:16:40+00:00"
