"""The two lines at the foot of the chat: which keys help now, and how the turn stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.cells import cell_len

from app.turns import Turn
from app.widgets.status_bar import Status

RUNNING_HINTS = ("Esc stop", "F1 keys", "Ctrl+T speculation", "Ctrl+N new chat", "F2 settings")
IDLE_HINTS = (
    "Enter send",
    "F1 keys",
    "Ctrl+J new line",
    "Ctrl+R answer anew",
    "Ctrl+N new chat",
    "F2 settings",
    "F3 models",
    "F4 bench",
    "/help",
)
"""The most useful first: what does not fit is left out."""
CONTINUE_HINT = "/continue goes on with the answer"

BYTES_PER_TOKEN = 3
"""A cautious guess for any text (English has about 4, code 3): only the engine knows, and asking it
at each key would cost the running answer."""


def warn_too_long(text: str, context_len: int) -> str:
    """A line for a message that hardly fits the context (tokens; 0 before a model); else empty."""
    num_tokens = len(text.encode(errors="replace")) // BYTES_PER_TOKEN
    if not context_len or num_tokens < context_len:
        return ""
    return f"Too long? About {num_tokens:,} tokens, and the context holds {context_len:,}"


def describe_other_model(other: str, loaded: str) -> tuple[str, ...]:
    """For a chat that another model answered until now."""
    return (f"Answered by {other}; {loaded} is loaded", f"/model {other} changes that")


def fit_hints(hints: Sequence[str], width: int) -> str:
    """As many hints, from the first, as `width` cells hold."""
    line = ""
    for hint in hints:
        longer = f"{line} · {hint}" if line else hint
        if cell_len(longer) > width:
            break
        line = longer
    return line


def with_turn(status: Status, turn: Turn) -> Status:
    """The status with a turn's numbers in it."""
    fraction = status.fraction
    phase = status.phase
    if phase == "ready" and turn.phase != "ended":
        phase, fraction = turn.phase, turn.fraction if turn.phase == "reading" else None
    return replace(
        status,
        phase=phase,
        fraction=fraction,
        stats=turn.stats,
    )
