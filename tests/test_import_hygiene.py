"""Start-up is light: what opens first imports no tensor library and no screen it does not show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "mlx", "tokenizers", "gguf")


def loaded_after(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` are in sys.modules after running `code` in a fresh interpreter."""
    script = f"import sys\n{code}\nprint(*[n for n in {names!r} if n in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import app.__main__", (*HEAVY, "textual", "numpy", "httpx")),
        ("from app.cli.parser import build_parser; build_parser()", (*HEAVY, "textual", "numpy")),
        ("import app.app", HEAVY),
        ("import engine.host", (*HEAVY, "textual", "sqlite3")),
        ("import engine.speculative.registry", (*HEAVY, "textual", "sqlite3")),
        ("import models.loader", ("torch", "mlx", "textual", "sqlite3")),
        ("import backends.select", ("torch", "mlx", "textual", "sqlite3")),
    ],
)
def test_importing_stays_light(code: str, forbidden: tuple[str, ...]) -> None:
    assert loaded_after(code, forbidden) == []
