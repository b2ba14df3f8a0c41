"""One conversation: transcript, prompt, status; asks `Conversations` for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from textual import events, on, work
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from app.conversations import Conversations, Turn
from app.screens.dialogs import ConfirmDialog, EditDialog, TextDialog
from app.screens.hints import IDLE_HINTS, RUNNING_HINTS, fit_hints, warn_too_long, with_turn
from app.screens.welcome import describe_empty_chat
from app.shown import ShownMessage
from app.widgets.chat_list import ChatList
from app.widgets.markdown import CopyCode
from app.widgets.message import MessageView, find_code_blocks
from app.widgets.prompt import PromptInput
from app.widgets.status_bar import StatusBar
from app.widgets.transcript import Transcript
from storage.errors import ChatGone, StorageError

if TYPE_CHECKING:
    from app.app import ForetellApp

NARROW_CELLS = 76
"""Below this the chat list would leave less than 48 cells for text, so it hides."""
SHORT_ROWS = 12
DRAFT_SAVE_S = 1.0
"""How long a draft may be unsaved; writing at each key would touch the disk at each key."""
FLUSH_S = 1.0
"""How often running answers are written, so that a crash costs at most this much of them."""


class ChatScreen(Screen[None]):
    """The screen the program opens with."""

    BINDINGS = [
        Binding("escape", "stop", "Stop", id="chat.stop"),
        Binding("ctrl+n", "new", "New chat", id="chat.new", priority=True),
        Binding("ctrl+r", "regenerate", "Answer anew", id="chat.regenerate", priority=True),
        Binding("ctrl+t", "toggle_speculation", "Speculation", id="chat.spec", priority=True),
        Binding("ctrl+f", "search", "Search", id="chat.search", priority=True),
        Binding("ctrl+b,f6", "toggle_chats", "Chats", id="chat.list", priority=True),
        Binding("ctrl+o", "copy_answer", "Copy answer", id="chat.copy", priority=True),
        Binding("ctrl+up", "focus_message(-1)", "Messages", id="chat.up", priority=True),
        Binding("ctrl+down", "focus_message(1)", show=False, id="chat.down", priority=True),
        Binding("pageup", "scroll(-1)", show=False, id="chat.page_up", priority=True),
        Binding("pagedown", "scroll(1)", show=False, id="chat.page_down", priority=True),
    ]

    def __init__(self, chat_id: str | None = None) -> None:
        super().__init__()
        self.chat_id = chat_id
        """The open chat; None for one that has not been written to yet."""
        self._draft_timer: Timer | None = None
        self._last_turn: Turn | None = None
        """The newest turn of the open chat in this run, for the numbers in the status bar."""
        self._retry_question_id: int | None = None
        """A question that failed and stands in the prompt again."""
        self._shown_hints = ""
        self._is_ready = False
        """Whether there are widgets to show something in."""

    @property
    def foretell(self) -> ForetellApp:
        """The app, with its type."""
        return cast("ForetellApp", self.app)

    @property
    def conversations(self) -> Conversations:
        """The chats."""
        return self.foretell.conversations

    @property
    def transcript(self) -> Transcript:
        """The messages."""
        return self.query_one(Transcript)

    @property
    def prompt(self) -> PromptInput:
        """The prompt."""
        return self.query_one(PromptInput)

    def compose(self) -> ComposeResult:
        """Chats on the left, the conversation on the right, the status below."""
        with Horizontal(id="chat-body"):
            yield ChatList()
            with Vertical(id="chat-main"):
                yield Transcript(id="transcript")
                yield PromptInput(id="prompt")
        yield Static("", id="hints", markup=False)
        yield StatusBar()

    async def on_mount(self) -> None:
        """Open the chat that was asked for, or the one a crash left unfinished."""
        self._is_ready = True
        self.set_interval(FLUSH_S, self.conversations.store.flush)
        await self.open_chat(self.chat_id or self._unfinished_chat())
        self.prompt.area.focus()

    def on_resize(self, event: events.Resize) -> None:
        """Leave out what does not fit."""
        self.set_class(event.size.width < NARROW_CELLS, "narrow")
        self.set_class(event.size.height < SHORT_ROWS, "short")
        self.show_status()

    def _unfinished_chat(self) -> str | None:
        latest = self.conversations.store.latest()
        if latest is None:
            return None
        if latest.draft:
            return latest.id
        path = self.conversations.store.messages(latest.id)
        return latest.id if path and path[-1].state == "interrupted" else None

    # -- showing -------------------------------------------------------------------

    async def open_chat(self, chat_id: str | None) -> None:
        """Show a chat, a running answer included; None shows an empty one."""
        self.save_draft()
        self._retry_question_id = None
        draft = ""
        with self._told():
            if chat_id is not None:
                wanted, chat_id = chat_id, None  # an empty chat when it is gone
                draft = self.conversations.store.get(wanted).draft
                chat_id = wanted
        self.chat_id = chat_id
        self._last_turn = self.conversations.turn_of(chat_id)
        await self._show_messages()
        with self.prompt.prevent(PromptInput.Changed):
            self.prompt.text = draft
        self.remove_class("show-chats")
        self.show_status()

    async def _show_messages(self) -> None:
        shown = self.conversations.shown(self.chat_id) if self.chat_id else []
        await self.transcript.show(shown, describe_empty_chat(self.foretell))
        await self._resync()
        self.show_chats()

    async def _resync(self) -> None:
        if self.chat_id is not None:
            await self.transcript.resync(self.conversations.shown(self.chat_id))

    def show_chats(self) -> None:
        """Bring the list of chats up to date."""
        self.query_one(ChatList).show(self.conversations.entries(self.chat_id))

    def show_model(self) -> None:
        """The model changed: the empty chat's text and the status follow."""
        if self._is_ready:
            self.query_one("#transcript-empty", Static).update(describe_empty_chat(self.foretell))
        self.show_status()

    def show_status(self) -> None:
        """Bring the status line up to date."""
        if not self._is_ready:
            return
        status = self.foretell.status()
        if self._last_turn is not None:
            status = with_turn(status, self._last_turn)
        elsewhere = [t for t in self.conversations.running if t.chat_id != self.chat_id]
        self.query_one(StatusBar).status = replace(status, num_elsewhere=len(elsewhere))
        self._show_hints(status.context_len)

    def _show_hints(self, context_len: int) -> None:
        hints = self._hints(context_len)
        if hints != self._shown_hints:  # an update lays the whole screen out again
            self._shown_hints = hints
            self.query_one("#hints", Static).update(hints)

    def _hints(self, context_len: int) -> str:
        if warning := warn_too_long(self.prompt.text, context_len):
            return warning
        is_running = self.conversations.turn_of(self.chat_id) is not None
        return fit_hints(RUNNING_HINTS if is_running else IDLE_HINTS, self.size.width - 2)

    async def show_turn(self, turn: Turn) -> None:
        """A turn moved on: stream its text, or finish it, when its chat is open."""
        if turn.chat_id == self.chat_id:
            self._last_turn = turn
            if turn.phase == "reading":
                self.transcript.note(turn.message_id, turn.note)
            if turn.phase == "answering":
                await self.transcript.stream(turn.message_id, turn.text, turn.stats)
            if turn.phase == "ended":
                await self._show_ended(turn)
        elif turn.phase == "ended":
            self.conversations.mark_unread(turn.chat_id)
        if turn.phase == "ended":
            self.show_chats()
        self.show_status()
        if turn.problem is not None:
            self.foretell.show_error(turn.problem)

    async def _show_ended(self, turn: Turn) -> None:
        if turn.problem is not None:  # the store knows less than the screen
            await self.transcript.finish(replace(turn.shown(), state="interrupted"))
            return
        try:
            shown = self.conversations.shown_message(turn.message_id)
        except ChatGone:
            await self._show_messages()  # an attempt without a character is dropped
            return
        if shown is not None:
            await self.transcript.finish(shown)
        if turn.error is not None and not turn.text and not self.prompt.text:
            self.prompt.text = turn.question
            self._retry_question_id = turn.question_id

    # -- asking ----------------------------------------------------------------------

    @on(PromptInput.Submitted)
    async def _submit(self, event: PromptInput.Submitted) -> None:
        event.stop()
        if self.conversations.turn_of(self.chat_id):
            self.notify("The answer is still running: Esc stops it", markup=False)
            return
        was_empty = not self.transcript.views
        try:
            await self._ask(event.text)
        except StorageError as error:
            self.foretell.show_error(error)  # the prompt keeps its text
            return
        self.prompt.clear()
        if self.foretell.model.phase == "no model":
            self.foretell.get_first_model(is_announced=was_empty)

    async def _ask(self, text: str) -> None:
        if self.chat_id is None:
            self.chat_id = self.conversations.create()
        retry = self._retry_question_id
        if retry is not None:
            same = self.conversations.store.message(retry).content == text
            turn = (
                self.conversations.regenerate(retry)
                if same
                else self.conversations.edit(retry, text)
            )
            await self._show_messages()
        else:
            turn = self.conversations.ask(self.chat_id, text)
            shown = self.conversations.shown(self.chat_id)
            for message in shown[-2:]:
                if not self.transcript.find(message.message_id):
                    await self.transcript.add(message)
            await self._resync()
        self._follow(turn)

    def _follow(self, turn: Turn) -> None:
        self._last_turn = turn
        self._retry_question_id = None  # answered anew by another key: the next text is a new one
        self.show_chats()
        self.show_status()

    async def action_stop(self) -> None:
        """Stop the answer; what has come is kept. Escape also leaves the list and messages."""
        if self.chat_id and self.conversations.turn_of(self.chat_id):
            if ended := self.conversations.stop(self.chat_id):
                await self.show_turn(ended)
        else:
            self.remove_class("show-chats")
            self.prompt.area.focus()

    @on(PromptInput.EmptySent)
    def _download_default(self, event: PromptInput.EmptySent) -> None:
        event.stop()
        if self.foretell.model.phase == "no model":
            self.foretell.get_first_model(is_announced=not self.transcript.views)

    @on(PromptInput.RecallRequested)
    def _recall(self, event: PromptInput.RecallRequested) -> None:
        event.stop()
        questions = [v.shown.text for v in self.transcript.views if v.shown.role == "user"]
        if questions:
            self.prompt.text = questions[-1]

    # -- drafts ------------------------------------------------------------------------

    @on(PromptInput.Changed)
    def _draft_changed(self, event: PromptInput.Changed) -> None:
        event.stop()
        if self._draft_timer is None:
            self._draft_timer = self.set_timer(DRAFT_SAVE_S, self.save_draft)
        self._show_hints(self.foretell.status().context_len)

    def save_draft(self) -> None:
        """Store what is typed; an empty chat gets its row with the first draft."""
        timer, self._draft_timer = self._draft_timer, None
        if timer is None:
            return
        timer.stop()
        text = self.prompt.text
        try:
            if self.chat_id is None and text:
                self.chat_id = self.conversations.create()
                self.show_chats()
            if self.chat_id is not None:
                self.conversations.store.save_draft(self.chat_id, text)
        except StorageError as error:
            self.foretell.show_error(error)

    # -- messages ----------------------------------------------------------------------

    @on(MessageView.Wish)
    async def _wish(self, event: MessageView.Wish) -> None:
        event.stop()
        with self._told():
            await self._fulfil(event)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """An error of the store becomes a line on the screen: a chat deleted in another window."""
        try:
            yield
        except StorageError as error:
            self.foretell.show_error(error)

    async def _fulfil(self, event: MessageView.Wish) -> None:
        shown = event.view.shown
        match event.what:
            case "copy":
                self.foretell.copy(shown.text, "the message")
            case "copy_code":
                self._copy_code(shown)
            case "edit":
                self._edit(shown)
            case "regenerate":
                await self._regenerate(shown.message_id)
            case "previous" | "next":
                await self._select_version(shown, -1 if event.what == "previous" else 1)

    @on(CopyCode.Pressed)
    def _copy_block(self, event: CopyCode.Pressed) -> None:
        event.stop()
        self.foretell.copy(event.code, "the code")

    def _copy_code(self, shown: ShownMessage) -> None:
        if blocks := find_code_blocks(shown.text):
            self.foretell.copy("\n\n".join(blocks), f"{len(blocks)} code block(s)")
        else:
            self.notify("This message has no code block", markup=False)

    @work
    async def _edit(self, shown: ShownMessage) -> None:
        """Ask for the new text; the old question and its answers stay as another version."""
        if shown.role != "user":
            self.notify("Only your own messages can be edited", markup=False)
            return
        if self._is_busy():
            return
        question = "Edit and ask again. The old message and its answers stay: ← → switches."
        text = await self.app.push_screen_wait(EditDialog(question, shown.text))
        if text is None or text == shown.text:
            return
        with self._told():
            turn = self.conversations.edit(shown.message_id, text)
            await self._show_messages()
            self._follow(turn)

    async def action_regenerate(self) -> None:
        """Answer the last question again; the old answer stays as another version."""
        if views := self.transcript.views:
            await self._regenerate(views[-1].shown.message_id)

    async def _regenerate(self, message_id: int) -> None:
        if self._is_busy():
            return
        with self._told():
            turn = self.conversations.regenerate(message_id)
            await self._show_messages()
            self._follow(turn)

    async def _select_version(self, shown: ShownMessage, step: int) -> None:
        if self._is_busy() or not self.conversations.select_version(shown.message_id, step):
            return
        ids = [view.shown.message_id for view in self.transcript.views]
        at = ids.index(shown.message_id)
        await self._show_messages()
        if views := self.transcript.views:
            views[min(at, len(views) - 1)].focus()

    def _is_busy(self) -> bool:
        if self.conversations.turn_of(self.chat_id):
            self.notify("The answer is still running: Esc stops it", markup=False)
            return True
        return False

    def action_copy_answer(self) -> None:
        """Copy the newest answer."""
        for view in reversed(self.transcript.views):
            if view.shown.role == "assistant" and view.shown.text:
                self.foretell.copy(view.shown.text, "the answer")
                return

    def action_focus_message(self, step: int) -> None:
        """Walk through the messages; below the last one is the prompt."""
        if not self.transcript.focus_message(step) and step > 0:
            self.prompt.area.focus()

    def action_scroll(self, step: int) -> None:
        """Scroll the transcript by a page, wherever the focus is."""
        self.transcript.scroll_page(step)

    # -- chats -------------------------------------------------------------------------

    async def action_new(self) -> None:
        """Open an empty chat."""
        await self.open_chat(None)
        self.prompt.area.focus()

    @on(ChatList.Opened)
    async def _open(self, event: ChatList.Opened) -> None:
        event.stop()
        await self.open_chat(event.chat_id)
        self.prompt.area.focus()

    @on(ChatList.Wish)
    def _chat_wish(self, event: ChatList.Wish) -> None:
        event.stop()
        if event.what == "delete":
            self._delete(event.chat_id)
        else:
            self._rename(event.chat_id)

    @work
    async def _delete(self, chat_id: str) -> None:
        with self._told():
            title = self.conversations.store.get(chat_id).title or "this chat"
            question = f"Delete “{title}” with all its messages? This cannot be undone."
            if await self.app.push_screen_wait(ConfirmDialog(question, "Delete", "Keep")):
                self.conversations.delete(chat_id)
        if chat_id == self.chat_id and chat_id not in self._chat_ids():
            self.chat_id = None
            await self.open_chat(None)
        self.show_chats()

    def _chat_ids(self) -> set[str]:
        return {chat.id for chat in self.conversations.store.list_chats()}

    @work
    async def _rename(self, chat_id: str) -> None:
        with self._told():
            title = self.conversations.store.get(chat_id).title
            new = await self.app.push_screen_wait(TextDialog("Rename the chat", title))
            if new is not None:
                self.conversations.store.rename(chat_id, new)
        self.show_chats()

    def action_toggle_chats(self) -> None:
        """Show or hide the list of chats; on a narrow screen it takes the transcript's place."""
        name = "show-chats" if self.has_class("narrow") else "hide-chats"
        self.toggle_class(name)
        chats = self.query_one(ChatList)
        (chats if chats.display and self.has_class("show-chats") else self.prompt.area).focus()

    @work
    async def action_search(self) -> None:
        """Find a chat by its title or by what was said in it."""
        from app.screens.search import SearchScreen

        chat_id = await self.app.push_screen_wait(SearchScreen(self.conversations.store))
        if chat_id is not None:
            await self.open_chat(chat_id)

    def action_toggle_speculation(self) -> None:
        """Switch speculation, also for the answer that runs."""
        self.foretell.action_toggle_speculation()

    def palette_commands(self) -> Iterable[SystemCommand]:
        """What the command palette can do here."""
        yield SystemCommand("New chat", "Start an empty chat (Ctrl+N)", self.action_new)
        yield SystemCommand("Search chats", "Find by title or text (Ctrl+F)", self.action_search)
        yield SystemCommand("Answer anew", "Another attempt (Ctrl+R)", self.action_regenerate)
        yield SystemCommand("Stop", "Stop the answer (Esc)", self.action_stop)
        yield SystemCommand("Copy answer", "The newest one (Ctrl+O)", self.action_copy_answer)
        yield SystemCommand(
            "Speculation on or off", "At the next step (Ctrl+T)", self.action_toggle_speculation
        )
        yield SystemCommand("Chats", "Show or hide the list (Ctrl+B)", self.action_toggle_chats)
        if self.chat_id is not None:
            chat_id = self.chat_id
            yield SystemCommand("Rename chat", "Another title", lambda: self._rename(chat_id))
            yield SystemCommand("Delete chat", "After a question", lambda: self._delete(chat_id))
