"""Kept bench runs: every kind is listed and shown, as text, JSON and Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.bench_tables import Table
from app.cli.main import main
from app.cli.output import FAILURE, OK, USAGE
from storage.bench_runs import BenchStore
from storage.database import Database

FIGURE = {
    "turn": "prose",
    "plain_tok_s": 100.0,
    "spec_tok_s": 150.0,
    "ratio": 1.5,
    "ratios": [1.4, 1.5, 1.6],
    "ttft_ratios": [1.0],
    "draft_n": 9,
    "draft_n_accepted": 8,
    "streams_match": True,
}
COSTS = [
    {"num_rows": 1, "step_ms": 7.0, "fastest_ms": 6.9, "phase_ms": {"head": 1.0}},
    {"num_rows": 8, "step_ms": 14.0, "fastest_ms": 13.9, "phase_ms": {}},
]
CELL = {
    "num_chats": 2,
    "stagger_ms": 600,
    "plain_tok_s": 50.0,
    "spec_tok_s": 60.0,
    "ratio": 1.2,
    "lowest": 1.1,
    "highest": 1.3,
    "ttft_ratio": 1.0,
    "streams_match": False,
}
PEERS = {
    "peer": "llama.cpp",
    "ratios": {"decode": [1.9, 2.0, 2.1]},
    "rows": {
        "decode tok/s": {"foretell": [114.0], "peer": [60.0]},
        "8 rows / 1 row": {"foretell": [2.1], "peer": [4.6]},
    },
}
REPORTS: dict[str, dict[str, Any]] = {
    "spec": {"figures": [FIGURE], "rows": COSTS},
    "agent": {"figures": [FIGURE]},
    "concurrent": {"rows": [CELL]},
    "rows": {"rows": COSTS, "floor_ms": 3.5},
    "peers": PEERS,
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A run of each kind, by kind its number."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    database = Database(tmp_path / "data" / "chats.db")
    store = BenchStore(database)
    ids = {
        kind: store.save(
            kind,
            model=f"{kind}-model",
            model_sha256="ab" * 32,
            options={"window": 7},
            machine={"name": "two cores", "device": "cpu"},
            report=report,
        ).id
        for kind, report in REPORTS.items()
    }
    database.close()
    return ids


def test_every_kind_of_run_is_listed_newest_first(
    runs: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only spec runs were listed anywhere; the others were kept for nobody."""
    assert main(["bench", "list"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "decode 2.00x",
        "1 row 7.00 ms, 8 rows 2.00x",
        "2 chats, 600 ms apart 1.20x",
        "prose 1.50x",
        "prose 1.50x",
    ]
    assert main(["bench", "list", "--json"]) == OK
    assert [run["kind"] for run in json.loads(capsys.readouterr().out)] == [*reversed(REPORTS)]


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        ("spec", ["prose", "1.50x (1.40..1.60)", "8/9", "equal", "2.00x"]),
        ("agent", ["prose", "1.50x (1.40..1.60)", "8/9", "equal"]),
        ("concurrent", ["2 chats, 600 ms apart", "1.20x (1.10..1.30)", "DIFFERENT"]),
        ("rows", ["14.00", "2.00x", "50%", "1.00"]),
        ("peers", ["llama.cpp", "114.00", "2.00x (1.90..2.10)", "4.60"]),
    ],
)
def test_a_run_is_shown_with_everything_it_found(
    runs: dict[str, int], kind: str, cells: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "show", str(runs[kind])]) == OK
    text = capsys.readouterr().out
    assert all(cell in text for cell in [*cells, f"{kind}-model", "two cores", "window 7"])
    assert main(["bench", "show", str(runs[kind]), "--markdown"]) == OK
    markdown = capsys.readouterr().out
    assert all(cell in markdown for cell in [*cells, f"# Foretell bench {kind}: ", "| --- |"])
    assert main(["bench", "show", str(runs[kind]), "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["report"] == REPORTS[kind]


def test_a_run_that_is_not_there_is_one_line(
    runs: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "show", "99"]) == FAILURE
    assert "there is no bench run 99 (foretell bench list" in capsys.readouterr().err
    assert main(["bench", "show", "x"]) == USAGE


def test_columns_are_aligned_names_left_and_figures_right() -> None:
    assert Table(("turn", "ms"), [("a", "1.25"), ("longer", "10")]).text() == [
        "turn      ms",
        "a       1.25",
        "longer    10",
    ]
