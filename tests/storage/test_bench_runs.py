"""Bench results over time."""

from __future__ import annotations

import pytest

from storage.bench_runs import BenchRun, BenchStore
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
    assert store.get(first.id).report == {"ratio": 1.9, "turns": [1, 2]}
    with pytest.raises(StorageError, match="no bench run 99"):
        store.get(99)
