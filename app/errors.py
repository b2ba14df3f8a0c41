"""The one place where an exception, or an early end of an answer, becomes text for a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.events import ErrorInfo, FinishReason

EARLY_ENDS: Mapping[FinishReason, str] = {
    "length": "cut at the token limit",
    "context": "the context is full",
    "repetition": "stopped: it repeated itself",
}
"""Why an answer ended before the model ended it."""


class Refused(Exception):
    """What a person asked for cannot be done; the message is the one line that says why."""


@dataclass(frozen=True, slots=True)
class Described:
    """An error in three parts; all of them are plain text, never markup."""

    title: str
    message: str
    hint: str = ""

    @property
    def line(self) -> str:
        """Message and hint in one line."""
        return f"{self.message}: {self.hint}" if self.hint else self.message


def describe(error: BaseException) -> Described:
    """What happened and what to do, for any exception a screen catches."""
    hint = str(getattr(error, "hint", ""))
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return Described("File error", f"{where}{error.strerror}", hint)
    return Described(_title(error), str(error) or type(error).__name__, hint)


def describe_info(error: ErrorInfo) -> Described:
    """The same for an error the engine reported."""
    titles = {
        "failure": "The engine failed",
        "missing": "File not found",
        "bad_model": "The model file cannot be used",
        "does_not_fit": "It does not fit",
    }
    return Described(titles[error.kind], error.message, error.hint)


def _title(error: BaseException) -> str:
    """`NotEnoughSpace` -> "Not enough space"."""
    name = type(error).__name__.removesuffix("Error") or "Error"
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()
    return words.capitalize()
