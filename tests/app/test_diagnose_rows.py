"""`foretell diagnose rows`: what a person sees of the row check, and the exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from app.cli.main import main
from app.cli.output import FAILURE, OK, USAGE
from engine.diagnostics import plain_rows
from tests.models.trunk_fixtures import TRUNKS_DIR

MODEL = str(TRUNKS_DIR / "gemma3" / "model.gguf")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))


def test_s62_rows_reaches_every_row_class_and_says_that_they_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["diagnose", "rows", MODEL, "--rows", "3"]
    assert main(argv) == OK
    shown = capsys.readouterr().out
    assert re.search(r"row 2 of 3 +32 +\d\.\de[-+]\d\d +0", shown)
    assert main([*argv, "--tokens", "5,6,7,8,9," * 7 + "5,6,7,8,9", "--json"]) == OK
    report = json.loads(capsys.readouterr().out)
    names = [row_class["name"] for row_class in report["classes"]]
    assert names[:3] == ["row 0 of 1", "row 0 of 2", "row 1 of 2"]
    assert names[-3:] == ["kept verify rows", "after full acceptance", "after rollback"]
    assert report["tokens"] == 40
    for row_class in report["classes"]:
        assert row_class["compared"] > 0
        assert row_class["max_error"] <= report["tolerance"]


def test_s62_rows_that_differ_are_a_failure_and_every_flip_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plain rows are shifted by one id: no kernel of this machine errs by itself."""
    monkeypatch.setattr(
        "engine.diagnostics.plain_rows",
        lambda model, ids: np.roll(plain_rows(model, ids), 1, axis=1),
    )
    assert main(["diagnose", "rows", MODEL, "--rows", "2"]) == FAILURE
    out, err = capsys.readouterr()
    assert re.search(r"after rollback, position \d+: token \d+ instead of \d+, margin \d", out)
    assert "rows differ from one-row decoding by up to" in err


@pytest.mark.parametrize("rows", ["1", "5"])
def test_rows_out_of_range_for_a_text_are_a_usage_error(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["diagnose", "rows", MODEL, "--rows", rows]
    assert main([*argv, "--tokens", "5,6,7,8,9"]) == USAGE
    assert f"rows {rows} is out of range for 5 tokens (use 2 to 4)" in capsys.readouterr().err
