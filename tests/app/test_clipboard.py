"""Copying with a local tool, whichever takes the text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app import clipboard


def tool(script: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script, *args)


def test_the_first_tool_that_takes_the_text_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copied"
    keep = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
    fails = tool("import sys; sys.stdin.read(); sys.exit(1)")
    monkeypatch.setattr(clipboard, "_TOOLS", (("not-there",), fails, tool(keep, str(target))))
    assert clipboard.copy_with_tool("漢字 [/]") == sys.executable
    assert target.read_text("utf-8") == "漢字 [/]"


def test_without_any_tool_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipboard, "_TOOLS", (("not-there",),))
    assert clipboard.copy_with_tool("x") is None
