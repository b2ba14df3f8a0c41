"""Finds token texts inside a text, and keeps a text from being taken for one. Knows no ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


class SpecialTexts:
    """A set of token texts that are matched on raw text, leftmost first, longest first."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if text)
        # By the first two characters: Gemma has 6 249 control tokens that all start with "<", and
        # an alternation over them costs 100 us at every "<" of a pasted page.
        self._lengths: dict[str, list[int]] = {}
        for text in self._texts:
            self._lengths.setdefault(text[:2], []).append(len(text))
        for start, lengths in self._lengths.items():
            self._lengths[start] = sorted(set(lengths), reverse=True)
        starts = sorted(self._lengths, key=len, reverse=True)
        self._starts = re.compile("|".join(map(re.escape, starts))) if starts else None
        self._first_chars = frozenset(text[0] for text in self._texts)
        self._max_len = max(map(len, self._texts), default=0)

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Cut a text into (part, is_special), in order, joined parts giving the text again."""
        done = 0
        for start, end in self._find(text):
            if start > done:
                yield text[done:start], False
            yield text[start:end], True
            done = end
        if done < len(text):
            yield text[done:], False

    def _find(self, text: str) -> Iterator[tuple[int, int]]:
        pos = 0
        while self._starts is not None and (match := self._starts.search(text, pos)):
            end = self._longest_at(text, match.start())
            if end:
                yield match.start(), end
            pos = end or match.start() + 1

    def _longest_at(self, text: str, start: int) -> int:
        """End of the longest special text at `start`; 0 where there is none."""
        for key in (text[start : start + 2], text[start : start + 1]):
            for length in self._lengths.get(key, ()):
                if text[start : start + length] in self._texts:
                    return start + length
        return 0

    def shield(self, text: str, mark: str) -> str:
        """Insert `mark` so that no special text starts in `text`, nor runs over its end.

        The mark goes behind the first character of each occurrence, so what a template does to
        either end of a content (trim, prefix tests) is not disturbed. Taking the marks out gives
        the text back.
        """
        breaks = [start for start in self._starts_in(text) if self._longest_at(text, start)]
        breaks += self._unfinished(text)
        pieces, done = [], 0
        for start in sorted(set(breaks)):
            pieces += [text[done : start + 1], mark]
            done = start + 1
        return "".join(pieces) + text[done:]

    def _starts_in(self, text: str) -> Iterator[int]:
        pos = 0
        while self._starts is not None and (match := self._starts.search(text, pos)):
            yield match.start()
            pos = match.start() + 1

    def _unfinished(self, text: str) -> list[int]:
        """Where an end of the text (white space aside, templates trim it) begins a special text."""
        ends = {text, text.rstrip()}
        return [
            start
            for end in ends
            for start in range(max(0, len(end) - self._max_len), len(end))
            if end[start] in self._first_chars
            and any(special.startswith(end[start:]) for special in self._texts)
        ]
