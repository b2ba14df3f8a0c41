"""Bench results that stay comparable: which bytes ran, with which options, on which machine.

What a report contains is the bench's own business; here it is one JSON document.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from storage.database import Database
from storage.errors import StorageError


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One finished (or stopped) bench."""

    id: int
    kind: str
    """spec, agent, concurrent, rows or peers."""
    model: str
    model_sha256: str
    """Mark of the model's bytes, so that a replaced file is another model; empty when unknown."""
    options: Mapping[str, Any]
    machine: Mapping[str, Any]
    report: Mapping[str, Any]
    created_at: float
    """Seconds since 1970."""


class BenchStore:
    """Every bench run in the database. Lives on the thread that opened the database."""

    def __init__(self, database: Database, *, now: Callable[[], float] = time.time) -> None:
        self._db = database
        self._now = now

    def save(
        self,
        kind: str,
        *,
        model: str,
        model_sha256: str,
        options: Mapping[str, Any],
        machine: Mapping[str, Any],
        report: Mapping[str, Any],
    ) -> BenchRun:
        """Keep a run. Raises: StorageError."""
        documents = [json.dumps(dict(part)) for part in (options, machine, report)]
        with self._db.transaction() as db:
            cursor = db.execute(
                "INSERT INTO bench_runs"
                "(kind, model, model_sha256, options, machine, report, created_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (kind, model, model_sha256, *documents, self._now()),
            )
        assert cursor.lastrowid is not None, "an INSERT has a row id"
        return self.get(cursor.lastrowid)

    def get(self, run_id: int) -> BenchRun:
        """The run with this number. Raises: StorageError when there is none."""
        rows = self._db.query("SELECT * FROM bench_runs WHERE id = ?", (run_id,))
        if not rows:
            raise StorageError(
                f"there is no bench run {run_id}", hint="foretell bench list shows what is kept"
            )
        return _run(rows[0])

    def list_runs(self) -> list[BenchRun]:
        """Every run, newest first."""
        rows = self._db.query("SELECT * FROM bench_runs ORDER BY created_at DESC, id DESC")
        return [_run(row) for row in rows]


def _run(row: sqlite3.Row) -> BenchRun:
    return BenchRun(
        id=row["id"],
        kind=row["kind"],
        model=row["model"],
        model_sha256=row["model_sha256"],
        options=json.loads(row["options"]),
        machine=json.loads(row["machine"]),
        report=json.loads(row["report"]),
        created_at=row["created_at"],
    )
