"""Small questions over a screen: yes or no, one line of text, a longer text."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Log, Static, TextArea


class ConfirmDialog(ModalScreen[bool]):
    """Asks before something is lost. Escape and the first button mean no."""

    BINDINGS = [
        Binding("escape,n", "dismiss(False)", "No", id="dialog.no"),
        Binding("y", "dismiss(True)", "Yes", id="dialog.yes"),
        Binding("left", "app.focus_previous", show=False, id="dialog.left"),
        Binding("right", "app.focus_next", show=False, id="dialog.right"),
    ]

    def __init__(self, question: str, yes: str, no: str = "Cancel") -> None:
        super().__init__()
        self._question = question
        self._labels = (no, yes)

    def compose(self) -> ComposeResult:
        """The question and two buttons, the harmless one focused."""
        no, yes = self._labels
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False, classes="dialog-question")
            with Horizontal(classes="dialog-buttons"):
                yield Button(Content(no), id="no")
                yield Button(Content(yes), id="yes", variant="error")

    @on(Button.Pressed)
    def _answer(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


class TextDialog(ModalScreen[str | None]):
    """Asks for one line, for example a chat's title. None means: leave it."""

    BINDINGS = [Binding("escape", "dismiss(None)", "Cancel", id="dialog.cancel")]

    def __init__(self, question: str, text: str = "") -> None:
        super().__init__()
        self._question = question
        self._text = text

    def compose(self) -> ComposeResult:
        """The question over an input."""
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False, classes="dialog-question")
            yield Input(self._text, id="dialog-input")

    @on(Input.Submitted)
    def _answer(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


class EditDialog(ModalScreen[str | None]):
    """Edits a longer text. None means: leave it as it is; so does an empty one, unless it may be."""

    BINDINGS = [
        Binding("escape", "dismiss(None)", "Cancel", id="dialog.cancel"),
        Binding("ctrl+s,f10", "save", "Send", id="dialog.save", priority=True),
    ]

    def __init__(
        self, question: str, text: str, *, verb: str = "Send", may_be_empty: bool = False
    ) -> None:
        super().__init__()
        self._question = question
        self._text = text
        self._verb = verb
        self._may_be_empty = may_be_empty

    def compose(self) -> ComposeResult:
        """The question, the text, and two buttons."""
        with Vertical(classes="dialog wide"):
            yield Static(self._question, markup=False, classes="dialog-question")
            yield TextArea(self._text, id="dialog-text", compact=True, highlight_cursor_line=False)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Cancel", id="no")
                yield Button(f"{self._verb} (F10)", id="yes", variant="primary")

    def on_mount(self) -> None:
        """Start at the end of the text."""
        area = self.query_one(TextArea)
        area.move_cursor(area.document.end)
        area.focus()

    def action_save(self) -> None:
        """Take the text, its indentation too."""
        text = self.query_one(TextArea).text.strip("\n")
        self.dismiss(text if text.strip() else "" if self._may_be_empty else None)

    @on(Button.Pressed)
    def _answer(self, event: Button.Pressed) -> None:
        if event.button.id == "yes":
            self.action_save()
        else:
            self.dismiss(None)


class TextView(ModalScreen[None]):
    """Shows a longer text, a big one at once."""

    BINDINGS = [Binding("escape,q,enter", "dismiss(None)", "Close", id="dialog.close")]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        """The title over the text."""
        with Vertical(classes="dialog wide"):
            yield Static(self._title, markup=False, classes="dialog-question")
            yield Log(id="text-view", auto_scroll=False)

    def on_mount(self) -> None:
        """Write the lines: a field for editing takes seconds for 20,000 of them."""
        self.query_one(Log).write_lines(self._text.split("\n"))
