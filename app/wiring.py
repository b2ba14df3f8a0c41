"""Composition root: the one place that sees settings, storage, models, backends and engine.

Making a `Wiring` reads settings and nothing else; each method imports what it needs when it is
called, so that listing chats opens no model and the first paint comes before any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.services import FoundModel, Services
from app.settings import Environment, Settings, SettingsFile, load_settings, read_environment
from storage.paths import Paths

if TYPE_CHECKING:
    from app.library import Library
    from engine.events import EngineEvent
    from engine.host import EngineHost
    from models.loader import Loader
    from storage.bench_runs import BenchStore
    from storage.chats import ChatStore
    from storage.database import Database


@dataclass(frozen=True, slots=True)
class Wiring:
    """Everything a command or the screen is built from."""

    paths: Paths
    settings: Settings
    environment: Environment

    @classmethod
    def from_environment(cls, *, is_offline: bool = False) -> Wiring:
        """Settings from file and environment. Raises: SettingsError."""
        environment = read_environment()
        paths = Paths(environment.home)
        settings = load_settings(paths.config_file)
        return cls(paths, replace(settings, offline=settings.offline or is_offline), environment)

    @property
    def library(self) -> Library:
        """Models on this machine and in the catalog."""
        from app.library import Library

        return Library(self.paths, self.settings, self.environment)

    def find_model(self, name: str) -> FoundModel:
        """The file a catalog name, file stem or path means. Raises: ModelNotFound."""
        file = self.library.resolve(name)
        return FoundModel(file.name, file.path)

    def open_chats(self) -> ChatStore:
        """The chat store, owned by the calling thread. Raises: StorageError."""
        from storage.chats import ChatStore

        return ChatStore(self.open_database())

    def open_database(self) -> Database:
        """The database, owned by the calling thread. Raises: StorageError."""
        from storage.database import Database

        return Database(self.paths.database_file)

    @contextmanager
    def open_bench(self) -> Iterator[BenchStore]:
        """The store of bench runs on a connection that is closed after it. Raises: StorageError."""
        from storage.bench_runs import BenchStore

        with closing(self.open_database()) as database:
            yield BenchStore(database)

    def loader(self, settings: Settings) -> Loader:
        """Opens model files on the backend the settings name; imports the backend when called."""
        from backends.select import select_backend
        from models.loader import Loader

        return Loader(
            backend_factory=lambda: select_backend(settings.backend, threads=settings.threads),
        )

    def read_bandwidth_gb_s(self, settings: Settings) -> float:
        """Measured memory read bandwidth with the threads models run on, GB/s."""
        from backends.native.library import read_bandwidth_gb_s

        return read_bandwidth_gb_s(settings.threads)

    def start_engine(
        self, settings: Settings, on_event: Callable[[EngineEvent], None]
    ) -> EngineHost:
        """Start the engine thread; it imports the backend, and events come on it."""
        from engine.host import EngineHost
        from engine.options import EngineOptions

        loader = self.loader(settings)
        return EngineHost(
            loader,
            on_event,
            prepare=lambda: loader.backend.name,
            options=EngineOptions(
                holder_budget_bytes=settings.cache_budget_mb << 20 or None,
                checkpoint_dir=self.paths.cache_dir / "checkpoints",
            ),
        )

    def services(self, settings: Settings, *, chat_id: str | None = None) -> Services:
        """What the screens are built from."""
        return Services(
            settings=settings,
            save_settings=SettingsFile(self.paths.config_file, settings).save,
            open_chats=self.open_chats,
            models=self.library,
            start_engine=lambda on_event: self.start_engine(settings, on_event),
            editor=self.environment.editor,
            chat_id=chat_id,
        )
