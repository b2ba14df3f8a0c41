"""Text files that go into a message, and chats that are written to a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from app.errors import Refused
from app.sizes import format_bytes

MAX_FILE_BYTES = 1_000_000
"""About 250,000 tokens: more than most contexts hold."""


def read_text_file(path: Path) -> str:
    """The text of a file. Raises: Refused naming the file and what is wrong with it."""
    try:
        if path.is_dir():
            raise Refused(f"{path} is a folder: name a file in it")
        if path.exists() and not path.is_file():
            raise Refused(f"{path} is no ordinary file")  # reading a pipe could wait for ever
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        num_bytes = path.stat().st_size
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise Refused(f"Cannot read {path}: {_reason(error)}") from error
    if len(data) > MAX_FILE_BYTES:
        most = format_bytes(MAX_FILE_BYTES)
        raise Refused(f"{path} has {format_bytes(num_bytes)}, and at most {most} can be attached")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Refused(f"{path} is no text in UTF-8") from None
    if "\0" in text:
        raise Refused(f"{path} is no text: it has null bytes")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_new_file(path: Path, text: str) -> None:
    """Write a file only its owner can read. Raises: Refused; a file that exists is left alone."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        raise Refused(f"{path} exists already: name another file") from None
    except (OSError, ValueError) as error:
        raise Refused(f"Cannot write {path}: {_reason(error)}") from error


def free_path(title: str, suffix: str) -> Path:
    """A file name made from a title that nothing in the working folder has yet.

    Raises: Refused when that folder is gone or closed.
    """
    try:
        return _free_path(Path.cwd(), title, suffix)
    except OSError as error:
        raise Refused(f"Cannot write into the working folder: {_reason(error)}") from error


def _free_path(folder: Path, title: str, suffix: str) -> Path:
    words = "-".join(re.findall(r"\w+", title.lower()))[:60].strip("-") or "chat"
    for number in range(1, 1000):
        path = folder / (f"{words}-{number}{suffix}" if number > 1 else f"{words}{suffix}")
        if not path.exists():
            return path
    raise Refused(f"{folder} has a thousand exports of this chat: name a file")


def typed_path(text: str) -> Path:
    """The path a person typed: quotes around it and ~ are understood.

    Raises: Refused for the home of a user that is not known.
    """
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise Refused(f"{text}: {error}") from error


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
