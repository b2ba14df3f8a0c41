"""What `make` does, tried in a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_clean_removes_the_environment_and_what_was_built_and_no_source(tmp_path: Path) -> None:
    """The compiled library stayed, so that a later install without a compiler used an old one."""
    built = (
        ".venv/bin/python",
        "build/x.o",
        "foretell.egg-info/PKG-INFO",
        "backends/native/_foretell.cpython-311-x86_64-linux-gnu.so",
        "backends/native/_foretell.cp311-win_amd64.pyd",
    )
    kept = ("backends/native/src/rows.c", "backends/native/library.py", "pyproject.toml")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (*built, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    left = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {"Makefile", *kept}
