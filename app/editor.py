"""A text in the editor a person has set."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from textual.app import App, SuspendNotSupported

from app.errors import Refused


def edit_in_terminal(app: App[None], editor: str, text: str) -> str:
    """The text as it was left in the editor, which has the terminal meanwhile.

    Raises: Refused when there is no editor, or as `edit_text`.
    """
    if not editor:
        raise Refused("No editor is set: set VISUAL or EDITOR, for example EDITOR=nano")
    result: str | Refused
    try:
        with app.suspend():  # an exception in here would leave the terminal to the editor for ever
            try:
                result = edit_text(editor, text)
            except Refused as error:
                result = error
    except SuspendNotSupported:
        raise Refused("This terminal cannot be lent to an editor") from None
    if isinstance(result, Refused):
        raise result
    return result


def edit_text(editor: str, text: str) -> str:
    """The text as it was left in the editor; blocks until that ends.

    editor: a command line, as VISUAL and EDITOR have it.
    State:  what was written and cannot be taken is left in its file, which the error names.
    Raises: Refused when it cannot be started, fails, or leaves no text.
    """
    try:
        given = text.encode("utf-8")
        path = _write_temporary(given)
    except (OSError, ValueError) as error:
        raise Refused(f"The message cannot be given to an editor: {_reason(error)}") from error
    try:
        with _interrupts_for_the_editor():
            code = subprocess.run(_command(editor, str(path)), check=False).returncode
        left = path.read_bytes()
    except (OSError, ValueError) as error:
        _remove(path)
        raise Refused(f"The editor {editor!r} cannot be started: {_reason(error)}") from error
    written, problem = _read(left, f"The editor {editor!r} ended with code {code}" if code else "")
    if problem and left != given:
        raise Refused(f"{problem}: the message is unchanged, and what was written is in {path}")
    _remove(path)
    if problem:
        raise Refused(f"{problem}: the message is unchanged")
    return written


def _read(left: bytes, problem: str) -> tuple[str, str]:
    """The text, and what is wrong with it or empty."""
    try:
        return left.decode("utf-8").replace("\r\n", "\n").removesuffix("\n"), problem
    except UnicodeDecodeError:
        return "", problem or "The editor left no UTF-8 text"


def _write_temporary(content: bytes) -> Path:
    """A new file only its owner can read. Raises: OSError, and nothing is left then."""
    handle, name = tempfile.mkstemp(suffix=".md")
    try:
        with open(handle, "wb") as file:
            file.write(content)
    except OSError:
        _remove(Path(name))
        raise
    return Path(name)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@contextmanager
def _interrupts_for_the_editor() -> Iterator[None]:
    """Ctrl+C belongs to what has the terminal: it would end this program, too.

    A handler that does nothing, for a signal that is ignored stays ignored in the editor.
    """
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _command(editor: str, path: str) -> list[str] | str:
    if sys.platform == "win32":
        return f'{editor} "{path}"'  # backslashes of a path are no escapes there
    return [*shlex.split(editor), path]
