"""Where a prompt is written. It knows nothing of chats: it posts what was typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static, TextArea

from app.slash import escape

BIG_PASTE_LINES = 60
BIG_PASTE_CHARS = 8_000
"""A paste beyond either becomes an attachment: a bare TextArea took 2.1 s for 20,000 lines and
0.17 s for each key after it."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A longer text beside what is typed: a paste or a file."""

    text: str
    name: str = ""
    """The file's; empty for a paste."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A message as it is written."""

    attachments: tuple[Attachment, ...] = ()
    typed: str = ""

    @property
    def text(self) -> str:
        """Everything that would be sent: attachments, then what is typed."""
        return "\n\n".join((*(a.text for a in self.attachments), self.typed)).strip("\n")


class PromptArea(TextArea):
    """The text field itself: Enter sends, Ctrl+J breaks the line."""

    BINDINGS = [
        Binding("enter", "send", "Send", id="prompt.send"),
        Binding("ctrl+j", "newline", "New line", id="prompt.newline"),
        Binding("shift+enter", "newline", "New line", id="prompt.newline_shift", show=False),
        Binding("alt+enter", "newline", "New line", id="prompt.newline_alt", show=False),
        Binding("tab", "complete", "Complete a command", id="prompt.complete", show=False),
    ]

    AT_ONCE = ("enter", "ctrl+j", "shift+enter", "alt+enter", "tab")
    """Keys that act in the order they were typed. Bindings run in the app's own queue: in a burst
    of keys, Enter overtook what was still to be inserted, or came behind what followed it."""

    commands: Sequence[str] = ()
    """Names Tab completes behind a slash."""

    @dataclass
    class SendPressed(Message):
        """Enter was pressed; what was typed until then is taken out of the field."""

        typed: str

    @dataclass
    class RecallPressed(Message):
        """Up was pressed in the first line, or Down in the last."""

        step: int

    @dataclass
    class BigPasted(Message):
        """A paste too big for the field."""

        text: str

    @dataclass
    class RemovePressed(Message):
        """Backspace was pressed in an empty field."""

    async def _on_key(self, event: events.Key) -> None:
        if event.key not in self.AT_ONCE:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        for binding in self._bindings.get_bindings_for_key(event.key):
            getattr(self, f"action_{binding.action}")()

    def action_send(self) -> None:
        """Ask the owner to send. State: empty at once, so that the next key belongs to the next
        message.
        """
        typed = self.text
        if typed.strip():
            self.text = ""
        self.post_message(self.SendPressed(typed))

    def action_complete(self) -> None:
        """Complete a command; anywhere else go to the next widget."""
        if not self.text.startswith("/") or any(char.isspace() for char in self.text):
            self.screen.focus_next()
            return
        found = [name for name in self.commands if name.startswith(self.text[1:].lower())]
        if found:
            same = takewhile(lambda chars: len(set(chars)) == 1, zip(*found, strict=False))
            self.text = "/" + "".join(chars[0] for chars in same) + " " * (len(found) == 1)
            self.move_cursor(self.document.end)

    def action_newline(self) -> None:
        """Break the line at the cursor."""
        self._replace_via_keyboard("\n", *self.selection)

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up; from the first line to the question before."""
        if self.navigator.is_first_wrapped_line(self.selection.end) and not select:
            self.post_message(self.RecallPressed(-1))
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        """Move down; from the last line to the question after."""
        if self.navigator.is_last_wrapped_line(self.selection.end) and not select:
            self.post_message(self.RecallPressed(1))
        else:
            super().action_cursor_down(select)

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
        if _is_big(text):
            self.post_message(self.BigPasted(text))
        elif result := self._replace_via_keyboard(text, *self.selection):
            self.move_cursor(result.end_location)


class PromptInput(Vertical):
    """The field with its attachment chips."""

    attachments: reactive[tuple[Attachment, ...]] = reactive((), init=False)

    @dataclass
    class Submitted(Message):
        """A prompt is to be sent; the owner calls `put_back` when it was not."""

        draft: Draft

    @dataclass
    class EmptySent(Message):
        """Enter was pressed with nothing written."""

    @dataclass
    class Changed(Message):
        """What is written changed (the draft)."""

        text: str

    @dataclass
    class RecallRequested(Message):
        """The person wants an earlier prompt (-1) or a later one (1); the owner calls `recall`."""

        step: int

    @dataclass
    class LookRequested(Message):
        """The person wants to see what is attached."""

    def __init__(self, id: str | None = None) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self._recalled: tuple[int, str] | None = None
        """Which earlier prompt is shown, and its text; None for the draft."""
        self._kept = Draft()
        """The draft while an earlier prompt is shown."""
        self._sent_again: tuple[int, str] | None = None
        """The earlier prompt that was sent last, for it may be put back."""

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
    def draft(self) -> Draft:
        """What is written."""
        return Draft(self.attachments, self.area.text)

    @draft.setter
    def draft(self, draft: Draft) -> None:
        self.attachments = draft.attachments
        self.area.text = draft.typed
        self.area.move_cursor(self.area.document.end)

    @property
    def text(self) -> str:
        """Everything that would be sent."""
        return self.draft.text

    @text.setter
    def text(self, text: str) -> None:
        """Put a prompt in as it was written; a long one becomes a chip again."""
        self.draft = Draft((Attachment(text),)) if _is_big(text) else Draft(typed=text)

    @property
    def unsent(self) -> str:
        """What was written and not sent: not the earlier prompt that is only looked at."""
        return self._kept.text if self._is_looking_back else self.text

    @property
    def _is_looking_back(self) -> bool:
        return self._recalled is not None and self._recalled[1] == self.text

    def begin(self, draft: str) -> None:
        """Another chat is open: its draft replaces everything of the one before."""
        self._recalled, self._sent_again, self._kept = None, None, Draft()
        self.text = draft

    def put_in_sent(self, text: str) -> None:
        """Put a message in as it was sent; what reads like a command stays text when sent again."""
        self.text = text if _is_big(text) else escape(text)

    def put_back(self, draft: Draft) -> None:
        """What was to be sent was not: put it before what has been written since."""
        if draft == Draft():
            return
        now, again = self.draft, self._sent_again
        if again is not None and draft.text == again[1] and now == self._kept:
            self.draft, self._recalled = draft, again  # it is looked at as before
            return
        typed = "\n".join(part for part in (draft.typed, now.typed) if part)
        self.draft = Draft((*draft.attachments, *now.attachments), typed)

    def rewrite(self, text: str) -> None:
        """Take what was written elsewhere; attachments it still begins with stay chips."""
        head = "".join(f"{a.text}\n\n" for a in self.attachments).lstrip("\n")
        if head and text.startswith(head):
            self.draft = Draft(self.attachments, text.removeprefix(head))
        else:
            self.text = text

    def attach(self, attachment: Attachment) -> None:
        """Add a chip."""
        self.attachments = (*self.attachments, attachment)

    def recall(self, prompts: Sequence[str], step: int) -> None:
        """Show the prompt before or after the one shown; behind the newest stands the draft.

        prompts: as they were sent, oldest first.
        State: an earlier prompt that was changed is the draft from then on.
        """
        if self._recalled is None or not self._is_looking_back:
            self._recalled, self._kept = None, self.draft
        at = step + (self._recalled[0] if self._recalled else len(prompts))
        if at == len(prompts):
            self._recalled, self.draft = None, self._kept
        elif 0 <= at < len(prompts):
            self.put_in_sent(prompts[at])
            self._recalled = at, self.text
        else:
            self.area.move_cursor((0, 0) if step < 0 else self.area.document.end)

    def watch_attachments(self, attachments: tuple[Attachment, ...]) -> None:
        """Show one chip for each attachment."""
        chips = self.query_one("#prompt-chips", Static)
        chips.display = bool(attachments)
        chips.update("  ".join(_describe_chip(n, t) for n, t in enumerate(attachments, 1)))
        self.post_message(self.Changed(self.text))

    @on(PromptArea.SendPressed)
    def _send(self, event: PromptArea.SendPressed) -> None:
        event.stop()
        draft = Draft(self.attachments, event.typed)
        if not draft.text.strip():
            self.post_message(self.EmptySent())
            return
        again = self._recalled
        if again is not None and again[1] != draft.text:
            again = None  # it was changed
        self.attachments, self._recalled = (), None
        if again is not None:
            self.put_back(self._kept)
        self._sent_again = again
        self.post_message(self.Submitted(draft))

    @on(PromptArea.RecallPressed)
    def _recall(self, event: PromptArea.RecallPressed) -> None:
        event.stop()
        self.post_message(self.RecallRequested(event.step))

    def on_click(self, event: events.Click) -> None:
        """A click on the chips looks into them."""
        if event.widget is self.query_one("#prompt-chips"):
            self.post_message(self.LookRequested())

    @on(PromptArea.BigPasted)
    def _add_chip(self, event: PromptArea.BigPasted) -> None:
        event.stop()
        self.attach(Attachment(event.text))

    @on(PromptArea.RemovePressed)
    def _drop_chip(self, event: PromptArea.RemovePressed) -> None:
        event.stop()
        self.attachments = self.attachments[:-1]

    @on(TextArea.Changed)
    def _changed(self, event: TextArea.Changed) -> None:
        event.stop()
        self.post_message(self.Changed(self.text))


def _is_big(text: str) -> bool:
    return len(text) > BIG_PASTE_CHARS or text.count("\n") > BIG_PASTE_LINES


def _describe_chip(number: int, attachment: Attachment) -> str:
    num_lines = attachment.text.count("\n") + 1
    name = attachment.name or f"paste {number}"
    return f"▤ {name}: {num_lines:,} lines, {len(attachment.text):,} characters"
