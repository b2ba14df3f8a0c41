"""Bench results over time."""

from __future__ import annotations

import json

import pytest

from storage.bench_runs import BenchRun, BenchStore, export_run_json
from storage.database import Database
from storage.errors import StorageError
from tests.storage.fakes_storage import FakeClock


def save(store: BenchStore, kind: str, sha256: str) -> BenchRun:
    return store.save(
        kind,
        model="tiny",
        model_sha256=sha256,
        options={"window": 7},
        machine={"cpu": "x", "cores": 2},
        report={"ratio": 1.9, "turns": [1, 2]},
    )


def test_runs_are_kept_whole_and_listed_newest_first(database: Database, clock: FakeClock) -> None:
    store = BenchStore(database, now=clock)
    first = save(store, "spec", "aa")
    clock.now += 1
    second = save(store, "spec", "bb")
    third = save(store, "rows", "aa")
    assert [run.id for run in store.list_runs()] == [third.id, second.id, first.id]
    assert [run.id for run in store.list_runs(kind="spec")] == [second.id, first.id]
    assert [run.id for run in store.list_runs(kind="spec", model_sha256="aa")] == [first.id]
    assert store.get(first.id).report == {"ratio": 1.9, "turns": [1, 2]}
    store.delete(first.id)
    with pytest.raises(StorageError, match="no bench run"):
        store.get(first.id)


def test_a_run_is_exported_as_one_document(database: Database, clock: FakeClock) -> None:
    run = save(BenchStore(database, now=clock), "spec", "aa")
    document = json.loads(export_run_json(run))
    assert document["machine"] == {"cpu": "x", "cores": 2}
    assert document["model_sha256"] == "aa"
    assert document["created_at"] == "1970-01-01T00:16:40+00:00"
