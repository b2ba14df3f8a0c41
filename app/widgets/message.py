"""One message of the transcript; the live one owns the Markdown stream."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static
from textual.widgets.markdown import MarkdownStream

from app.thinking import SplitAnswer, split_thinking
from app.widgets.markdown import AnswerMarkdown
from engine.events import TurnStats

MessageState = Literal["waiting", "streaming", "complete", "stopped", "interrupted", "failed"]

PLAIN_TEXT_CHARS = 60_000
"""Longer answers are shown as plain text once they are whole: Markdown makes a widget of every
block, and a message of 100,000 characters then holds the screen for seconds."""

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.M | re.S)


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """What the transcript shows of a message."""

    message_id: int
    role: Literal["user", "assistant"]
    text: str
    state: MessageState = "complete"
    note: str = ""
    """Why it ended, when that is worth a word: context full, an error."""
    model: str = ""
    stats: TurnStats | None = None
    version: int = 1
    """Which of `num_versions` answers (or edits) this is, from 1."""
    num_versions: int = 1


def find_code_blocks(text: str) -> list[str]:
    """The contents of every fenced code block, in order."""
    return [match.group(2).rstrip("\n") for match in _FENCE.finditer(text)]


class ThinkingView(Vertical):
    """Thinking, folded to one line; a click or `t` unfolds it."""

    def __init__(self) -> None:
        super().__init__()
        self._split = SplitAnswer("", "", False)
        self.is_open = False

    def compose(self) -> ComposeResult:
        """The fold line and the text."""
        yield Static("", classes="thinking-fold", markup=False)
        yield Static("", classes="thinking-text", markup=False)

    def show(self, split: SplitAnswer) -> None:
        """Show the thinking so far; the view hides itself when there is none."""
        self._split = split
        self.display = bool(split.thinking) or split.is_thinking
        num_words = len(split.thinking.split())
        mark = "▾" if self.is_open else "▸"
        word = "Thinking…" if split.is_thinking else "Thought"
        self.query_one(".thinking-fold", Static).update(f"{mark} {word} ({num_words:,} words)")
        text = self.query_one(".thinking-text", Static)
        text.display = self.is_open
        if self.is_open:
            text.update(split.thinking)

    def toggle(self) -> None:
        """Fold or unfold."""
        self.is_open = not self.is_open
        self.show(self._split)

    def on_click(self, event: events.Click) -> None:
        """Fold or unfold."""
        event.stop()
        self.toggle()


class MessageView(Vertical, can_focus=True):
    """A user prompt or an answer. Texts are literal: no markup is ever read from them."""

    BINDINGS = [
        Binding("c", "wish('copy')", "Copy", id="message.copy"),
        Binding("y", "wish('copy_code')", "Copy code", id="message.copy_code"),
        Binding("e", "wish('edit')", "Edit", id="message.edit"),
        Binding("r", "wish('regenerate')", "Answer anew", id="message.regenerate"),
        Binding("left", "wish('previous')", "Other version", id="message.previous"),
        Binding("right", "wish('next')", "Next version", id="message.next", show=False),
        Binding("t", "fold", "Thinking", id="message.thinking"),
    ]

    @dataclass
    class Wish(Message):
        """Something is to be done with a message."""

        view: MessageView
        what: Literal["copy", "copy_code", "edit", "regenerate", "previous", "next"]

    def __init__(self, shown: ShownMessage) -> None:
        super().__init__(classes=shown.role)
        self.shown = shown
        self._split = split_thinking(shown.text)
        self._stream: MarkdownStream | None = None

    def compose(self) -> ComposeResult:
        """Text, and a line about it."""
        if self.shown.role == "user":
            yield Static(self.shown.text, classes="message-text", markup=False)
        else:
            yield ThinkingView()
            yield AnswerMarkdown()
            yield Static("", classes="message-text", markup=False)
        yield Static("", classes="message-meta", markup=False)

    async def on_mount(self) -> None:
        """Fill in what is known."""
        self._show_meta()
        if self.shown.role == "assistant":
            await self._render_whole()

    async def append(self, text: str, stats: TurnStats) -> None:
        """Add streamed text; the cost does not grow with what is already there."""
        shown_before = self._split.answer
        self.shown = replace(
            self.shown, text=self.shown.text + text, state="streaming", stats=stats
        )
        self._split = split_thinking(self.shown.text)
        self.query_one(ThinkingView).show(self._split)
        if not self._split.answer.startswith(shown_before):
            await self._end_stream()
            await self.query_one(AnswerMarkdown).update(self._split.answer)
        elif fresh := self._split.answer[len(shown_before) :]:
            if self._stream is None:
                self._stream = AnswerMarkdown.get_stream(self.query_one(AnswerMarkdown))
            await self._stream.write(fresh)
        self._show_meta()

    async def finish(self, shown: ShownMessage) -> None:
        """Show the whole answer once more: pieces can differ from the whole (link references,
        fences in lists), one update at the end makes them equal.
        """
        self.shown = shown
        self._split = split_thinking(shown.text)
        await self._end_stream()
        self._show_meta()
        await self._render_whole()

    def set_shown(self, shown: ShownMessage) -> None:
        """Change what the line below says; the text stays."""
        self.shown = replace(shown, text=self.shown.text)
        self._show_meta()

    def action_wish(self, what: Literal["copy", "copy_code", "edit", "regenerate"]) -> None:
        """Ask the screen to do something with this message."""
        self.post_message(self.Wish(self, what))

    def action_fold(self) -> None:
        """Fold or unfold the thinking."""
        for view in self.query(ThinkingView):
            view.toggle()

    async def _end_stream(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.stop()

    async def _render_whole(self) -> None:
        self.query_one(ThinkingView).show(self._split)
        is_plain = len(self._split.answer) > PLAIN_TEXT_CHARS
        markdown = self.query_one(AnswerMarkdown)
        plain = self.query_one(".message-text", Static)
        markdown.display, plain.display = not is_plain, is_plain
        plain.update(self._split.answer if is_plain else "")
        await markdown.update("" if is_plain else self._split.answer)

    def _show_meta(self) -> None:
        line = describe_message(self.shown)
        meta = self.query_one(".message-meta", Static)
        meta.update(line)
        meta.display = bool(line.plain)
        self.set_class(self.shown.state == "failed", "failed")


def describe_message(shown: ShownMessage) -> Content:
    """The line below a message: how it ended, its counts, its model, its versions."""
    parts: list[str] = []
    if shown.state not in ("complete", "streaming"):
        parts.append(shown.state)
    if shown.note:
        parts.append(shown.note)
    if shown.stats is not None and shown.role == "assistant" and shown.state != "streaming":
        parts.extend(_describe_stats(shown.stats))
    if shown.model and shown.state != "streaming":
        parts.append(shown.model)
    if shown.num_versions > 1:
        parts.append(f"← {shown.version}/{shown.num_versions} →")
    return Content(" · ".join(parts))


def _describe_stats(stats: TurnStats) -> list[str]:
    parts = [f"{stats.completion_tokens:,} tokens"] if stats.completion_tokens else []
    if stats.decode_tok_s:
        parts.append(f"{stats.decode_tok_s:.1f} tok/s")
    if stats.draft_n:
        parts.append(f"accepted {stats.draft_n_accepted:,} of {stats.draft_n:,} drafts")
    return parts
