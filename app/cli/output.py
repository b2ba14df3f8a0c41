"""Where commands print, and the exit codes they leave with.

Answers go to stdout, everything else to stderr. This program writes no escape byte to either, and a
terminal gets none that stands in an answer, a title or a file name.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any, TextIO

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


_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in b"\t\n\r"}
"""A terminal would obey these: an answer could write the clipboard or retitle the window."""


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
    """Make every stream take any text, whatever the code page.

    Pipes and files are UTF-8: a code page would lose characters of an answer for good, and would
    read a prompt that is UTF-8 as something else.
    """
    for stream in (sys.stdout, sys.stderr):
        if is_terminal(stream):
            _reconfigure(stream, errors="replace")
        else:
            _reconfigure(stream, encoding="utf-8", errors="surrogateescape")
    if not is_terminal(sys.stdin):
        _reconfigure(sys.stdin, encoding="utf-8-sig", errors="replace")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sits there; a stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


def say(text: str = "", *, end: str = "\n") -> None:
    """Print to stdout: the answer."""
    print(_harmless(text, sys.stdout), end=end, flush=True)


def note(text: str, *, end: str = "\n") -> None:
    """Print to stderr: everything else. Where nobody can read it, the note is lost, nothing more."""
    if sys.stderr is not None:  # print(file=None) would go to stdout
        with contextlib.suppress(OSError):
            print(_harmless(text, sys.stderr), end=end, file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    """One JSON document on stdout."""
    say(json.dumps(value, ensure_ascii=False, indent=2))


def _harmless(text: str, stream: TextIO | None) -> str:
    """The text itself in a pipe or a file, without control characters on a terminal."""
    return text.translate(_CONTROLS) if is_terminal(stream) else text


def _reconfigure(stream: TextIO | None, **changes: str) -> None:
    if isinstance(stream, io.TextIOWrapper):  # a test or a host program may have put another there
        stream.reconfigure(**changes)  # type: ignore[arg-type]
