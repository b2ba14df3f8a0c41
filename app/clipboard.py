"""Copying text: the terminal's own escape first, then a local tool when there is one.

OSC 52 reaches the person's machine over SSH, but macOS Terminal ignores it and tmux may drop it;
the local tools cover those.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence

_TOOLS: Sequence[Sequence[str]] = (
    ("pbcopy",),
    ("wl-copy",),
    ("xclip", "-selection", "clipboard"),
    ("xsel", "--clipboard", "--input"),
    ("clip.exe",),
)
_TIMEOUT_S = 2.0
"""A tool without a display can hang; the escape sequence was sent anyway."""


def copy_with_tool(text: str) -> str | None:
    """Give the text to the first local tool that takes it; its name, or None. Blocking."""
    for command in _TOOLS:
        if shutil.which(command[0]) and _run(command, text):
            return command[0]
    return None


def _run(command: Sequence[str], text: str) -> bool:
    # clip.exe reads UTF-16; every other tool reads the locale's encoding, which is UTF-8.
    encoding = "utf-16-le" if command[0] == "clip.exe" else "utf-8"
    try:
        result = subprocess.run(
            command,
            input=text.encode(encoding, errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0) if _IS_WINDOWS else 0,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0


_IS_WINDOWS = sys.platform == "win32"
