"""One line about the model and the answer: what runs, how fast, and what drafting does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len, set_cell_size
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from engine.events import TurnStats

Phase = Literal[
    "no model",
    "downloading",
    "starting",
    "loading",
    "ready",
    "waiting",
    "reading",
    "answering",
    "failed",
]
_GAP = "  "
NEARLY_FULL = 0.9
"""Share of the context from which its count is coloured: soon the oldest messages are left out."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the line shows."""

    model: str = ""
    phase: Phase = "no model"
    fraction: float | None = None
    """How far a load or a prefill is, 0 to 1."""
    stats: TurnStats | None = None
    """Counters of the shown chat's running or last answer."""
    context_used: int | None = 0
    """Tokens; None while that is not known, of a chat from another run."""
    context_len: int = 0
    """Tokens; 0 before a model is loaded."""
    is_spec_enabled: bool = True
    algorithm: str | None = None
    declined: str | None = None
    """Why nothing drafts, although speculation is on."""
    num_elsewhere: int = 0
    """Answers running in other chats."""


def format_tokens(count: int) -> str:
    """A token count in at most five cells: 812, 4.1k, 131k."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 10_000 else f"{count // 1000}k"


def describe_phase(status: Status) -> str:
    """The state in words, with per cent where a share is known."""
    if status.fraction is not None and status.phase in ("downloading", "loading", "reading"):
        return f"{status.phase} {status.fraction:.0%}"
    return status.phase


def describe_speculation(status: Status) -> str:
    """On or off, the governor's state, and what was accepted."""
    if not status.is_spec_enabled:
        return "spec off"
    if status.declined is not None and status.algorithm is None:
        return "spec on, nothing drafts"
    stats = status.stats
    if stats is None or stats.governor_state == "off":
        return "spec on"
    return f"spec {stats.governor_state}"


def _describe_drafts(status: Status) -> str:
    stats = status.stats
    if stats is None or not stats.draft_n:
        return ""
    return f"drafts {stats.draft_n_accepted}/{stats.draft_n} {stats.draft_n_accepted / stats.draft_n:.0%}"


def _describe_context(status: Status) -> str:
    if not status.context_len or status.context_used is None:
        return ""
    return f"{format_tokens(status.context_used)}/{format_tokens(status.context_len)}"


def _context_style(status: Status) -> str:
    is_nearly_full = (status.context_used or 0) > NEARLY_FULL * status.context_len > 0
    return "$text-warning" if is_nearly_full else ""


def _segments(status: Status) -> Sequence[tuple[int, str, str]]:
    """(priority, style, text) from left to right; the highest numbers are dropped first."""
    rate = f"{status.stats.decode_tok_s:.1f} tok/s" if status.stats else ""
    phase_style = "$text-error" if status.phase == "failed" else "$text-accent"
    return (
        (3, "bold", status.model),
        (0, phase_style, describe_phase(status)),
        (1, "$text-success", rate if status.stats and status.stats.decode_tok_s else ""),
        (2, _context_style(status), _describe_context(status)),
        (5, "", _describe_drafts(status)),
        (4, "$text-muted", describe_speculation(status)),
        (6, "$text-warning", f"+{status.num_elsewhere} elsewhere" if status.num_elsewhere else ""),
    )


def compose_status(status: Status, width: int) -> Content:
    """The line for a width in cells; what matters least goes first when it is narrow."""
    segments = [segment for segment in _segments(status) if segment[2]]
    while len(segments) > 1 and _line_len(segments) > width:
        segments.remove(max(segments))
    line: list[Content | tuple[str, str] | str] = []
    for _, style, text in segments:
        fitted = text if cell_len(text) <= width else set_cell_size(text, width)
        line.extend((_GAP if line else "", (fitted, style)))
    return Content.assemble(*line)


def _line_len(segments: Sequence[tuple[int, str, str]]) -> int:
    return sum(cell_len(text) for _, _, text in segments) + len(_GAP) * (len(segments) - 1)


class StatusBar(Widget):
    """Draws a `Status` for the width it has."""

    status: reactive[Status] = reactive(Status())

    def render(self) -> Content:
        """The line, fitted."""
        return compose_status(self.status, max(1, self.content_size.width))
