"""A text in the editor a person has set."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
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
    Raises: Refused when it cannot be started, fails, or leaves no text.
    """
    handle, name = tempfile.mkstemp(suffix=".md")  # readable by its owner only
    path = Path(name)
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        code = subprocess.run(_command(editor, name), check=False).returncode
        if code != 0:
            raise Refused(f"The editor {editor!r} ended with code {code}: the message is unchanged")
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError:
        raise Refused("The editor left no UTF-8 text: the message is unchanged") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refused(f"The editor {editor!r} cannot be started: {reason}") from error
    finally:
        with suppress(OSError):
            path.unlink()


def _command(editor: str, path: str) -> list[str] | str:
    if sys.platform == "win32":
        return f'{editor} "{path}"'  # backslashes of a path are no escapes there
    return [*shlex.split(editor), path]
