"""The list of chats beside the transcript. It knows titles and marks, not messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from textual import on
from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from app.shown import ChatEntry, Mark

_MARKS: dict[Mark, tuple[str, str]] = {
    "": ("  ", ""),
    "answering": ("▸ ", "$text-accent"),
    "unread": ("● ", "$text-success"),
}


class ChatList(OptionList):
    """Chats, the one used last on top."""

    BINDINGS = [
        Binding("delete,d", "wish('delete')", "Delete", id="chats.delete"),
        Binding("r", "wish('rename')", "Rename", id="chats.rename"),
    ]

    @dataclass
    class Opened(Message):
        """A chat was chosen."""

        chat_id: str

    @dataclass
    class Wish(Message):
        """Something is to be done with the highlighted chat."""

        chat_id: str
        what: Literal["delete", "rename"]

    def __init__(self) -> None:
        super().__init__(markup=False, id="chat-list")
        self._entries: tuple[ChatEntry, ...] = ()

    def show(self, entries: Sequence[ChatEntry]) -> None:
        """Replace the list; the highlight stays with its chat."""
        entries = tuple(entries)
        if entries == self._entries:
            return
        kept = self._highlighted_id()
        is_same_order = [e.chat_id for e in entries] == [e.chat_id for e in self._entries]
        self._entries = entries
        if is_same_order:
            for entry in entries:
                self.replace_option_prompt(entry.chat_id, _prompt(entry))
            return
        self.set_options(Option(_prompt(entry), id=entry.chat_id) for entry in entries)
        ids = [entry.chat_id for entry in entries]
        opened = next((e.chat_id for e in entries if e.is_open), None)
        target = kept if kept in ids and self.has_focus else opened
        self.highlighted = ids.index(target) if target in ids else None

    def action_wish(self, what: Literal["delete", "rename"]) -> None:
        """Ask the screen to delete or rename the highlighted chat."""
        if chat_id := self._highlighted_id():
            self.post_message(self.Wish(chat_id, what))

    def _highlighted_id(self) -> str | None:
        if self.highlighted is None or self.highlighted >= self.option_count:
            return None
        return self.get_option_at_index(self.highlighted).id

    @on(OptionList.OptionSelected)
    def _open(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option.id:
            self.post_message(self.Opened(event.option.id))


def _prompt(entry: ChatEntry) -> Content:
    mark, style = _MARKS[entry.mark]
    title = " ".join(entry.title.split()) or "New chat"
    prompt = Content.assemble((mark, style), (title, "bold" if entry.is_open else ""))
    return prompt.truncate(200)
