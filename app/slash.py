"""Commands that are typed: `/word argument` in the first line of a message."""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)
"""A path (`/usr/bin`), a lone slash and a comment (`/* */`) are text."""


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """What was typed."""

    name: str
    """In lower case, without the slash."""
    argument: str = ""


def parse_slash(typed: str) -> SlashCommand | None:
    """The command in what was typed, or None when it is a message."""
    match = _COMMAND.fullmatch(typed.strip())
    return SlashCommand(match[1].lower(), (match[2] or "").strip()) if match else None


def unescape(typed: str) -> str:
    """The message behind `//word`, which is `/word`; a comment like `// word` is as it was typed."""
    start = len(typed) - len(typed.lstrip())
    is_escaped = typed.startswith("//", start) and _would_be_command(typed)
    return typed[:start] + typed[start + 1 :] if is_escaped else typed


def escape(text: str) -> str:
    """How a message is typed so that it is no command: `unescape` gives it back."""
    start = len(text) - len(text.lstrip())
    return f"{text[:start]}/{text[start:]}" if _would_be_command(text) else text


def _would_be_command(text: str) -> bool:
    """Whether it is a command with its slashes made one."""
    body = text.lstrip()
    return body.startswith("/") and parse_slash("/" + body.lstrip("/")) is not None
