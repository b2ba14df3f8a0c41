"""Finds a chat by its title or by what was said in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from storage.chat_search import SearchHit

if TYPE_CHECKING:
    from storage.chats import ChatStore


class SearchScreen(ModalScreen["SearchHit | None"]):
    """Type, choose, Enter: the chosen hit, or None."""

    BINDINGS = [
        Binding("escape", "dismiss(None)", "Close", id="search.close"),
        Binding("down", "into_results", show=False, id="search.down"),
    ]

    def __init__(self, store: ChatStore) -> None:
        super().__init__()
        self._store = store
        self._hits: list[SearchHit] = []
        """What the list shows."""

    def compose(self) -> ComposeResult:
        """The words, and what they find."""
        with Vertical(classes="dialog wide"):
            yield Static("Search in titles and messages", classes="dialog-question", markup=False)
            yield Input(id="search-input")
            yield OptionList(id="search-results", markup=False)

    def on_mount(self) -> None:
        """Start with every chat, newest first."""
        self._find("")

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._find(event.value.strip())

    def _find(self, text: str) -> None:
        if text:
            self._hits = self._store.search(text)
        else:
            chats = self._store.list_chats()
            self._hits = [SearchHit(chat.id, chat.title, None, "", 0) for chat in chats]
        results = self.query_one(OptionList)
        results.set_options(_describe(hit.title or "New chat", hit.snippet) for hit in self._hits)
        results.highlighted = 0 if self._hits else None

    def action_into_results(self) -> None:
        """Go from the input into the list."""
        self.query_one(OptionList).focus()

    @on(Input.Submitted)
    def _first(self) -> None:
        results = self.query_one(OptionList)
        if results.highlighted is not None:
            results.action_select()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._hits[event.option_index])


def _describe(title: str, excerpt: str) -> Content:
    line = " ".join(excerpt.split())
    title_line = " ".join(title.split())
    return Content.assemble((title_line, "bold"), (f"  {line}" if line else "", "$text-muted"))
