"""The messages of one chat, one widget each; sticks to the bottom unless the person scrolled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.widgets import Static

from app.shown import ShownMessage
from app.widgets.message import MessageView
from engine.events import TurnStats

PAGE_MESSAGES = 20
"""Messages mounted at once; older ones come when they are asked for."""


class EarlierMessages(Static, can_focus=True):
    """The line above the oldest mounted message."""

    class Pressed(Message):
        """Older messages are wanted."""

    def on_click(self) -> None:
        """Ask for older messages."""
        self.post_message(self.Pressed())

    def key_enter(self) -> None:
        """Ask for older messages."""
        self.post_message(self.Pressed())


class Transcript(VerticalScroll, can_focus=False):
    """Shows a list of messages and streams into the last one."""

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self._lock = asyncio.Lock()
        """Keys, the list of chats and the engine's events come from several tasks."""
        self._messages: list[ShownMessage] = []
        self._first_mounted = 0

    def compose(self) -> ComposeResult:
        """The line that brings older messages, and what an empty chat says.

        The inner column is at least as high as the view: an anchored view with less in it would
        scroll to a negative place, with the gap above the text.
        """
        with Vertical(id="transcript-column"):
            yield EarlierMessages("", markup=False)
            yield Static("", id="transcript-empty", markup=False)

    def on_mount(self) -> None:
        """Follow the end of the text."""
        self.query_one(EarlierMessages).display = False
        self.anchor()

    @property
    def views(self) -> list[MessageView]:
        """The mounted messages, oldest first."""
        return [child for child in self._column.children if isinstance(child, MessageView)]

    @property
    def _column(self) -> Vertical:
        return self.query_one("#transcript-column", Vertical)

    async def show(self, messages: Sequence[ShownMessage], empty_text: str = "") -> None:
        """Replace everything. Only the newest `PAGE_MESSAGES` are mounted."""
        async with self._lock:
            await self._show(messages, empty_text)

    async def _show(self, messages: Sequence[ShownMessage], empty_text: str) -> None:
        self._messages = list(messages)
        self._first_mounted = max(0, len(self._messages) - PAGE_MESSAGES)
        empty = self.query_one("#transcript-empty", Static)
        empty.update(empty_text)
        empty.display = not messages
        with self.app.batch_update():
            await self._column.remove_children(MessageView)
            await self._column.mount_all(
                MessageView(m) for m in self._messages[self._first_mounted :]
            )
        self._show_earlier()
        self.anchor()

    async def add(self, shown: ShownMessage) -> MessageView:
        """Add a message at the end and go there."""
        self.query_one("#transcript-empty").display = False
        self._messages.append(shown)
        view = MessageView(shown)
        await self._column.mount(view)
        self.anchor()
        return view

    def find(self, message_id: int) -> MessageView | None:
        """The mounted view of a message."""
        return next((v for v in self.views if v.shown.message_id == message_id), None)

    def note(self, message_id: int, note: str) -> None:
        """Say something below a message."""
        if view := self.find(message_id):
            view.set_note(note)

    async def stream(self, message_id: int, text: str, stats: TurnStats) -> None:
        """Show how far a streaming answer is."""
        async with self._lock:
            if view := self.find(message_id):
                await view.stream(text, stats)

    async def resync(self, messages: Sequence[ShownMessage]) -> None:
        """Catch up with what happened while messages were being mounted."""
        async with self._lock:
            for shown in messages:
                view = self.find(shown.message_id)
                if view is None:
                    continue
                if (view.shown.text, view.shown.state) != (shown.text, shown.state):
                    await view.finish(shown)

    async def finish(self, shown: ShownMessage) -> None:
        """Show the final form of a streamed message."""
        async with self._lock:
            if view := self.find(shown.message_id):
                await view.finish(shown)

    async def on_earlier_messages_pressed(self, event: EarlierMessages.Pressed) -> None:
        """Mount one page of older messages above, keeping the place."""
        event.stop()
        async with self._lock:
            top = self.views[0] if self.views else None
            await self._mount_earlier()
        if top is not None:
            self.call_after_refresh(self.scroll_to_widget, top, animate=False, top=True)

    async def reveal(self, message_id: int) -> None:
        """Bring a message to the top of the view, however old it is; one not shown changes nothing."""
        async with self._lock:
            if all(shown.message_id != message_id for shown in self._messages):
                return
            while not self.find(message_id) and self._first_mounted:
                await self._mount_earlier()
        if view := self.find(message_id):
            self.release_anchor()
            self.call_after_refresh(self.scroll_to_widget, view, animate=False, top=True)

    async def _mount_earlier(self) -> None:
        first = max(0, self._first_mounted - PAGE_MESSAGES)
        older = self._messages[first : self._first_mounted]
        self._first_mounted = first
        self.release_anchor()
        top = self.views[0] if self.views else None
        await self._column.mount_all([MessageView(m) for m in older], before=top)
        self._show_earlier()

    def focus_message(self, step: int) -> bool:
        """Move the focus by `step` messages; False when it would leave the list."""
        views = self.views
        focused = self.app.focused
        at = views.index(focused) if focused in views else len(views)
        if not 0 <= at + step < len(views):
            return False
        views[at + step].focus()
        return True

    def scroll_page(self, step: int) -> None:
        """Scroll by a page; at the end the view follows the text again."""
        if step < 0:
            self.release_anchor()
            self.scroll_page_up(animate=False)
        else:
            self.scroll_page_down(animate=False)
            self.call_after_refresh(self._follow_at_end)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Follow the text again once the person is back at its end."""
        self.call_after_refresh(self._follow_at_end)

    def _follow_at_end(self) -> None:
        if self.scroll_target_y >= self.max_scroll_y:
            self.anchor()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Stop following the end as soon as the person scrolls up."""
        self.release_anchor()

    def _show_earlier(self) -> None:
        line = self.query_one(EarlierMessages)
        line.display = self._first_mounted > 0
        line.update(f"↑ {self._first_mounted} earlier messages (Enter or click)")
