"""Where a model's thinking ends and its answer begins, found in plain answer text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARKS = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"))
"""Opening and closing marks; the second pair is Gemma 4's, whose answers may open with an empty
thought."""
_LONE_CLOSING = re.compile(r"^[ \t]*</think>[ \t]*$", re.MULTILINE)
"""A closing tag on a line of its own: some templates put the opening tag into the prompt, so the
answer has none. A tag quoted inside a sentence or in backticks is text."""


def find_opening(prompt_tail: str) -> str:
    """What a template has opened a thought with at the end of the prompt, or empty.

    Put before the answer's text, it makes the text whole: the thought has both its marks.
    """
    return prompt_tail if prompt_tail.strip() in (opening for opening, _ in _MARKS) else ""


@dataclass(frozen=True, slots=True)
class SplitAnswer:
    """An answer in its two parts."""

    thinking: str
    answer: str
    is_thinking: bool
    """Whether the thinking has not ended yet."""


def split_thinking(text: str) -> SplitAnswer:
    """Split an answer, or the part of one that has arrived so far."""
    start = text.lstrip()
    for opening, closing in _MARKS:
        if start.startswith(opening):
            thinking, found, answer = start[len(opening) :].partition(closing)
            return SplitAnswer(thinking.strip("\n"), answer.lstrip("\n"), not found)
        if start and opening.startswith(start):
            return SplitAnswer("", "", True)
    if lone := _LONE_CLOSING.search(text):
        answer = text[lone.end() :].lstrip("\n")
        return SplitAnswer(text[: lone.start()].strip("\n"), answer, False)
    return SplitAnswer("", text, False)
