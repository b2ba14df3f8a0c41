"""What the storage tests share: an open database in an empty folder, and a clock by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.chats import ChatStore
from storage.database import Database
from tests.storage.fakes_storage import FakeClock


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
