"""What the screens are given: settings, chats, models and a way to start the engine.

`app.wiring` builds one `Services`; tests build another around fakes. Everything in it is lazy:
making it imports no backend and opens no model, so that the first paint comes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from app.settings import THINK, Settings
from engine.commands import Command, LoadModel
from engine.events import EngineEvent

if TYPE_CHECKING:
    from storage.chats import ChatStore
    from storage.progress import ReportProgress


class EngineHandle(Protocol):
    """A running engine thread: orders in; events go to the callback given at the start."""

    def submit(self, command: Command) -> None:
        """Queue an order; returns at once. Safe from any thread."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after a Stop; False when it still runs."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model file and what it is called, in the list of models and everywhere else."""

    name: str
    path: Path

    def load_command(self, settings: Settings) -> LoadModel:
        """The order that loads it the way the settings say."""
        return LoadModel(
            path=self.path,
            name=self.name,
            context_len=settings.context_len,
            speculation=settings.speculation,
            system_prompt=settings.system_prompt,
            think=THINK[settings.think],
        )


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A drafter that belongs to a model, or the reason why it cannot serve it."""

    name: str
    size_bytes: int
    path: Path | None = None
    """Where it is installed; None while it has to be downloaded."""
    refusal: str | None = None
    """Why this drafter cannot be used with the model, or None."""


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model file that can be opened now."""

    name: str
    path: Path
    size_bytes: int
    details: str = ""
    """One short line: family, quantization."""
    origin: str = ""
    """Whose folder it lies in (Hugging Face cache, Ollama); empty for this program's own."""
    can_delete: bool = True
    """False for files that belong to other programs: they are used in place."""
    drafters: tuple[DrafterChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that can be downloaded."""

    name: str
    title: str
    size_bytes: int
    licence: str
    is_installed: bool = False
    part_bytes: int = 0
    """Bytes of an unfinished download that are kept."""
    refusal: str | None = None
    """Why it does not fit this machine, with both numbers; None when it fits."""
    unsupported: str | None = None
    """Why this program cannot run it at all; None when it can."""
    source: str = ""
    """Where a model that is not in the catalog comes from; empty for one of the catalog."""
    drafters: tuple[DrafterChoice, ...] = ()


class ModelLibrary(Protocol):
    """Models on this machine and in the catalog. Blocking: called on worker threads only."""

    @property
    def folder(self) -> Path:
        """Where downloads go."""

    def installed(self) -> Sequence[InstalledModel]:
        """Every model file that was found, this program's own first."""

    def catalog(self) -> Sequence[CatalogModel]:
        """Every model that can be downloaded, smallest first; what cannot be run comes last."""

    def unfinished(self) -> Sequence[CatalogModel]:
        """What was pulled by its address and is not whole yet."""

    def find(self, name: str) -> FoundModel | None:
        """The file a catalog name, file stem or path means, or None when it is not here."""

    def recommended(self, model: FoundModel) -> Mapping[str, float]:
        """What the publisher of a model recommends for its sampler; quick, and may be empty."""

    def download(
        self,
        name: str,
        *,
        on_progress: ReportProgress,
        is_cancelled: Callable[[], bool],
    ) -> FoundModel | None:
        """Fetch, check and install; None when it was cancelled, and the part is then kept.

        Raises: StorageError or OSError, with the part kept; EngineError for one that cannot be run.
        """

    def delete(self, path: Path) -> None:
        """Remove an installed file, to the trash where there is one. Raises: StorageError."""

    def delete_part(self, name: str) -> None:
        """Remove what an unfinished download has kept."""


@dataclass(frozen=True, slots=True)
class Services:
    """Everything the screens need from outside."""

    settings: Settings
    save_settings: Callable[[Settings], None]
    """Raises: SettingsError when the file cannot be written."""
    open_chats: Callable[[], ChatStore]
    """Opens the database, on the UI thread, which then owns it."""
    models: ModelLibrary
    start_engine: Callable[[Callable[[EngineEvent], None]], EngineHandle]
    """Imports and starts the engine; called on a worker thread after the first paint."""
    editor: str = ""
    """The person's own editor, a command line; empty: none is set."""
    chat_id: str | None = None
    """The chat to open first; None opens an empty one."""
