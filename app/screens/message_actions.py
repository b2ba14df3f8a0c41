"""What can be done with a message: copy, edit, answer anew, go on, look at another version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.screens.dialogs import EditDialog
from app.shown import ShownMessage
from app.slash import escape
from app.thinking import split_thinking
from app.widgets.message import MessageView, find_code_blocks

if TYPE_CHECKING:
    from app.screens.chat import ChatScreen


class MessageActions:
    """Carries out wishes about the messages of a chat screen. Raises: StorageError."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen

    async def fulfil(self, event: MessageView.Wish) -> None:
        """Do what was asked for."""
        shown = event.view.shown
        match event.what:
            case "copy":
                self._screen.foretell.copy(text_of(shown), "the message")
            case "copy_code":
                self._copy_code(shown)
            case "edit":
                self._screen.run_worker(self._edit(shown))
            case "regenerate":
                await self.regenerate(shown.message_id)
            case "go_on":
                await self.go_on(shown)
            case "previous" | "next":
                await self._select_version(shown, -1 if event.what == "previous" else 1)

    def copy_newest_answer(self) -> None:
        """Copy the newest answer that has text."""
        for view in reversed(self._screen.transcript.views):
            if view.shown.role == "assistant" and (text := text_of(view.shown)):
                self._screen.foretell.copy(text, "the answer")
                return
        self._screen.notify("There is no answer here yet", markup=False)

    def _copy_code(self, shown: ShownMessage) -> None:
        if blocks := find_code_blocks(text_of(shown)):
            self._screen.foretell.copy("\n\n".join(blocks), f"{len(blocks)} code block(s)")
        else:
            self._screen.notify("This message has no code block", markup=False)

    async def _edit(self, shown: ShownMessage) -> None:
        """Ask for the new text; the old question and its answers stay as another version."""
        if shown.role != "user":
            self._screen.notify("Only your own messages can be edited", markup=False)
            return
        if self._screen.is_busy():
            return
        question = "Edit and ask again. The old message and its answers stay: ← → switches."
        text = await self._screen.app.push_screen_wait(EditDialog(question, shown.text))
        if text is None or text == shown.text:
            return
        with self._screen.told():
            with self._screen.put_back_on_error(escape(text)):
                turn = self._screen.conversations.edit(shown.message_id, text)
            await self._screen.show_messages()
            self._screen.follow(turn)

    async def regenerate(self, message_id: int) -> None:
        """Answer again; the old answer stays as another version."""
        if not self._screen.is_busy():
            turn = self._screen.conversations.regenerate(message_id)
            await self._screen.show_messages()
            self._screen.follow(turn)

    async def go_on(self, shown: ShownMessage) -> None:
        """Let the newest answer go on when it ended before its end."""
        if self._screen.is_busy():
            return
        views = self._screen.transcript.views
        if not shown.can_go_on or not views or views[-1].shown.message_id != shown.message_id:
            why = "Only a newest answer that ended early, with room in the context, can go on"
            self._screen.notify(why, markup=False)
            return
        try:
            turn = self._screen.conversations.go_on(shown)
        finally:
            await self._screen.resync()  # also where another window went on with it
            self._screen.show_status()
        self._screen.follow(turn)

    async def _select_version(self, shown: ShownMessage, step: int) -> None:
        screen = self._screen
        if screen.is_busy() or not screen.conversations.select_version(shown.message_id, step):
            return
        ids = [view.shown.message_id for view in screen.transcript.views]
        at = ids.index(shown.message_id)
        await screen.show_messages()
        if views := screen.transcript.views:
            views[min(at, len(views) - 1)].focus()


def text_of(shown: ShownMessage) -> str:
    """What is copied of a message: an answer without its thinking."""
    return shown.text if shown.role == "user" else split_thinking(shown.text).answer
