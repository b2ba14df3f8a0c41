"""Fakes and child processes for the storage tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


class FakeClock:
    """A clock that only moves when it is told to; sleeping moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a child that runs this code with the project importable; talk over its pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> str:
    """Wait for a child, insist that it succeeded, return what it printed."""
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    return out
