"""One conversation: transcript, prompt, status; asks `Conversations` for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Static

from app.conversations import Conversations
from app.errors import Refused
from app.screens.chat_commands import ChatCommands
from app.screens.dialogs import TextView
from app.screens.drafts import DraftKeeper
from app.screens.hints import (
    CONTINUE_HINT,
    IDLE_HINTS,
    RUNNING_HINTS,
    describe_other_model,
    fit_hints,
    warn_too_long,
    with_turn,
)
from app.screens.message_actions import MessageActions
from app.screens.welcome import describe_empty_chat
from app.shown import ShownMessage
from app.slash import SlashCommand, parse_slash, unescape
from app.turns import Turn
from app.widgets.chat_list import ChatList
from app.widgets.markdown import CopyCode
from app.widgets.message import MessageView
from app.widgets.prompt import Draft, PromptInput
from app.widgets.status_bar import StatusBar
from app.widgets.transcript import Transcript
from storage.errors import ChatGone, StorageError

if TYPE_CHECKING:
    from app.app import ForetellApp

NARROW_CELLS = 76
"""Below this the chat list would leave less than 48 cells for text, so it hides."""
SHORT_ROWS = 12
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
        Binding("ctrl+g", "edit_prompt", "Editor", id="chat.editor", priority=True),
        Binding("ctrl+up", "focus_message(-1)", "Messages", id="chat.up", priority=True),
        Binding("ctrl+down", "focus_message(1)", show=False, id="chat.down", priority=True),
        Binding("pageup", "scroll(-1)", show=False, id="chat.page_up", priority=True),
        Binding("pagedown", "scroll(1)", show=False, id="chat.page_down", priority=True),
    ]

    def __init__(self, chat_id: str | None = None) -> None:
        super().__init__()
        self.chat_id = chat_id
        """The open chat; None for one that has not been written to yet."""
        self._last_turn: Turn | None = None
        """The newest turn of the open chat in this run, for the numbers in the status bar."""
        self._context_used: int | None = 0
        """Tokens of the shown path, as its last answer has it; None when that is not known."""
        self._retry_question_id: int | None = None
        """A question that failed and stands in the prompt again."""
        self._answered_by = ""
        """The model that answered last in the open chat, until the chat is gone on with."""
        self.drafts = DraftKeeper(self)
        """Keeps what is typed."""
        self._commands = ChatCommands(self)
        self._actions = MessageActions(self)
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

    @property
    def other_model(self) -> str:
        """The model this chat was answered by, when it is not the loaded one; else empty."""
        is_other = self._answered_by not in ("", self.foretell.model.name)
        return self._answered_by if is_other else ""

    @property
    def commands(self) -> ChatCommands:
        """What can be done here by name."""
        return self._commands

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
        self.prompt.area.commands = self._commands.names
        self.set_interval(FLUSH_S, self.conversations.store.flush)
        await self.open_chat(self.chat_id or self.conversations.unfinished_chat())
        self.prompt.area.focus()

    def on_resize(self, event: events.Resize) -> None:
        """Leave out what does not fit."""
        self.set_class(event.size.width < NARROW_CELLS, "narrow")
        self.set_class(event.size.height < SHORT_ROWS, "short")
        self.show_status()

    # -- showing -------------------------------------------------------------------

    async def open_chat(self, chat_id: str | None) -> None:
        """Show a chat, a running answer included; None shows an empty one."""
        try:
            self.leave_chat(chat_id)
        except StorageError as error:  # what is typed stays where it can be seen
            self.foretell.show_error(error)
            return
        self._retry_question_id = None
        draft = answered_by = ""
        with self.told():
            if chat_id is not None:
                wanted, chat_id = chat_id, None  # an empty chat when it is gone
                draft = self.conversations.store.get(wanted).draft
                answered_by = self.conversations.answered_by(wanted)
                chat_id = wanted
        self.chat_id = chat_id
        self._answered_by = answered_by
        self._last_turn = self.conversations.turn_of(chat_id)
        with self.prompt.prevent(PromptInput.Changed):
            self.prompt.begin(draft)  # before anything is waited for: it belongs to the open chat
        self.drafts.stored = draft
        await self.show_messages()
        self.remove_class("show-chats")
        self.show_status()

    def leave_chat(self, to: str | None = None) -> None:
        """Store what is typed; a chat nobody wrote to is not kept, unless it is the next one too.

        Raises: StorageError when what is typed cannot be stored: the chat stays open.
        """
        if not self._is_ready:
            return
        self.drafts.leave()
        left, self.chat_id = self.chat_id, None
        if left not in (None, to):
            with self.told(), suppress(ChatGone):
                self.conversations.leave(left)

    async def show_messages(self) -> None:
        """Show the open chat's messages as the store has them."""
        shown = self.conversations.shown(self.chat_id) if self.chat_id else []
        known = [message.context_used for message in shown if message.context_used]
        self._context_used = known[-1] if known else None if shown else 0
        await self.transcript.show(shown, describe_empty_chat(self.foretell))
        await self.resync()
        self.show_chats()
        self.show_status()

    async def resync(self) -> None:
        """Bring the messages that are on the screen up to date."""
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
        status = replace(self.foretell.status(), context_used=self._context_used)
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
        width = self.size.width - 2
        if commands := self._commands.hint(self.prompt.area.text):
            return fit_hints(commands, width)
        if self.other_model and not self.prompt.text:
            other, loaded = self.other_model, self.foretell.model.name
            return fit_hints(describe_other_model(other, loaded), width)
        if self.conversations.turn_of(self.chat_id) is not None:
            return fit_hints(RUNNING_HINTS, width)
        views = self.transcript.views
        can_go_on = bool(views) and views[-1].shown.can_go_on
        return fit_hints((CONTINUE_HINT, *IDLE_HINTS) if can_go_on else IDLE_HINTS, width)

    async def show_turn(self, turn: Turn) -> None:
        """A turn moved on: stream its text, or finish it, when its chat is open."""
        if turn.chat_id == self.chat_id:
            self._last_turn = turn
            self._context_used = turn.context_used or self._context_used
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
            await self.show_messages()  # an attempt without a character is dropped
            return
        if shown is not None:
            await self.transcript.finish(shown)
        if turn.error is not None and not turn.text and not self.prompt.text:
            self.prompt.put_in_sent(turn.question)
            self._retry_question_id = turn.question_id

    # -- asking ----------------------------------------------------------------------

    @on(PromptInput.Submitted)
    async def _submit(self, event: PromptInput.Submitted) -> None:
        event.stop()
        draft = event.draft
        if command := parse_slash(draft.typed):
            await self._run_typed(command, draft)
        elif self.is_busy():
            self.prompt.put_back(draft)
        else:
            await self._send(draft)

    async def _run_typed(self, command: SlashCommand, draft: Draft) -> None:
        """Carry out a command; one that cannot be is text again."""
        self.prompt.put_back(replace(draft, typed=""))
        try:
            await self._commands.run(command.name, command.argument)
        except (Refused, StorageError) as error:
            self._commands.tell(error)
            self.prompt.put_back(Draft(typed=draft.typed))

    async def _send(self, draft: Draft) -> None:
        was_empty = not self.transcript.views
        try:
            await self._ask(replace(draft, typed=unescape(draft.typed)).text)
        except StorageError as error:
            self.foretell.show_error(error)
            self.prompt.put_back(draft)
            return
        if self.foretell.model.phase == "no model":
            self.foretell.get_first_model(is_announced=was_empty)

    async def _ask(self, text: str) -> None:
        chat_id = self.make_chat()
        retry = self._retry_question_id
        if retry is not None:
            same = self.conversations.store.message(retry).content == text
            turn = (
                self.conversations.regenerate(retry)
                if same
                else self.conversations.edit(retry, text)
            )
            await self.show_messages()
        else:
            turn = self.conversations.ask(chat_id, text)
            self.drafts.stored = ""  # a question clears it
            shown = self.conversations.shown(chat_id)
            for message in shown[-2:]:
                if not self.transcript.find(message.message_id):
                    await self.transcript.add(message)
            await self.resync()
        self.follow(turn)

    def make_chat(self) -> str:
        """The open chat, with a row of its own from now on."""
        if self.chat_id is None:
            self.chat_id = self.conversations.create()
        return self.chat_id

    def follow(self, turn: Turn) -> None:
        """An answer of the open chat was begun."""
        self._last_turn = turn
        self._answered_by = ""
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
        with self.told():
            asked = self.conversations.questions(self.chat_id) if self.chat_id else []
            self.prompt.recall(asked, event.step)

    @on(PromptInput.LookRequested)
    def _look(self, event: PromptInput.LookRequested) -> None:
        event.stop()
        texts = [attachment.text for attachment in self.prompt.attachments]
        self.app.push_screen(TextView("What is attached", "\n\n".join(texts)))

    async def action_edit_prompt(self) -> None:
        """Write the message, attachments included, in the person's own editor."""
        await self._commands.choose("editor")

    # -- drafts ------------------------------------------------------------------------

    @on(PromptInput.Changed)
    def _draft_changed(self, event: PromptInput.Changed) -> None:
        event.stop()
        self.drafts.touch()
        self._show_hints(self.foretell.status().context_len)

    # -- messages ----------------------------------------------------------------------

    @on(MessageView.Wish)
    async def _wish(self, event: MessageView.Wish) -> None:
        event.stop()
        with self.told():
            await self._actions.fulfil(event)

    @contextmanager
    def told(self) -> Iterator[None]:
        """An error of the store becomes a line on the screen: a chat deleted in another window."""
        try:
            yield
        except StorageError as error:
            self.foretell.show_error(error)

    @contextmanager
    def put_back_on_error(self, typed: str) -> Iterator[None]:
        """What the store does not take stands in the prompt, so that it is not lost."""
        try:
            yield
        except StorageError:
            self.prompt.put_back(Draft(typed=typed))
            raise

    @on(CopyCode.Pressed)
    def _copy_block(self, event: CopyCode.Pressed) -> None:
        event.stop()
        self.foretell.copy(event.code, "the code")

    async def action_regenerate(self) -> None:
        """Answer the last question again; the old answer stays as another version."""
        if newest := self._newest():
            with self.told():
                await self._actions.regenerate(newest.message_id)

    async def action_go_on(self) -> None:
        """Let the newest answer go on when it ended before its end."""
        if newest := self._newest():
            with self.told():
                await self._actions.go_on(newest)

    def _newest(self) -> ShownMessage | None:
        if views := self.transcript.views:
            return views[-1].shown
        self.notify("There is no answer here yet", markup=False)
        return None

    def is_busy(self) -> bool:
        """Whether an answer runs here, which is said."""
        if self.conversations.turn_of(self.chat_id):
            self.notify("The answer is still running: Esc stops it", markup=False)
            return True
        return False

    def action_copy_answer(self) -> None:
        """Copy the newest answer."""
        self._actions.copy_newest_answer()

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
            self._commands.delete(event.chat_id)
        else:
            self._commands.rename(event.chat_id)

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

        choice = await self.app.push_screen_wait(SearchScreen(self.conversations.store))
        if choice is not None:
            with self.told():
                self.conversations.show_branch(choice)
            await self.open_chat(choice.chat_id)
            if choice.message_id is not None:
                await self.transcript.reveal(choice.message_id)

    def action_toggle_speculation(self) -> None:
        """Switch speculation, also for the answer that runs."""
        self.foretell.action_toggle_speculation()
