"""An answer as a column of Markdown pieces, so that a long one streams as fast as a short one.

Textual lays out every block of a Markdown widget when one of them changes: 100 paragraphs cost
72 ms a delta, and a code block of 400 lines seconds a minute. Here finished blocks move into pieces
that no longer change, and a block that is too long to be drawn 20 times a second shows its end only
until it is whole.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

from textual.containers import Vertical
from textual.widget import MountError

from app.widgets.markdown import AnswerMarkdown, make_parser

PIECE_CHARS = 2_000
"""A piece is closed at the first block boundary behind this many characters."""
WINDOW_CHARS = 6_000
"""Most of an unfinished block that is drawn while it streams; then only its end is."""
TAIL_CHARS = 3_000
"""How much of its end a block beyond the window shows."""

_DEFINITION = re.compile(r"^ {0,3}\[[^\]\n]+\]:[ \t]*\S.*$", re.MULTILINE)
"""A link reference definition: it counts in every piece, wherever it stands."""


def split_pieces(text: str) -> list[str]:
    """Cut Markdown at top-level block boundaries; the pieces joined are the text.

    Each piece but the last is at least `PIECE_CHARS` long. A list, a table, a quote or a code block
    is one block and stays whole.
    """
    if len(text) <= PIECE_CHARS:
        return [text]
    lines = text.split("\n")
    starts = sorted(
        {token.map[0] for token in make_parser().parse(text) if token.level == 0 and token.map}
    )
    pieces: list[str] = []
    begin = 0
    for start in starts:
        piece = "\n".join(lines[begin:start]) + "\n"
        if start > begin and len(piece) >= PIECE_CHARS:
            pieces.append(piece)
            begin = start
    return [*pieces, "\n".join(lines[begin:])]


def shorten_open_block(text: str) -> str:
    """The end of a long unfinished block, in its code fence when it is one."""
    if len(text) <= WINDOW_CHARS:
        return text
    tail = text[-TAIL_CHARS:]
    tail = tail[tail.find("\n") + 1 :]  # from a whole line on, where there is one
    first_line = text[: text.find("\n") + 1].lstrip()
    opening = first_line if first_line.startswith(("```", "~~~")) else ""
    return f"{opening}…\n{tail}"


class AnswerView(Vertical):
    """Shows one answer, streaming or whole."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = asyncio.Lock()
        """A timer's drawing and the end of the answer come from different tasks."""
        self._text = ""
        self._sources: list[str | None] = []
        """What each piece was last updated with; None for one that has grown since."""
        self._closed_len = 0
        """Characters of `_text` in closed pieces."""
        self._open_len = 0
        """Characters of the open piece that were drawn."""
        self._drawn_len = 0
        """Characters the open piece's widget holds."""
        self._checked_len = 0
        """Length of the open piece when it was last looked through for boundaries."""

    async def stream(self, text: str) -> None:
        """Show the answer so far. State: what only grows is appended to, the rest drawn anew."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        if not text.startswith(self._text):
            await self.show(text)
            return
        async with self._lock:
            with suppress(MountError):  # the view is being removed
                self._text = text
                await self._close_pieces()
                await self._grow(text[self._closed_len :])

    async def show(self, text: str) -> None:
        """Show a whole answer; pieces that are right already are left alone."""
        async with self._lock:
            with suppress(MountError):  # the view is being removed
                await self._show(text)

    async def _show(self, text: str) -> None:
        self._text = text = text.replace("\r\n", "\n").replace("\r", "\n")
        pieces = split_pieces(text)
        definitions = "\n".join(_DEFINITION.findall(text)) if len(pieces) > 1 else ""
        for at, piece in enumerate(pieces):
            await self._settle(at, f"{piece}\n\n{definitions}" if definitions else piece)
        for extra in list(self.children)[len(pieces) :]:
            await extra.remove()
        del self._sources[len(pieces) :]
        self._closed_len = len(text) - len(pieces[-1])
        self._open_len = self._drawn_len = self._checked_len = len(pieces[-1])

    async def _close_pieces(self) -> None:
        """Settle what has a block boundary behind it."""
        rest = self._text[self._closed_len :]
        # Looking through a growing block at each delta would be quadratic.
        if len(rest) < max(PIECE_CHARS, self._checked_len * 1.25):
            return
        self._checked_len = len(rest)
        *closed, _ = split_pieces(rest)
        for piece in closed:
            await self._settle(max(0, len(self._sources) - 1), piece)
            await self._add_piece("")
            self._closed_len += len(piece)
            self._open_len = self._drawn_len = self._checked_len = 0

    async def _grow(self, rest: str) -> None:
        fresh = rest[self._open_len :]
        if not fresh:
            return
        if not self._sources:
            await self._add_piece("")
        piece = self._piece(len(self._sources) - 1)
        if self._drawn_len + len(fresh) > WINDOW_CHARS:
            window = shorten_open_block(rest)
            await piece.update(window)
            self._drawn_len = len(window)
        else:
            await piece.append(fresh)
            self._drawn_len += len(fresh)
        self._open_len = len(rest)
        self._sources[-1] = None

    async def _settle(self, at: int, source: str) -> None:
        if at >= len(self._sources):
            await self._add_piece(source)
        elif self._sources[at] != source:
            await self._piece(at).update(source)
            self._sources[at] = source

    def _piece(self, at: int) -> AnswerMarkdown:
        """A mounted piece. Raises: MountError when it has been removed."""
        if at >= len(self.children):
            raise MountError("the view of the answer is being removed")
        piece = self.children[at]
        assert isinstance(piece, AnswerMarkdown), "pieces are all there is in the column"
        return piece

    async def _add_piece(self, source: str) -> None:
        await self.mount(AnswerMarkdown())  # Textual mounts nothing into what is being removed
        piece = self._piece(len(self._sources))
        self._sources.append(source)
        await piece.update(source)
