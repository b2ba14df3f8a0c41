"""A chat as one document: Markdown to read, JSON with every branch to process further."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

from storage.chats import Chat, StoredMessage


def export_markdown(chat: Chat, messages: list[StoredMessage]) -> str:
    """The shown path with a heading per message; texts are left exactly as they are."""
    parts = [f"# {chat.title or chat.id}\n", _facts(chat)]
    if chat.system_prompt:
        parts.append(f"## System\n\n{chat.system_prompt}\n")
    parts += [f"## {_heading(message)}\n\n{message.content}\n" for message in messages]
    return "\n".join(parts)


def export_json(chat: Chat, messages: list[StoredMessage]) -> str:
    """The chat and the given messages (pass every branch) as one JSON document.

    Each answer names its model; the one a chat was opened with says nothing about them.
    """
    facts = dataclasses.asdict(chat) | _times(chat)
    del facts["model"]
    document: dict[str, Any] = {
        "format": "foretell-chat-1",
        "chat": facts,
        "messages": [
            dataclasses.asdict(message) | {"created_at": _time(message.created_at)}
            for message in messages
        ],
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def _facts(chat: Chat) -> str:
    return f"Chat {chat.id}, {_time(chat.created_at)}\n"


def _heading(message: StoredMessage) -> str:
    facts = [message.model] if message.model else []
    if message.state != "complete":
        facts.append(message.state)
    return message.role.capitalize() + (f" ({', '.join(facts)})" if facts else "")


def _times(chat: Chat) -> dict[str, str]:
    return {"created_at": _time(chat.created_at), "updated_at": _time(chat.updated_at)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
