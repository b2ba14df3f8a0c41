"""What the storage tests share: an open database in an empty folder, and a clock by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.chats import ChatStore
from storage.database import Database
from tests.storage.download_bench import Bench
from tests.storage.fakes_storage import FakeClock
from tests.storage.misbehaving_server import FileServer, run_server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "chats.db")
    yield opened
    opened.close()


@pytest.fixture
def store(database: Database, clock: FakeClock) -> ChatStore:
    return ChatStore(database, now=clock)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with run_server() as running:
        yield running


@pytest.fixture
def bench(
    tmp_path: Path, server: FileServer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return Bench(tmp_path / "models", server, clock)
