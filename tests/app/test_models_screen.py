"""Getting, using and deleting models, and the first run without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from textual import events
from textual.widgets import Input

from app.app import ModelState
from app.screens.models import ModelsScreen
from app.services import CatalogModel, DrafterChoice, InstalledModel
from app.settings import DEFAULT_MODEL, Settings
from engine.commands import LoadModel, SubmitTurn
from storage.errors import StorageError
from storage.progress import DownloadProgress
from tests.app.app_fixtures import SMOL, FakeLibrary, Stage, open_stage

QWEN = InstalledModel("qwen3-8b", Path("/models/qwen3-8b.gguf"), 5_098_362_432, "qwen3 Q4_K_M")
GEMMA = CatalogModel("gemma3-270m", "Gemma 3 270M", 253_113_024, "Gemma terms")
HUGE = CatalogModel(
    "llama-70b", "Llama 70B", 42_000_000_000, "Llama", refusal="needs 45 GB, 8 GB are free [/]"
)
Report = Callable[[DownloadProgress], None]


class Script:
    """A download that moves when the test says so."""

    def __init__(self, library: FakeLibrary, result: InstalledModel) -> None:
        self.library = library
        self.result = result
        self.started = threading.Event()
        self.steps: list[str] = []
        self.gate = threading.Semaphore(0)
        library.script = self.run

    def run(self, name: str, report: Report, is_cancelled: Callable[[], bool]) -> Path | None:
        total = self.result.size_bytes
        self.steps.append(name)
        report(DownloadProgress(total // 2, total, 5e6))
        self.started.set()
        self.gate.acquire(timeout=60)  # a failed test must not hold the thread for ever
        if is_cancelled():
            return None
        self.library.models.append(self.result)
        return self.result.path

    def go_on(self) -> None:
        self.gate.release()


async def wait_for_start(stage: Stage, script: Script) -> None:
    await stage.until(script.started.is_set)
    await stage.until(lambda: stage.app.downloads.states[script.steps[-1]].progress is not None)
    await stage.drain()


async def open_models(stage: Stage) -> None:
    await stage.pilot.press("f3")
    await stage.settle()
    await stage.settle()
    assert isinstance(stage.app.screen, ModelsScreen)


async def test_without_a_model_the_first_screen_says_what_enter_does_and_does_it(
    tmp_path: Path,
) -> None:
    library = FakeLibrary()
    script = Script(library, SMOL)
    async with open_stage(tmp_path, library=library) as stage:
        await stage.settle()
        assert "There is no model on this machine yet." in stage.text
        assert "98 MB" in stage.text
        assert "/models" in stage.text
        await stage.pilot.press("enter")
        await wait_for_start(stage, script)
        assert script.steps == [DEFAULT_MODEL]
        assert "49 MB of 98 MB · 50% · 5 MB/s" in stage.text
        script.go_on()
        await stage.settle()
        await stage.settle()
        (load,) = stage.engine.sent(LoadModel)
        assert load.path == SMOL.path
        assert "ready" in stage.text


async def test_a_question_asked_before_the_first_download_is_answered_after_it(
    tmp_path: Path,
) -> None:
    library = FakeLibrary()
    script = Script(library, SMOL)
    async with open_stage(tmp_path, library=library) as stage:
        await stage.type("hello")
        await stage.pilot.press("enter")
        await wait_for_start(stage, script)
        assert not stage.engine.sent(SubmitTurn)
        script.go_on()
        await stage.settle()
        await stage.settle()
        assert len(stage.engine.sent(SubmitTurn)) == 1


async def test_a_failed_first_download_says_why_and_can_be_tried_again(tmp_path: Path) -> None:
    library = FakeLibrary()

    def fail(name: str, report: Report, is_cancelled: Callable[[], bool]) -> None:
        raise StorageError("no route to [host", hint="check the network")

    library.script = fail
    async with open_stage(tmp_path, library=library) as stage:
        await stage.pilot.press("enter")
        await stage.settle()
        await stage.settle()
        assert "no route to [host: check the network" in stage.text.replace("\n", " ")
        script = Script(library, SMOL)
        await stage.pilot.press("enter")
        await wait_for_start(stage, script)
        script.go_on()
        await stage.settle()
        await stage.settle()
        assert "ready" in stage.text


async def test_the_list_says_what_fits_and_why_not(tmp_path: Path) -> None:
    library = FakeLibrary(models=[SMOL], entries=[GEMMA, HUGE])
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        assert "● smollm2-135m 98 MB llama Q4_1" in stage.words
        assert "gemma3-270m 253 MB Gemma terms" in stage.words
        assert "does not fit: needs 45 GB, 8 GB are free [/]" in stage.text


async def test_a_refused_drafter_stands_beside_its_model_with_the_reason(tmp_path: Path) -> None:
    drafter = DrafterChoice("qwen3-0.6b", 600_000_000, Path("/d.gguf"), "another vocabulary [x")
    model = InstalledModel("qwen3-8b", Path("/q.gguf"), 5_000_000_000, drafters=(drafter,))
    async with open_stage(tmp_path, library=FakeLibrary(models=[SMOL, model])) as stage:
        await open_models(stage)
        assert "↳ qwen3-0.6b 600 MB refused: another vocabulary [x" in stage.words
        await stage.pilot.press("down", "down", "enter")
        await stage.settle()
        assert len(stage.engine.sent(LoadModel)) == 1


async def test_an_installed_drafter_is_loaded_with_its_model(tmp_path: Path) -> None:
    drafter = DrafterChoice("qwen3-mtp", 600_000_000, Path("/d.gguf"))
    model = InstalledModel("qwen3-8b", Path("/q.gguf"), 5_000_000_000, drafters=(drafter,))
    async with open_stage(tmp_path, library=FakeLibrary(models=[SMOL, model])) as stage:
        await open_models(stage)
        await stage.pilot.press("down", "down", "enter")
        await stage.settle()
        load = stage.engine.sent(LoadModel)[-1]
        assert load.path == Path("/q.gguf")
        assert load.speculation.drafter_path == str(Path("/d.gguf"))


async def test_using_another_model_loads_it_and_remembers_it(tmp_path: Path) -> None:
    async with open_stage(tmp_path, library=FakeLibrary(models=[SMOL, QWEN])) as stage:
        await open_models(stage)
        await stage.pilot.press("down", "enter")
        await stage.settle()
        assert [load.name for load in stage.engine.sent(LoadModel)] == ["smollm2-135m", "qwen3-8b"]
        assert stage.saved[-1].model == "qwen3-8b"
        assert "qwen3-8b  ready" in stage.text


async def test_a_download_goes_on_when_the_screen_is_left(tmp_path: Path) -> None:
    library = FakeLibrary(models=[SMOL], entries=[GEMMA])
    result = InstalledModel("gemma3-270m", Path("/models/g.gguf"), 253_113_024)
    script = Script(library, result)
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("down", "enter")
        await wait_for_start(stage, script)
        assert "127 MB of 253 MB · 50%" in stage.text
        await stage.pilot.press("escape")
        script.go_on()
        await stage.settle()
        await stage.settle()
        assert "gemma3-270m is ready" in stage.notices
        assert len(stage.engine.sent(LoadModel)) == 1


async def test_a_download_that_is_under_way_shows_when_the_screen_is_opened_again(
    tmp_path: Path,
) -> None:
    library = FakeLibrary(models=[SMOL], entries=[GEMMA])
    script = Script(library, InstalledModel("gemma3-270m", Path("/g.gguf"), 253_113_024))
    async with open_stage(tmp_path, library=library) as stage:
        assert stage.app.downloads.start("gemma3-270m")
        await wait_for_start(stage, script)
        await stage.pilot.press("f3")
        # Not settle(): it would wait for the download, which waits for this test.
        # The list comes from a thread: a hundred turns of an idle loop can be over before it.
        async with asyncio.timeout(30):
            while "127 MB of 253 MB" not in stage.text:
                await stage.pilot.pause(0.02)
        script.go_on()


async def test_cancel_stops_the_download_and_deletes_nothing(tmp_path: Path) -> None:
    library = FakeLibrary(models=[SMOL], entries=[GEMMA])
    script = Script(library, InstalledModel("gemma3-270m", Path("/g.gguf"), 253_113_024))
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("down", "enter")
        await wait_for_start(stage, script)
        await stage.pilot.press("x")
        script.go_on()
        await stage.settle()
        await stage.settle()
        assert not stage.app.downloads.states["gemma3-270m"].is_running
        assert library.deleted_parts == []
        assert [model.name for model in library.models] == ["smollm2-135m"]


async def test_a_model_is_deleted_only_after_a_yes(tmp_path: Path) -> None:
    library = FakeLibrary(models=[SMOL, QWEN])
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("down", "d")
        await stage.pilot.pause()
        assert "Delete qwen3-8b (5.1 GB)?" in stage.text
        await stage.pilot.press("escape")
        await stage.settle()
        assert library.deleted == []
        await stage.pilot.press("d")
        await stage.pilot.pause()
        await stage.pilot.press("y")
        await stage.settle()
        await stage.settle()
        assert library.deleted == [QWEN.path]


async def test_the_loaded_model_and_files_of_other_programs_are_not_deleted(
    tmp_path: Path,
) -> None:
    foreign = InstalledModel("theirs", Path("/o.gguf"), 1_000_000_000, "", "Ollama", False)
    library = FakeLibrary(models=[SMOL, foreign])
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("d")
        await stage.settle()
        assert "This model is loaded" in stage.notices
        await stage.pilot.press("down", "d")
        await stage.settle()
        assert "belongs to Ollama" in stage.notices
        assert library.deleted == []


async def test_what_does_not_fit_is_fetched_only_after_a_yes(tmp_path: Path) -> None:
    library = FakeLibrary(models=[SMOL], entries=[HUGE])
    script = Script(library, InstalledModel("llama-70b", Path("/l.gguf"), 42_000_000_000))
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("down", "enter")
        await stage.pilot.pause()
        assert "Download it all the same?" in stage.text
        await stage.pilot.press("escape")
        await stage.settle()
        assert script.steps == []


async def test_the_first_model_is_remembered_whichever_it_is(tmp_path: Path) -> None:
    library = FakeLibrary(entries=[CatalogModel("gemma3-270m", "Gemma", 253_113_024, "Gemma")])
    script = Script(library, InstalledModel("gemma3-270m", Path("/g.gguf"), 253_113_024))
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("enter")
        await wait_for_start(stage, script)
        script.go_on()
        await stage.settle()
        await stage.settle()
        assert [load.name for load in stage.engine.sent(LoadModel)] == ["gemma3-270m"]
        assert [settings.model for settings in stage.saved] == ["gemma3-270m"]


async def test_a_drafter_is_not_taken_for_the_first_model(tmp_path: Path) -> None:
    drafter = DrafterChoice("helper", 1_000_000)
    entry = CatalogModel("gemma3-270m", "Gemma", 253_113_024, "Gemma", drafters=(drafter,))
    library = FakeLibrary(entries=[entry])
    script = Script(library, InstalledModel("helper", Path("/h.gguf"), 1_000_000))
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("down", "enter")
        await wait_for_start(stage, script)
        script.go_on()
        await stage.settle()
        await stage.settle()
        assert not stage.engine.sent(LoadModel)
        assert "helper is ready" in stage.notices


async def test_what_cannot_be_run_says_why_and_is_not_fetched(tmp_path: Path) -> None:
    reason, drafters = "architecture [m is unknown", (DrafterChoice("m9-head", 9),)
    strange = CatalogModel("m9", "M9", 9_000_000, "MIT", unsupported=reason, drafters=drafters)
    library = FakeLibrary(models=[SMOL], entries=[strange])
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        assert "m9 9 MB architecture [m is unknown" in stage.words
        assert "m9-head" not in stage.text
        await stage.pilot.press("down")
        await stage.settle()
        assert "Cannot be run: architecture [m is unknown" in stage.words
        await stage.pilot.press("enter")
        await stage.settle()
        assert "m9: architecture [m is unknown" in stage.notices
        assert stage.app.downloads.states == {}


async def test_a_model_used_in_place_keeps_its_name_after_a_restart(tmp_path: Path) -> None:
    theirs = InstalledModel("theirs", Path("/o/t.gguf"), 1_000_000_000, "", "Ollama", False)
    library = FakeLibrary(models=[SMOL, theirs])
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("down", "enter")
        await stage.settle()
        settings = stage.saved[-1]
    async with open_stage(tmp_path, library=library, settings=settings) as stage:
        assert [load.name for load in stage.engine.sent(LoadModel)] == ["theirs"]
        await open_models(stage)
        assert "● theirs" in stage.words


async def test_a_model_given_by_its_path_is_called_by_its_name(tmp_path: Path) -> None:
    settings = Settings(model=str(QWEN.path))
    async with open_stage(tmp_path, library=FakeLibrary(models=[QWEN]), settings=settings) as stage:
        assert [load.name for load in stage.engine.sent(LoadModel)] == ["qwen3-8b"]
        await open_models(stage)
        await stage.pilot.press("d")
        await stage.settle()
        assert "This model is loaded" in stage.notices


async def test_a_configured_model_that_is_missing_is_said_and_kept(tmp_path: Path) -> None:
    """A disk that was not mounted: the default was downloaded and the setting overwritten."""
    library = FakeLibrary()
    script = Script(library, SMOL)
    async with open_stage(
        tmp_path, library=library, settings=Settings(model="/mnt/usb/[q].gguf")
    ) as stage:
        assert "The model /mnt/usb/[q].gguf was not found." in stage.text
        assert "Enter downloads" not in stage.text
        await stage.ask("hi")
        assert script.steps == []
        assert "The model /mnt/usb/[q].gguf was not found: F3" in stage.notices
        script.go_on()
        stage.app.downloads.start(DEFAULT_MODEL)  # as F3 does
        await stage.settle()
        await stage.settle()
        assert "smollm2-135m is ready: F3 to use it" in stage.notices
        assert stage.engine.sent(LoadModel) == []
        assert stage.saved == []


async def test_in_a_chat_with_messages_nothing_is_downloaded_unasked(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.answer("two")
        await stage.settle()
        chat_id = stage.chat_id
    library = FakeLibrary()
    async with open_stage(tmp_path, library=library, chat_id=chat_id) as stage:
        await stage.ask("three")
        await stage.pilot.press("enter")
        await stage.settle()
        assert stage.app.downloads.states == {}
        assert "smollm2-135m was not found: F3" in stage.notices


async def test_a_folder_that_cannot_be_read_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(library: FakeLibrary, name: str) -> None:
        raise PermissionError(13, "Permission denied", "/mnt/usb")

    monkeypatch.setattr(FakeLibrary, "find", fail)
    async with open_stage(tmp_path) as stage:
        assert "/mnt/usb: Permission denied" in stage.notices
        assert "no model" in stage.text
        stage.app.model = ModelState(DEFAULT_MODEL, "ready")
        stage.app.change_settings(replace(stage.app.settings, context_len=512))
        await stage.settle()
        assert len(stage.app._notifications) == 2


async def test_two_names_of_one_file_are_two_lines(tmp_path: Path) -> None:
    """Two tags of one Ollama model ended the program: lines of the same key."""
    names = ["ollama:m:latest", "ollama:m:8b"]
    tags = [
        InstalledModel(name, Path("/o/blob"), 5_000_000_000, "", "Ollama", False) for name in names
    ]
    async with open_stage(tmp_path, library=FakeLibrary(models=[SMOL, *tags])) as stage:
        await open_models(stage)
        await stage.pilot.press("down", "down", "enter")
        await stage.settle()
        assert stage.engine.sent(LoadModel)[-1].name == "ollama:m:8b"
        await open_models(stage)
        assert "● ollama:m:8b" in stage.words


async def test_the_list_is_narrowed_by_what_is_typed(tmp_path: Path) -> None:
    library = FakeLibrary(models=[SMOL, QWEN], entries=[GEMMA, HUGE])
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("/", *"Gem 3")
        await stage.settle()
        assert "gemma3-270m" in stage.text
        assert "qwen3-8b" not in stage.text
        await stage.pilot.press(*"x")
        await stage.settle()
        assert "Nothing is called 'Gem 3x'." in stage.text
        await stage.pilot.press("escape")
        await stage.settle()
        assert "qwen3-8b" in stage.text
        await stage.pilot.press("/", *"qwen", "enter", "enter")
        await stage.settle()
        assert stage.engine.sent(LoadModel)[-1].name == "qwen3-8b"


async def test_an_address_is_downloaded_and_shown_on_the_way(tmp_path: Path) -> None:
    library = FakeLibrary(models=[SMOL])
    script = Script(library, InstalledModel("m", Path("/m.gguf"), 253_113_024))
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        await stage.pilot.press("/", *"hf:o/r/m.gguf", "enter")
        await wait_for_start(stage, script)
        assert script.steps == ["hf:o/r/m.gguf"]
        assert "↓ hf:o/r/m.gguf 253 MB 127 MB of 253 MB" in stage.words
        library.parts = [CatalogModel("m", "m", 9, "", part_bytes=4, source="https://h/o/m.gguf")]
        await stage.pilot.press("ctrl+r")
        async with asyncio.timeout(30):  # not settle(): it would wait for the download
            while stage.app.screen._all[-1].key != "catalog:0":
                await stage.pilot.pause(0.02)
        assert "unfinished" not in stage.text
        library.parts = []
        assert "smollm2-135m" in stage.text
        script.go_on()
        await stage.settle()
        await stage.settle()
        assert "m is ready" in stage.notices
        assert "hf:o/r/m.gguf" not in stage.text


async def test_an_unfinished_pull_of_an_address_goes_on_with_enter(tmp_path: Path) -> None:
    part = CatalogModel(
        "m", "M", 253_113_024, "", part_bytes=100_000_000, source="https://h/o/m.gguf"
    )
    same_name = CatalogModel("m", "M", 1_000_000, "MIT")
    library = FakeLibrary(models=[SMOL], entries=[same_name], parts=[part])
    script = Script(library, InstalledModel("m", Path("/m.gguf"), 253_113_024))
    async with open_stage(tmp_path, library=library) as stage:
        await open_models(stage)
        assert "m 253 MB unfinished, 100 MB kept" in stage.words
        await stage.pilot.press("down")
        await stage.settle()
        assert "https://h/o/m.gguf" in stage.text
        await stage.pilot.press("enter")
        await wait_for_start(stage, script)
        assert script.steps == ["https://h/o/m.gguf"]
        assert "↓ m 253 MB 127 MB of 253 MB" in stage.words
        script.go_on()


async def test_letters_that_come_at_once_behind_the_slash_are_not_lost(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await open_models(stage)
        for key, letter in (("slash", "/"), ("a", "a"), ("slash", "/"), ("d", "d")):
            stage.app.post_message(events.Key(key, letter))
        await stage.settle()
        await stage.settle()
        assert stage.app.screen.query_one(Input).value == "a/d"
