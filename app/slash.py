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
    """The message behind `//text`, which is `/text`."""
    return typed[1:] if typed.startswith("//") else typed
