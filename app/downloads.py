"""Downloads that go on while screens come and go. Each runs on a worker thread of the app."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from textual.message import Message

from app.errors import describe
from app.services import FoundModel, ModelLibrary
from engine.errors import EngineError
from storage.errors import StorageError
from storage.progress import DownloadProgress


@dataclass(frozen=True, slots=True)
class Download:
    """How a download stands."""

    name: str
    progress: DownloadProgress | None = None
    found: FoundModel | None = None
    """The installed file, once it is whole."""
    error: str = ""
    is_drafter: bool = False
    """Whether it only drafts for another model and answers nothing by itself."""
    is_cancelled: bool = False

    @property
    def is_running(self) -> bool:
        """Whether bytes are still to come."""
        return self.found is None and not self.error and not self.is_cancelled


class DownloadChanged(Message):
    """A download moved on, ended, failed or was cancelled."""

    def __init__(self, download: Download) -> None:
        super().__init__()
        self.download = download


class Downloads:
    """Starts and cancels downloads; the newest state of each is kept for screens that open."""

    def __init__(
        self,
        library: ModelLibrary,
        run_thread: Callable[[Callable[[], None]], object],
        post_message: Callable[[Message], bool],
    ) -> None:
        self._library = library
        self._run_thread = run_thread
        self._post_message = post_message
        self._cancels: dict[str, threading.Event] = {}
        self.states: dict[str, Download] = {}

    def start(self, name: str, *, is_drafter: bool = False) -> bool:
        """Download a catalog entry or an address; False when it is already on its way."""
        if name in self.states and self.states[name].is_running:
            return False
        cancel = self._cancels[name] = threading.Event()
        state = self.states[name] = Download(name, is_drafter=is_drafter)
        self._run_thread(lambda: self._download(state, cancel))
        return True

    def cancel(self, name: str) -> None:
        """Stop a download; what has arrived is kept."""
        if name in self._cancels:
            self._cancels[name].set()

    def cancel_all(self) -> None:
        """Stop every download, for the end of the program."""
        for cancel in self._cancels.values():
            cancel.set()

    def take(self, download: Download) -> None:
        """Remember the newest state, on the UI thread."""
        self.states[download.name] = download

    def _download(self, state: Download, cancel: threading.Event) -> None:
        def report(progress: DownloadProgress) -> None:
            nonlocal state
            state = replace(state, progress=progress)
            self._post_message(DownloadChanged(state))

        try:
            found = self._library.download(
                state.name, on_progress=report, is_cancelled=cancel.is_set
            )
        except (StorageError, EngineError, OSError) as error:
            state = replace(state, error=describe(error).line)
        else:
            state = replace(state, found=found, is_cancelled=found is None)
        self._post_message(DownloadChanged(state))
