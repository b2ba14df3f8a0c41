"""What is typed and not sent yet: kept with the open chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.timer import Timer

from storage.errors import ChatGone

if TYPE_CHECKING:
    from app.screens.chat import ChatScreen

DRAFT_SAVE_S = 1.0
"""How long a draft may be unsaved; writing at each key would touch the disk at each key."""


class DraftKeeper:
    """Stores the prompt of a chat screen as its chat's draft."""

    def __init__(self, screen: ChatScreen) -> None:
        self.stored = ""
        """What the store has as the open chat's draft."""
        self._screen = screen
        self._timer: Timer | None = None

    def touch(self) -> None:
        """The prompt changed: it is stored soon."""
        if self._timer is None:
            self._timer = self._screen.set_timer(DRAFT_SAVE_S, self.save)

    def save(self) -> None:
        """Store what is typed now, or say why it cannot be."""
        with self._screen.told():
            self._store()

    def leave(self) -> None:
        """Store what is typed before the chat is left.

        State:  of a chat that was deleted in another window, it gets a chat of its own.
        Raises: StorageError when it cannot be stored: the chat is not to be left then.
        """
        try:
            self._store()
        except ChatGone:
            self._screen.chat_id = None
            if self._screen.prompt.unsent:
                self._store()

    def _store(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.stop()
        screen, text = self._screen, self._screen.prompt.unsent
        if text == self.stored:
            return
        is_new = screen.chat_id is None  # an empty chat gets its row with the first draft
        screen.conversations.store.save_draft(screen.make_chat(), text)
        self.stored = text
        if is_new:
            screen.show_chats()
