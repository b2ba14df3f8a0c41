"""What the screen shows of a chat, as plain values: made from the store, drawn by widgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.events import TurnStats

MessageState = Literal["waiting", "streaming", "complete", "stopped", "interrupted", "failed"]
Mark = Literal["", "answering", "unread"]


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """What the transcript shows of a message."""

    message_id: int
    role: Literal["user", "assistant"]
    text: str
    state: MessageState = "complete"
    note: str = ""
    """Why it ended, when that is worth a word: context full, an error."""
    model: str = ""
    stats: TurnStats | None = None
    version: int = 1
    """Which of `num_versions` answers (or edits) this is, from 1."""
    num_versions: int = 1
    context_used: int | None = None
    """Tokens the chat took up when this answer ended; None where that is not known."""
    can_go_on: bool = False
    """Whether this is an answer that ended before its end: stopped, crashed, context full."""


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """One line of the list of chats."""

    chat_id: str
    title: str
    mark: Mark = ""
    is_open: bool = False
