"""The app on a fake engine, a real chat database and a small model library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from textual.pilot import Pilot

from app.app import ForetellApp
from app.services import CatalogModel, FoundModel, InstalledModel, Services
from app.settings import DEFAULT_MODEL, Settings
from app.widgets.message import MessageView
from app.widgets.status_bar import StatusBar
from storage.chats import ChatStore
from storage.database import Database
from storage.errors import StorageError
from storage.progress import DownloadProgress
from tests.app.fake_engine import FakeEngine


@dataclass
class FakeLibrary:
    """Models as a test lists them; a download waits for the test to let it go on."""

    folder: Path = Path("/models")
    models: list[InstalledModel] = field(default_factory=list)
    entries: list[CatalogModel] = field(default_factory=list)
    parts: list[CatalogModel] = field(default_factory=list)
    deleted: list[Path] = field(default_factory=list)
    deleted_parts: list[str] = field(default_factory=list)
    script: Callable[..., Path | None] | None = None
    recommendations: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def installed(self) -> Sequence[InstalledModel]:
        return list(self.models)

    def catalog(self) -> Sequence[CatalogModel]:
        return list(self.entries)

    def unfinished(self) -> Sequence[CatalogModel]:
        return list(self.parts)

    def find(self, name: str) -> FoundModel | None:
        found = (FoundModel(m.name, m.path) for m in self.models if name in (m.name, str(m.path)))
        return next(found, None)

    def recommended(self, model: FoundModel) -> Mapping[str, float]:
        return self.recommendations.get(model.name, {})

    def download(
        self,
        name: str,
        *,
        on_progress: Callable[[DownloadProgress], None],
        is_cancelled: Callable[[], bool],
    ) -> FoundModel | None:
        if self.script is None:
            raise StorageError(f"no script for {name}", hint="give the test one")
        path = self.script(name, on_progress, is_cancelled)
        return None if path is None else self.find(str(path))

    def delete(self, path: Path) -> None:
        self.deleted.append(path)
        self.models = [model for model in self.models if model.path != path]

    def delete_part(self, name: str) -> None:
        self.deleted_parts.append(name)


SMOL = InstalledModel(DEFAULT_MODEL, Path("/models/smol.gguf"), 98_362_432, "llama Q4_1")


@dataclass
class Stage:
    """An app under test with everything around it."""

    app: ForetellApp
    pilot: Pilot[None]
    engine: FakeEngine
    library: FakeLibrary
    store: ChatStore
    saved: list[Settings]

    async def settle(self) -> None:
        """Let every message, worker and refresh that is under way come to its end."""
        for _ in range(2):  # what is drained may begin a worker, and what ends one may post
            # With an empty list Textual waits for every worker, a dialog that is open included.
            if threads := [w for w in self.app.workers if w._thread_worker]:
                await self.app.workers.wait_for_complete(threads)
            await self.drain()
        for view in self.app.chat_screen.query(MessageView):
            await view.draw()  # not when the last drawing's rest is over, but now
        await self.drain()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for what comes about by itself, on a busy machine too."""
        try:
            async with asyncio.timeout(30):
                while not is_so():
                    await self.pilot.pause()
        except TimeoutError:
            raise AssertionError(f"never came about: {self.text}") from None

    async def drain(self) -> None:
        """Let the pumps that handle anything here work off their queues, then refresh.

        pilot.pause() asks every widget, Markdown blocks too: four times as slow.
        """
        pumps = [self.app, *self.app.screen_stack, *self.app.chat_screen.query(MessageView)]
        pumps += self.app.screen.query("#transcript, #prompt, #prompt-area, OptionList, SettingRow")
        done = [asyncio.Event() for _ in pumps]
        for pump, event in zip(pumps, done, strict=True):
            if not pump.call_later(event.set):
                event.set()  # it is being removed
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in done)), 30)
        self.app.screen._on_timer_update()
        await asyncio.sleep(0)

    async def type(self, text: str) -> None:
        self.app.chat_screen.prompt.area.insert(text)
        await self.pilot.pause()

    async def ask(self, text: str) -> None:
        await self.type(text)
        await self.pilot.press("enter")
        await self.settle()

    def lines(self) -> list[str]:
        """The screen as text."""
        width, height = self.app.size
        strips = self.app.screen._compositor.render_strips(self.app.size)
        assert (width, height) == tuple(self.app.size)
        return [strip.text.rstrip() for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(self.lines())

    @property
    def words(self) -> str:
        """The screen as text, with single spaces."""
        return " ".join(self.text.split())

    @property
    def notices(self) -> str:
        """What the toasts say."""
        return "\n".join(notice.message for notice in self.app._notifications)

    @property
    def chat_id(self) -> str:
        assert self.app.chat_screen.chat_id is not None
        return self.app.chat_screen.chat_id


def make_app(
    folder: Path,
    *,
    engine: FakeEngine,
    settings: Settings | None = None,
    library: FakeLibrary | None = None,
    chat_id: str | None = None,
    saved: list[Settings] | None = None,
) -> ForetellApp:
    """The app; its database lies in `folder`, so that it can be opened again."""
    services = Services(
        settings=settings or Settings(system_prompt=""),
        save_settings=(saved if saved is not None else []).append,
        open_chats=lambda: ChatStore(Database(folder / "chats.db")),
        models=library or FakeLibrary(models=[SMOL]),
        start_engine=engine.start,
        chat_id=chat_id,
    )
    app = ForetellApp(services)
    app.copy_tool = lambda text: None  # the clipboard of whoever runs the tests is theirs
    return app


async def wait_for_start(app: ForetellApp, pilot: Pilot[None]) -> None:
    """Until the chat is painted and the engine's own start is over.

    That start is begun after the first refresh: on a busy machine a test could be done before.
    """
    async with asyncio.timeout(60):  # for ever where the app has died at its start
        while not app.chat_screen.query(StatusBar) or app.model.phase == "starting":
            await pilot.pause()


@asynccontextmanager
async def open_stage(
    folder: Path,
    *,
    size: tuple[int, int] = (100, 30),
    settings: Settings | None = None,
    engine: FakeEngine | None = None,
    library: FakeLibrary | None = None,
    chat_id: str | None = None,
) -> AsyncIterator[Stage]:
    """Run the app on a stage of its own."""
    engine = engine or FakeEngine()
    library = library or FakeLibrary(models=[SMOL])
    saved: list[Settings] = []
    app = make_app(
        folder, engine=engine, settings=settings, library=library, chat_id=chat_id, saved=saved
    )
    async with app.run_test(size=size) as pilot:
        store = app.conversations.store
        stage = Stage(app, pilot, engine, library, store, saved)
        await wait_for_start(app, pilot)
        await stage.settle()
        yield stage
    store._db.close()
