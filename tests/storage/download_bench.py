"""One models folder, one misbehaving server and a clock by hand: what a download test needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.downloads import RetryPolicy
from storage.model_downloads import DownloadTools, HubAccess, ModelDownloads, WantedSource
from storage.progress import DownloadProgress
from tests.storage.fakes_storage import FakeClock
from tests.storage.misbehaving_server import CONTENT, SHA256, FileServer

SIZE = len(CONTENT)


class Bench:
    """One models folder and everything a download needs."""

    def __init__(self, folder: Path, server: FileServer, clock: FakeClock) -> None:
        self.folder = folder
        self.server = server
        self.clock = clock
        self.reports: list[DownloadProgress] = []
        self.is_cancelled: Callable[[], bool] = lambda: False
        self.token: str | None = None
        self.free_bytes = 1 << 40
        self.is_offline = False
        self.policy = RetryPolicy(stall_timeout_s=30.0)  # a busy machine is no stall

    @property
    def target(self) -> Path:
        return self.folder / "tiny.gguf"

    @property
    def part(self) -> Path:
        return self.folder / "tiny.gguf.part"

    @property
    def downloads(self) -> ModelDownloads:
        tools = DownloadTools(
            policy=self.policy,
            clock=self.clock,
            sleep=self.clock.sleep,
            get_free_space=lambda _: self.free_bytes,
        )
        return ModelDownloads(
            self.folder,
            hub=HubAccess(self.server.url, self.token),
            is_offline=self.is_offline,
            tools=tools,
        )

    def fetch(
        self,
        *,
        source: str | None = None,
        size_bytes: int | None = SIZE,
        sha256: str | None = SHA256,
        on_look: Callable[[], None] = lambda: None,
    ) -> Path:
        """`on_look` runs whenever the download looks whether it was cancelled."""

        def is_cancelled() -> bool:
            on_look()
            return self.is_cancelled()

        address = source or "hf:owner/repo/tiny.gguf"
        wanted = WantedSource("tiny.gguf", (address,), size_bytes, sha256)
        return self.downloads.fetch(
            [wanted], on_progress=self.reports.append, is_cancelled=is_cancelled
        )

    def leave_part(self, num_bytes: int, target: str = "tiny.gguf", **changes: Any) -> None:
        """A part as an interrupted run leaves it."""
        note = {
            "source": "https://huggingface.co/owner/repo/resolve/main/tiny.gguf",
            "size_bytes": SIZE,
            "sha256": SHA256,
            "etag": '"v1"',
            "num_sources": 0,
        }
        part = self.folder / f"{target}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(CONTENT[:num_bytes])
        part.with_name(part.name + ".json").write_text(json.dumps(note | changes))

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("Range") for _, headers in self.server.requests]

    def is_installed(self) -> bool:
        """Whole, right, and nothing else left over."""
        names = {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}
        return self.target.read_bytes() == CONTENT and names == {"tiny.gguf", "tiny.gguf.json"}
