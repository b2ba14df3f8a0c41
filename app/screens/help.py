"""What the keys do, and what the numbers in the status line mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

if TYPE_CHECKING:
    from app.app import ForetellApp

HELP = """\
Writing
  Enter          send
  Ctrl+J         new line (Shift+Enter too, where the terminal reports it)
  Up Down        in the first or last line: your earlier messages,
                 and back to what you were writing
  Backspace      in an empty field: drop what is attached
  Ctrl+G         write in your own editor ($VISUAL or $EDITOR);
                 what is attached is in it too
  Tab            behind /: complete a command
  Esc            stop the answer; what has come is kept

Answers
  Ctrl+R         answer anew; the old answer is kept
  Ctrl+O         copy the newest answer
  Ctrl+T         speculation on or off, from the next step on
  PgUp PgDn      scroll
  Ctrl+Up Down   walk through the messages. On a message:
                 C copy     Y copy code     E edit and ask again
                 R anew     G go on         T thinking
                 ← → other versions

Chats and pages
  Ctrl+N         new chat
  Ctrl+F         search in every chat
  Ctrl+B, F6     list of chats; R renames, D deletes after a question
  F2 F3 F4       settings, models, bench
  Ctrl+P         every command by name
  Ctrl+Q         quit; a running answer is kept as far as it came

The status line
  1.2k/8.2k      tokens in this chat, of the most it can hold
  tok/s          tokens per second after the first one
  drafts 20/35   of 35 tokens guessed ahead, 20 were what the model
                 would have written anyway
  spec           probing: trying whether guessing pays
                 holding: it does.  parked: not at the moment

Text selected with the mouse is copied with Ctrl+C. Hold Shift to
select the terminal's own way. A click on what is attached shows it.

Commands, typed in place of a message (//text sends /text)
"""


class HelpScreen(ModalScreen[None]):
    """A page of help over any screen."""

    BINDINGS = [Binding("escape,f1,q,enter", "dismiss(None)", "Close", id="help.close")]

    def compose(self) -> ComposeResult:
        """The text, scrollable."""
        with VerticalScroll(classes="dialog wide"):
            commands = cast("ForetellApp", self.app).chat_screen.commands.describe()
            yield Static(HELP + commands, markup=False, id="help-text")
