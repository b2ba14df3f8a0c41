"""One answer on its way: what the engine was asked, what has come, what is stored of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from app.shown import ShownMessage
from engine.commands import SubmitTurn
from engine.events import ErrorInfo, TurnStats
from storage.errors import StorageError

if TYPE_CHECKING:
    from storage.answers import AnswerWriter
    from storage.chats import StoredMessage


@dataclass(slots=True)
class Turn:
    """One answer on its way, from the question to its last token."""

    command: SubmitTurn
    writer: AnswerWriter
    question_id: int
    question: str
    phase: Literal["waiting", "reading", "answering", "ended"] = "waiting"
    """waiting: for the model to be loaded, or for its place in the queue."""
    is_submitted: bool = False
    fraction: float = 0.0
    """Share of the prompt that was read, 0 to 1."""
    start: str = ""
    """What the answer begins with: an opened thought, or all it had when it went on."""
    resumed: StoredMessage | None = None
    """The answer before it went on; None for one that begins."""
    text: str = ""
    stats: TurnStats = field(default_factory=TurnStats)
    context_used: int = 0
    dropped_messages: int = 0
    error: ErrorInfo | None = None
    problem: StorageError | None = None
    """Why its end could not be stored, or None."""

    @property
    def is_fruitless(self) -> bool:
        """Whether it went on with an answer and added nothing."""
        return self.resumed is not None and self.text == self.start

    @property
    def request_id(self) -> str:
        """The engine's name of the turn."""
        return self.command.request_id

    @property
    def chat_id(self) -> str:
        """The chat it belongs to."""
        return self.command.chat_id

    @property
    def message_id(self) -> int:
        """The answer's row in the store."""
        return self.writer.message_id

    def take_whole(self, text: str) -> None:
        """The engine's last word on what was said; nothing said changes nothing."""
        if text:
            self.text = self.start + text

    @property
    def note(self) -> str:
        """What is worth a word below the answer while it runs."""
        num = self.dropped_messages
        return f"{num} oldest messages left out: the context is full" if num else ""

    @property
    def all_stats(self) -> dict[str, Any]:
        """What is stored of its counters, those of the answer before it went on included."""
        earlier = read_stats(self.resumed.stats) if self.resumed else TurnStats()
        return {
            **dataclasses.asdict(add_stats(earlier, self.stats)),
            "context_used": self.context_used,
            "dropped_messages": self.dropped_messages,
        }

    def shown(self, version: tuple[int, int] = (1, 1)) -> ShownMessage:
        """The answer as the transcript shows it now."""
        return ShownMessage(
            message_id=self.message_id,
            role="assistant",
            text=self.text,
            state="streaming" if self.text else "waiting",
            note=self.note,
            stats=self.stats,
            version=version[0],
            num_versions=version[1],
        )


def add_stats(earlier: TurnStats, later: TurnStats) -> TurnStats:
    """Counters of an answer that went on: what was emitted in both parts, the rest of the last."""
    summed = ("completion_tokens", "decode_ms", "draft_n", "draft_n_accepted")
    sums = {name: getattr(earlier, name) + getattr(later, name) for name in summed}
    return dataclasses.replace(later, **sums)


def read_stats(stored: Mapping[str, Any]) -> TurnStats:
    """Counters as they were stored; what this version does not know is left out."""
    known = {field.name for field in dataclasses.fields(TurnStats)}
    values = {key: value for key, value in stored.items() if key in known}
    values["accepted_per_position"] = tuple(values.get("accepted_per_position", ()))
    return TurnStats(**values)
