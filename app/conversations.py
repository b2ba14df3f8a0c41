"""Chats while the program runs: questions, running answers, versions. It knows no widgets.

Answers go on whether their chat is on the screen or not: every engine event comes here first, the
text goes to the store, and the screen is told only afterwards. Lives on the UI thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.errors import EARLY_ENDS, describe_info
from app.settings import THINK, Settings
from app.shown import ChatEntry, Mark, ShownMessage
from app.thinking import find_opening, split_thinking
from app.turns import Turn, read_stats
from engine.commands import CancelTurn, Command, ForgetChat, Message, SubmitTurn
from engine.events import (
    EngineEvent,
    ErrorInfo,
    FinishReason,
    PrefillProgress,
    TextDelta,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from storage.errors import StorageError

if TYPE_CHECKING:
    from storage.answers import AnswerWriter
    from storage.chat_search import SearchHit
    from storage.chats import ChatStore, StoredMessage


class Conversations:
    """Every chat of the store, with the answers that run in them."""

    def __init__(
        self,
        store: ChatStore,
        submit: Callable[[Command], None],
        settings: Callable[[], Settings],
    ) -> None:
        self.store = store
        self._submit = submit
        self._settings = settings
        self._turns: dict[str, Turn] = {}
        self._unread: set[str] = set()
        self.model = ""
        """Name of the loaded model; empty holds turns back until there is one."""
        self.context_len = 0
        """Tokens its context holds; 0 before one is loaded."""
        self.recommended: Mapping[str, float] = {}
        """What its publisher recommends for the sampler."""

    # -- what is there ---------------------------------------------------------

    def turn_of(self, chat_id: str | None) -> Turn | None:
        """The answer that runs in a chat, or None."""
        return next((t for t in self._turns.values() if t.chat_id == chat_id), None)

    @property
    def running(self) -> list[Turn]:
        """Every answer on its way."""
        return list(self._turns.values())

    def entries(self, open_chat_id: str | None) -> list[ChatEntry]:
        """The list of chats with their marks, newest change first."""
        answering = {turn.chat_id for turn in self.running}
        return [
            ChatEntry(chat.id, chat.title, self._mark(chat.id, answering), chat.id == open_chat_id)
            for chat in self.store.list_chats()
        ]

    def _mark(self, chat_id: str, answering: set[str]) -> Mark:
        if chat_id in answering:
            return "answering"
        return "unread" if chat_id in self._unread else ""

    def shown(self, chat_id: str) -> list[ShownMessage]:
        """The messages of a chat as they are now, a running answer included. Raises: ChatGone."""
        self._unread.discard(chat_id)
        versions = self._versions(chat_id)
        turn = self.turn_of(chat_id)
        return [
            turn.shown(versions[message.id])
            if turn is not None and message.id == turn.message_id
            else self._shown(message, versions[message.id])
            for message in self.store.messages(chat_id)
            if message.role != "system"
        ]

    def shown_message(self, message_id: int) -> ShownMessage | None:
        """One message as it is stored, or None when it was dropped."""
        siblings = self.store.attempts(message_id)
        for number, message in enumerate(siblings, 1):
            if message.id == message_id:
                return self._shown(message, (number, len(siblings)))
        return None

    def _versions(self, chat_id: str) -> dict[int, tuple[int, int]]:
        """message id -> (its number among its siblings, how many there are)."""
        families: dict[tuple[int | None, str], list[int]] = {}
        for message in self.store.all_messages(chat_id):
            families.setdefault((message.parent_id, message.role), []).append(message.id)
        return {
            message_id: (number, len(family))
            for family in families.values()
            for number, message_id in enumerate(family, 1)
        }

    def unfinished_chat(self) -> str | None:
        """The newest chat, when a draft or an answer that broke off waits in it."""
        latest = self.store.latest()
        if latest is None:
            return None
        path = self.store.messages(latest.id)
        is_broken_off = bool(path) and path[-1].state == "interrupted"
        return latest.id if latest.draft or is_broken_off else None

    def questions(self, chat_id: str) -> list[str]:
        """What was asked on the shown path, oldest first. Raises: ChatGone."""
        return [m.content for m in self.store.messages(chat_id) if m.role == "user"]

    def answered_by(self, chat_id: str) -> str:
        """Name of the model that answered last on the shown path, or empty. Raises: ChatGone."""
        models = [m.model for m in self.store.messages(chat_id) if m.model]
        return models[-1].rpartition(" + ")[2] if models else ""

    # -- what a person does ------------------------------------------------------

    def create(self) -> str:
        """A new chat with the settings' system prompt; its id."""
        settings = self._settings()
        return self.store.create(model=self.model, system_prompt=settings.system_prompt).id

    def ask(self, chat_id: str, text: str) -> Turn:
        """Add a question and start its answer. Raises: ChatGone, StorageError.

        State: a question that is the newest message already, because its answer could not be
               begun, is not added again.
        """
        newest = self.store.messages(chat_id)[-1:]
        if newest and (newest[0].role, newest[0].content) == ("user", text):
            return self._answer(newest[0])
        return self._answer(self.store.add_message(chat_id, "user", text))

    def edit(self, message_id: int, text: str) -> Turn:
        """Ask a question in another form beside the old one and start its answer."""
        return self._answer(self.store.edit_message(message_id, text))

    def regenerate(self, message_id: int) -> Turn:
        """Answer again: a new attempt beside the old ones. Takes an answer or its question."""
        message = self.store.message(message_id)
        if message.role == "assistant" and message.parent_id is not None:
            message = self.store.message(message.parent_id)
        return self._answer(message)

    def go_on(self, shown: ShownMessage) -> Turn:
        """Let an answer that ended early go on from its last character, as the same message.

        Raises: ChatGone; StorageError when another window changed it or writes it.
        """
        message = self.store.message(shown.message_id)
        assert message.parent_id is not None, "an answer follows its question"
        question = self.store.message(message.parent_id)
        writer = self.store.resume_answer(
            message.id, model=self._model_name, content=shown.text, state=shown.state
        )
        return self._begin(question, writer, message)

    def leave(self, chat_id: str) -> None:
        """Another chat is opened: one that nobody wrote to is not kept."""
        chat = self.store.get(chat_id)
        is_touched = chat.num_messages or chat.draft.strip() or chat.title
        if not is_touched and chat.system_prompt == self._settings().system_prompt:
            self.delete(chat_id)

    def show_branch(self, hit: SearchHit) -> None:
        """Show the branch a hit is in. A running answer's branch stays. Raises: ChatGone."""
        shown = {message.id for message in self.store.messages(hit.chat_id)}
        wanted = hit.message_id
        if wanted is not None and wanted not in shown and not self.turn_of(hit.chat_id):
            self.store.select(wanted)

    def select_version(self, message_id: int, step: int) -> bool:
        """Show the version before or after a message; False when there is none."""
        ids = [message.id for message in self.store.attempts(message_id)]
        at = ids.index(message_id) + step
        if not 0 <= at < len(ids):
            return False
        self.store.select(ids[at])
        return True

    def stop(self, chat_id: str) -> Turn | None:
        """Stop a chat's answer. One that was not given to the engine yet ends here and now."""
        turn = self.turn_of(chat_id)
        if turn is None:
            return None
        if turn.is_submitted:
            self._submit(CancelTurn(turn.request_id))
            return None
        return self._end(turn, "stopped")

    def delete(self, chat_id: str) -> None:
        """Delete a chat with its running answer. Raises: ChatGone."""
        if turn := self.turn_of(chat_id):
            del self._turns[turn.request_id]
            if turn.is_submitted:
                self._submit(CancelTurn(turn.request_id))
        self._unread.discard(chat_id)
        self.store.delete(chat_id)
        self._submit(ForgetChat(chat_id))

    def mark_unread(self, chat_id: str) -> None:
        """An answer ended in a chat that is not on the screen."""
        self._unread.add(chat_id)

    def keep_partials(self) -> None:
        """Store every running answer as stopped, for the end of the program."""
        for turn in self.running:
            self._end(turn, "stopped")

    # -- what the engine does ----------------------------------------------------

    def use_model(self, name: str, context_len: int) -> None:
        """A model is loaded: give it the turns that waited."""
        self.model, self.context_len = name, context_len
        for turn in self.running:
            if not turn.is_submitted:
                turn.is_submitted = True
                turn.writer.model = name  # it was a guess until now
                self._submit(turn.command)

    def fail_waiting(self, error: ErrorInfo) -> list[Turn]:
        """No model could be loaded: the turns that waited end with the reason."""
        self.model = ""
        waiting = [turn for turn in self.running if not turn.is_submitted]
        for turn in waiting:
            turn.error = error
            self._end(turn, "failed")
        return waiting

    def fail_all(self, error: ErrorInfo) -> list[Turn]:
        """The engine is gone: every turn ends with the reason, its text kept."""
        self.model = ""
        turns = self.running
        for turn in turns:
            turn.error = error
            self._end(turn, "failed")
        return turns

    def apply(self, event: EngineEvent) -> Turn | None:
        """Take over an event of a turn; the turn, or None when it is not ours any more."""
        turn = self._turns.get(getattr(event, "request_id", ""))
        if turn is None:
            return None
        match event:
            case TurnStarted():
                turn.phase = "reading"
                turn.dropped_messages = event.dropped_messages
                turn.start = turn.start or find_opening(event.prompt_tail)
                turn.fraction = event.reused_tokens / max(1, event.prompt_tokens)
            case PrefillProgress():
                turn.fraction = event.num_done / max(1, event.num_total)
            case TextDelta():
                turn.phase = "answering"
                fresh = event.text if turn.text else turn.start + event.text
                turn.text += fresh
                turn.stats, turn.context_used = event.stats, event.context_used
                turn.writer.append(fresh)
            case TurnFinished():
                turn.take_whole(event.text)
                turn.stats, turn.context_used = event.stats, event.context_used
                self._end(
                    turn,
                    "stopped" if event.finish_reason == "cancelled" else "complete",
                    event.finish_reason,
                )
            case TurnFailed():
                turn.take_whole(event.text)
                turn.error = event.error
                self._end(turn, "failed")
        return turn

    # -- parts ---------------------------------------------------------------------

    def _shown(self, message: StoredMessage, version: tuple[int, int]) -> ShownMessage:
        assert message.role != "system", "system messages are not shown"
        return ShownMessage(
            message_id=message.id,
            role=message.role,
            text=message.content,
            state="streaming" if message.state == "partial" else message.state,
            note=str(message.stats.get("note", "")),
            model=message.model,
            stats=read_stats(message.stats) if message.stats else None,
            version=version[0],
            num_versions=version[1],
            context_used=message.stats.get("context_used") or None,
            can_go_on=_ended_early(message) and not self._fills_context(message),
        )

    def _fills_context(self, answer: StoredMessage) -> bool:
        """Whether an answer has filled the context with its question alone.

        What is older than the question can be left out to make room; these two cannot.
        """
        used = int(answer.stats.get("context_used", 0)) + 1  # the last token is in no cache
        if answer.parent_id is None or not 0 < self.context_len <= used:
            return False
        history = self._history(self.store.message(answer.parent_id))
        num_older = sum(message.role != "system" for message in history) - 1
        return num_older <= int(answer.stats.get("dropped_messages", 0))

    def _answer(self, question: StoredMessage) -> Turn:
        writer = self.store.begin_answer(
            question.chat_id, model=self._model_name, parent_id=question.id
        )
        return self._begin(question, writer)

    @property
    def _model_name(self) -> str:
        """Before a load is through, the model that was asked for is the one that will answer."""
        return self.model or Path(self._settings().model).name.removesuffix(".gguf")

    def _begin(
        self,
        question: StoredMessage,
        writer: AnswerWriter,
        resumed: StoredMessage | None = None,
    ) -> Turn:
        settings = self._settings()
        start = resumed.content if resumed else ""
        split = split_thinking(start)
        has_thought = bool(split.thinking) or split.is_thinking
        command = SubmitTurn(
            request_id=uuid.uuid4().hex,
            chat_id=question.chat_id,
            prompt=self._history(question),
            sampling=settings.sampling.over(self.recommended),
            attempt=writer.attempt,
            stop_on_repetition=True,
            think=True if has_thought else THINK[settings.think],
            answer_start=start,
        )
        turn = Turn(
            command,
            writer,
            question.id,
            question.content,
            start=start,
            resumed=resumed,
            text=start,
        )
        self._turns[turn.request_id] = turn
        if self.model:
            turn.is_submitted = True
            self._submit(command)
        return turn

    def _history(self, question: StoredMessage) -> tuple[Message, ...]:
        """The path from the first message to the question, as the template gets it."""
        by_id = {m.id: m for m in self.store.all_messages(question.chat_id)}
        path = [question]
        while (parent_id := path[-1].parent_id) is not None:
            path.append(by_id[parent_id])
        system = self.store.get(question.chat_id).system_prompt
        head = (Message("system", system),) if system else ()
        # An answer without a character (stopped or failed at once) is not part of the talk.
        return head + tuple(Message(m.role, m.content) for m in reversed(path) if m.content)

    def _end(
        self,
        turn: Turn,
        state: Literal["complete", "stopped", "failed"],
        reason: FinishReason | None = None,
    ) -> Turn:
        turn.phase = "ended"
        self._turns.pop(turn.request_id, None)
        end = describe_info(turn.error).line if turn.error else ""
        if reason is not None:
            end = EARLY_ENDS.get(reason, "")
        note = " · ".join(part for part in (turn.note, end) if part)
        stats = turn.all_stats | {"note": note, "finish_reason": reason}
        try:
            if turn.resumed is not None and turn.is_fruitless and state != "complete":
                turn.writer.model = ""  # it is what it was, with the reason if there is one
                before = dict(turn.resumed.stats)
                turn.writer.finish(
                    turn.resumed.state, stats=before | ({"note": end} if end else {})
                )
            else:
                turn.writer.finish(state, stats=stats, text=turn.text)
        except StorageError as error:
            turn.problem = error  # this turn is over all the same, and others may end with it
        return turn


def _ended_early(message: StoredMessage) -> bool:
    is_cut = message.stats.get("finish_reason") in ("context", "length")
    is_early = message.state in ("stopped", "interrupted", "failed") or (
        message.state == "complete" and is_cut
    )
    return message.role == "assistant" and bool(message.content) and is_early
