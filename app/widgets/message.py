"""One message of the transcript; the live one owns the Markdown stream."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import Literal

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.timer import Timer
from textual.widgets import Static

from app.shown import ShownMessage
from app.thinking import SplitAnswer, split_thinking
from app.widgets.answer import AnswerView
from engine.events import TurnStats

Wanted = Literal["copy", "copy_code", "edit", "regenerate", "go_on", "previous", "next"]

PLAIN_TEXT_CHARS = 60_000
"""Longer answers are opened as plain text: Markdown makes a widget of every block, and a message
of 100,000 characters then holds the screen for seconds."""
REST_PER_DRAW = 3.0
"""Times a drawing's duration until the next one: the screen takes a quarter of one core at most."""

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.M | re.S)


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
        unit = "word" if num_words == 1 else "words"
        self.query_one(".thinking-fold", Static).update(f"{mark} {word} ({num_words:,} {unit})")
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
        Binding("g", "wish('go_on')", "Go on", id="message.go_on"),
        Binding("left", "wish('previous')", "Other version", id="message.previous"),
        Binding("right", "wish('next')", "Next version", id="message.next", show=False),
        Binding("t", "fold", "Thinking", id="message.thinking"),
    ]

    @dataclass
    class Wish(Message):
        """Something is to be done with a message."""

        view: MessageView
        what: Wanted

    def __init__(self, shown: ShownMessage) -> None:
        super().__init__(classes=shown.role)
        self.shown = shown
        self._split = SplitAnswer("", "", False)
        self._is_ready = False
        """Whether there are widgets to show something in."""
        self._draw_timer: Timer | None = None
        self._is_resting = False
        """Whether a drawing is under way to the screen."""
        self._drawn_text = ""

    def compose(self) -> ComposeResult:
        """Text, and a line about it."""
        if self.shown.role == "user":
            yield Static(self.shown.text, classes="message-text", markup=False)
        else:
            yield ThinkingView()
            yield AnswerView()
            yield Static("", classes="message-text", markup=False)
        yield Static("", classes="message-meta", markup=False)

    async def on_mount(self) -> None:
        """Fill in what is known by now."""
        self._is_ready = True
        self._show_meta()
        if self.shown.role == "assistant":
            await self._render_whole()

    async def stream(self, text: str, stats: TurnStats) -> None:
        """Show the answer so far, at once or a little later when drawing takes long."""
        was_streaming = self.shown.state == "streaming"
        self.shown = replace(self.shown, text=text, state="streaming", stats=stats)
        if self._is_ready and not was_streaming:
            self._show_meta()
        if self._draw_timer is None and not self._is_resting:
            await self.draw()

    async def draw(self) -> None:
        """Draw what has come. State: the next drawing waits for as long as this one took, times
        `REST_PER_DRAW`, so that keys are answered and the engine gets the interpreter.
        """
        self._draw_timer = None
        is_new = self.shown.state == "streaming" and self.shown.text != self._drawn_text
        if not is_new or not self._is_ready:
            return
        self._is_resting = True
        started_at = time.monotonic()
        self._drawn_text = self.shown.text
        split = split_thinking(self._drawn_text)
        if (split.thinking, split.is_thinking) != (self._split.thinking, self._split.is_thinking):
            self.query_one(ThinkingView).show(split)
        self._split = split
        await self.query_one(AnswerView).stream(split.answer)
        self.call_after_refresh(self._rest, started_at)

    def _rest(self, started_at: float) -> None:
        """The drawing is on the screen: wait before the next one."""
        self._is_resting = False
        if self._draw_timer is None:
            rest_s = (time.monotonic() - started_at) * REST_PER_DRAW
            self._draw_timer = self.set_timer(rest_s, self.draw)

    async def finish(self, shown: ShownMessage) -> None:
        """Show the whole answer once more: pieces can differ from the whole (link references,
        fences in lists), one update at the end makes them equal.
        """
        self.shown = shown
        if self._is_ready:
            self._show_meta()
            await self._render_whole()

    def set_note(self, note: str) -> None:
        """Change what the line below says; the text stays."""
        if note == self.shown.note:
            return
        self.shown = replace(self.shown, note=note)
        if self._is_ready:
            self._show_meta()

    def action_wish(self, what: Wanted) -> None:
        """Ask the screen to do something with this message."""
        self.post_message(self.Wish(self, what))

    def action_fold(self) -> None:
        """Fold or unfold the thinking."""
        for view in self.query(ThinkingView):
            view.toggle()

    async def _render_whole(self) -> None:
        self._drawn_text = self.shown.text
        self._split = split_thinking(self._drawn_text)
        self.query_one(ThinkingView).show(self._split)
        answer = self.query_one(AnswerView)
        # What streamed as Markdown stays so; only opening such a text anew would take seconds.
        is_plain = len(self._split.answer) > PLAIN_TEXT_CHARS and not answer.children
        plain = self.query_one(".message-text", Static)
        answer.display, plain.display = not is_plain, is_plain
        plain.update(self._split.answer if is_plain else "")
        if not is_plain:
            await answer.show(self._split.answer)

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
        parts.append(f"drafts {stats.draft_n_accepted:,}/{stats.draft_n:,}")
    return parts
