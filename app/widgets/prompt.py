"""Where a prompt is written. It knows nothing of chats: it posts what was typed."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static, TextArea

BIG_PASTE_LINES = 60
BIG_PASTE_CHARS = 8_000
"""A paste beyond either becomes an attachment: a bare TextArea took 2.1 s for 20,000 lines and
0.17 s for each key after it."""


class PromptArea(TextArea):
    """The text field itself: Enter sends, Ctrl+J breaks the line."""

    BINDINGS = [
        Binding("enter", "send", "Send", id="prompt.send", priority=True),
        Binding("ctrl+j", "newline", "New line", id="prompt.newline", priority=True),
        Binding("shift+enter", "newline", "New line", id="prompt.newline_shift", show=False),
        Binding("alt+enter", "newline", "New line", id="prompt.newline_alt", show=False),
    ]

    @dataclass
    class SendPressed(Message):
        """Enter was pressed."""

    @dataclass
    class RecallPressed(Message):
        """Up was pressed in an empty field."""

    @dataclass
    class BigPasted(Message):
        """A paste too big for the field."""

        text: str

    @dataclass
    class RemovePressed(Message):
        """Backspace was pressed in an empty field."""

    def action_send(self) -> None:
        """Ask the owner to send."""
        self.post_message(self.SendPressed())

    def action_newline(self) -> None:
        """Break the line at the cursor."""
        self._replace_via_keyboard("\n", *self.selection)

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up; in an empty field recall the last prompt."""
        if not self.text and not select:
            self.post_message(self.RecallPressed())
        else:
            super().action_cursor_up(select)

    def action_delete_left(self) -> None:
        """Delete to the left; in an empty field drop the last attachment."""
        if not self.text:
            self.post_message(self.RemovePressed())
        else:
            super().action_delete_left()

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")
        if len(text) > BIG_PASTE_CHARS or text.count("\n") > BIG_PASTE_LINES:
            self.post_message(self.BigPasted(text))
        elif result := self._replace_via_keyboard(text, *self.selection):
            self.move_cursor(result.end_location)


class PromptInput(Vertical):
    """The field with its attachment chips."""

    attachments: reactive[tuple[str, ...]] = reactive((), init=False)

    @dataclass
    class Submitted(Message):
        """A prompt is to be sent; the owner calls `clear` when it was taken."""

        text: str

    @dataclass
    class EmptySent(Message):
        """Enter was pressed with nothing written."""

    @dataclass
    class Changed(Message):
        """What is written changed (the draft)."""

        text: str

    @dataclass
    class RecallRequested(Message):
        """The person wants the last prompt back."""

    def compose(self) -> ComposeResult:
        """Chips above the field."""
        yield Static("", id="prompt-chips", markup=False)
        yield PromptArea(
            id="prompt-area",
            compact=True,
            highlight_cursor_line=False,
            placeholder=Content("Write a message"),
        )

    def on_mount(self) -> None:
        """Hide the chips while there are none."""
        self.query_one("#prompt-chips").display = False

    @property
    def area(self) -> PromptArea:
        """The text field."""
        return self.query_one(PromptArea)

    @property
    def text(self) -> str:
        """Everything that would be sent: attachments, then what is typed."""
        return "\n\n".join((*self.attachments, self.area.text)).strip("\n")

    @text.setter
    def text(self, text: str) -> None:
        """Put a prompt in; a long one becomes a chip again."""
        is_big = len(text) > BIG_PASTE_CHARS or text.count("\n") > BIG_PASTE_LINES
        self.attachments = (text,) if is_big else ()
        self.area.text = "" if is_big else text
        self.area.move_cursor(self.area.document.end)

    def clear(self) -> None:
        """Empty the field and drop the chips."""
        self.text = ""

    def watch_attachments(self, attachments: tuple[str, ...]) -> None:
        """Show one chip for each attachment."""
        chips = self.query_one("#prompt-chips", Static)
        chips.display = bool(attachments)
        chips.update("  ".join(_describe_chip(n, t) for n, t in enumerate(attachments, 1)))
        self.post_message(self.Changed(self.text))

    @on(PromptArea.SendPressed)
    def _send(self, event: PromptArea.SendPressed) -> None:
        event.stop()
        if self.text.strip():
            self.post_message(self.Submitted(self.text))
        else:
            self.post_message(self.EmptySent())

    @on(PromptArea.RecallPressed)
    def _recall(self, event: PromptArea.RecallPressed) -> None:
        event.stop()
        if not self.attachments:
            self.post_message(self.RecallRequested())

    @on(PromptArea.BigPasted)
    def _add_chip(self, event: PromptArea.BigPasted) -> None:
        event.stop()
        self.attachments = (*self.attachments, event.text)

    @on(PromptArea.RemovePressed)
    def _drop_chip(self, event: PromptArea.RemovePressed) -> None:
        event.stop()
        self.attachments = self.attachments[:-1]

    @on(TextArea.Changed)
    def _changed(self, event: TextArea.Changed) -> None:
        event.stop()
        self.post_message(self.Changed(self.text))


def _describe_chip(number: int, text: str) -> str:
    num_lines = text.count("\n") + 1
    return f"▤ paste {number}: {num_lines:,} lines, {len(text):,} characters"
