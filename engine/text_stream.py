"""Turns an answer's bytes into whole characters and hands them on a few times a second.

A character may be split over tokens, and a screen need not follow every token. Knows nothing of
tokens, stops or events.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

from engine.contracts import Clock

MIN_INTERVAL_S = 0.05
"""At most 20 deltas per second: one per token cost the engine a tenth of its rate (UI and engine
share the interpreter lock)."""


class TextStream:
    """Collects the text of one answer; `emit` gets it in pieces that join to `text`."""

    def __init__(self, emit: Callable[[str], None], clock: Clock) -> None:
        self._emit = emit
        self._clock = clock
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending: list[str] = []
        self._emitted: list[str] = []
        self._due_at = float("-inf")

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return "".join(self._emitted)

    def push(self, data: bytes) -> None:
        """Take bytes; bytes that can never be valid become U+FFFD at once."""
        if text := self._decoder.decode(data):
            self._pending.append(text)

    def poll(self) -> None:
        """Emit what is pending when the last delta is old enough."""
        if self._pending and self._clock() >= self._due_at:
            self._flush()

    def finish(self) -> str:
        """Emit the rest and return the whole text.

        Half a character at the end (cut by a limit or a cancel) is left out: it will never be
        whole, and a replacement mark would be stored as if the model had said it.
        """
        if self._pending:
            self._flush()
        return self.text

    def _flush(self) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        self._emitted.append(text)
        self._due_at = self._clock() + MIN_INTERVAL_S
        self._emit(text)
