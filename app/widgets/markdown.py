"""Markdown as answers need it: HTML is text, code can be copied with a click."""

from __future__ import annotations

from markdown_it import MarkdownIt
from textual import events
from textual.app import ComposeResult
from textual.message import Message
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownBlock, MarkdownFence


def make_parser() -> MarkdownIt:
    """A parser that shows tags: with HTML on, Textual drops `List<int>` and `<think>` blocks."""
    return MarkdownIt("gfm-like", {"html": False})


class CopyCode(Static):
    """The button in the corner of a code block."""

    class Pressed(Message):
        """The block's code is wanted on the clipboard."""

        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    def on_click(self, event: events.Click) -> None:
        """Post the code of the block this button stands in."""
        event.stop()
        if isinstance(self.parent, CodeFence):
            self.post_message(self.Pressed(self.parent.code))


class CodeFence(MarkdownFence):
    """A code block with its copy button."""

    def compose(self) -> ComposeResult:
        """The code, and the button over its right end."""
        yield CopyCode("copy", markup=False, classes="copy-code")
        yield from super().compose()


class AnswerMarkdown(Markdown):
    """A Markdown widget for one answer."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text, parser_factory=make_parser)

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        """Code blocks are ours; the rest is Textual's."""
        if block_name in ("fence", "code_block"):
            return CodeFence
        return super().get_block_class(block_name)
