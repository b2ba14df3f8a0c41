"""Where commands print, and the exit codes they leave with.

Answers go to stdout, everything else to stderr. No escape byte is ever written to either.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from engine.events import ErrorInfo, ErrorKind

OK = 0
FAILURE = 1
USAGE = 2
MISSING = 3
BAD_MODEL = 4
DOES_NOT_FIT = 5
OFFLINE = 6
INTERRUPTED = 130

EXIT_CODES: dict[ErrorKind, int] = {
    "failure": FAILURE,
    "missing": MISSING,
    "bad_model": BAD_MODEL,
    "does_not_fit": DOES_NOT_FIT,
}


class CommandFailed(Exception):
    """A command ends with one line on stderr and an exit code."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = FAILURE) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code


def failed(error: ErrorInfo) -> CommandFailed:
    """The exception for an error the engine reported."""
    return CommandFailed(error.message, hint=error.hint, exit_code=EXIT_CODES[error.kind])


def prepare_streams() -> None:
    """Make stdout and stderr take any text, whatever the console's code page."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
            is_unicode = encoding.replace("-", "").startswith("utf")
            reconfigure(errors="surrogateescape" if is_unicode else "replace")


def say(text: str = "", *, end: str = "\n") -> None:
    """Print to stdout: the answer."""
    print(text, end=end, flush=True)


def note(text: str, *, end: str = "\n") -> None:
    """Print to stderr: everything else."""
    print(text, end=end, file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=2), flush=True)


def size_text(num_bytes: float) -> str:
    """Bytes as a person reads them: 98.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{num_bytes:.1f} {unit}"
