"""What the keys do, and what the numbers in the status line mean."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

HELP = """\
Writing
  Enter            send
  Ctrl+J           new line (Shift+Enter too, where the terminal tells it from Enter)
  Up               in an empty field: your last message again
  Backspace        in an empty field: drop an attached paste
  Esc              stop the answer; what has come is kept

Answers
  Ctrl+R           answer anew; the old answer is kept
  Ctrl+O           copy the newest answer
  Ctrl+T           speculation on or off, from the next step of the running answer
  PgUp PgDn        scroll
  Ctrl+Up Down     walk through the messages; on a message:
                   C copy · Y copy code · E edit and ask again · R answer anew
                   ← → other versions · T unfold the thinking

Chats and pages
  Ctrl+N           new chat
  Ctrl+F           search in every chat
  Ctrl+B or F6     list of chats (Tab reaches it; R renames, D deletes after a question)
  F2               settings
  F3               models
  Ctrl+P           every command by name
  Ctrl+Q           quit; a running answer is kept as far as it came

The status line
  1.2k/8.2k        tokens in this chat, of the most it can hold
  tok/s            tokens per second after the first one
  drafts 20/35     of 35 tokens guessed ahead, 20 were what the model would have written
  spec probing     trying whether guessing pays · holding: it does · parked: it does not now

Selecting with the mouse copies with Ctrl+C. Most terminals select their own way with Shift held.
"""


class HelpScreen(ModalScreen[None]):
    """A page of help over any screen."""

    BINDINGS = [Binding("escape,f1,q,enter", "dismiss(None)", "Close", id="help.close")]

    def compose(self) -> ComposeResult:
        """The text, scrollable."""
        with VerticalScroll(classes="dialog wide"):
            yield Static(HELP, markup=False, id="help-text")
