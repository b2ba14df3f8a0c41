"""Turns that end badly, stores that fail, limits that are reached: what the person is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from textual import events
from textual.widgets import Static

from app.app import ForetellApp
from app.bridge import EngineEventArrived
from app.downloads import Download, DownloadChanged
from app.services import FoundModel
from app.settings import DEFAULT_MODEL, Settings
from engine.commands import LoadModel, SubmitTurn
from engine.events import EngineFailed, ErrorInfo, ModelFailed, ModelLoading
from storage.chats import ChatStore
from storage.database import Database
from storage.errors import StorageError
from tests.app.app_fixtures import SMOL, FakeLibrary, Stage, open_stage
from tests.app.fake_engine import FakeEngine, make_model_info


def prompt_texts(turn: SubmitTurn) -> list[tuple[str, str]]:
    assert isinstance(turn.prompt, tuple)
    return [(m.role, m.content) for m in turn.prompt]  # type: ignore[union-attr]


def contents(stage: Stage) -> list[str]:
    return [message.content for message in stage.store.messages(stage.chat_id)]


async def test_a_failed_turn_gives_the_prompt_back_and_says_why_in_one_line(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("a question that took me long")
        stage.engine.begin()
        stage.engine.fail("the device ran out of memory [/]", "use a smaller context")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "a question that took me long"
        assert "the device ran out of memory [/]: use a smaller context" in stage.text.replace(
            "\n", " "
        )
        await stage.pilot.press("enter")
        await stage.settle()
        first, again = stage.engine.sent(SubmitTurn)
        assert again.prompt == first.prompt


async def test_a_turn_that_fails_after_some_text_keeps_the_text(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("go on")
        stage.engine.begin()
        stage.engine.say("so far so good")
        stage.engine.fail("the device was lost")
        await stage.settle()
        answer = stage.store.messages(stage.chat_id)[-1]
        assert (answer.content, answer.state) == ("so far so good", "failed")
        assert "so far so good" in stage.text


async def test_an_engine_failure_ends_turns_with_their_text_and_one_line(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.begin()
        stage.engine.say("partial [text")
        stage.engine.emit(EngineFailed(ErrorInfo("failure", "a bug [/]", "start again")))
        await stage.settle()
        answer = stage.store.messages(stage.chat_id)[-1]
        assert (answer.content, answer.state) == ("partial [text", "failed")
        assert "failed" in stage.text


async def test_a_model_that_cannot_be_loaded_says_why_and_gives_the_prompt_back(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(loads_by_itself=False)
    async with open_stage(tmp_path, engine=engine) as stage:
        await stage.ask("hello")
        engine.fail_load("smol.gguf is cut off [bold", "download it again")
        await stage.settle()
        assert "smol.gguf is cut off [bold" in stage.text
        assert stage.app.chat_screen.prompt.text == "hello"


async def test_a_chat_deleted_elsewhere_is_noticed_without_a_crash(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.begin()
        stage.engine.say("some text")
        await stage.settle()
        stage.store.delete(stage.chat_id)
        stage.engine.finish()
        await stage.settle()
        assert "was deleted while its answer was written" in stage.notices
        assert "some text" in stage.text
        assert "Enter send" in stage.text


async def test_one_answer_that_cannot_be_stored_keeps_no_other_from_ending(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        gone = stage.chat_id
        await stage.pilot.press("ctrl+n")
        await stage.ask("two")
        stage.engine.begin()
        stage.engine.say("some text")
        await stage.settle()
        stage.store.delete(gone)
        stage.engine.emit(EngineFailed(ErrorInfo("failure", "the engine failed")))
        await stage.settle()
        assert stage.app.conversations.running == []
        assert stage.store.messages(stage.chat_id)[-1].state == "failed"
        assert "the engine failed" in stage.notices


async def test_escape_in_a_chat_that_was_deleted_elsewhere_ends_its_turn(tmp_path: Path) -> None:
    engine = FakeEngine(loads_by_itself=False)
    async with open_stage(tmp_path, engine=engine) as stage:
        await stage.ask("one")
        stage.store.delete(stage.chat_id)
        await stage.pilot.press("escape")
        await stage.settle()
        assert stage.app.conversations.running == []
        assert "was deleted while its answer was written" in stage.notices


async def test_s49_the_system_prompt_is_given_with_the_model_to_be_warmed(tmp_path: Path) -> None:
    async with open_stage(tmp_path, settings=Settings(system_prompt="Be brief.")) as stage:
        await stage.ask("hi")
        (load,) = stage.engine.sent(LoadModel)
        assert load.system_prompt == "Be brief."


async def test_an_answer_that_repeats_itself_for_ever_is_stopped(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("hi")
        assert stage.engine.request().stop_on_repetition
        stage.engine.begin()
        stage.engine.say("la la la")
        stage.engine.finish("repetition")
        await stage.settle()
        assert "it repeated itself" in stage.words


async def test_after_a_failed_question_was_answered_anew_the_next_one_follows_it(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.fail("the device is gone")
        await stage.settle()
        await stage.pilot.press("ctrl+r")
        await stage.settle()
        stage.engine.answer("answer")
        await stage.settle()
        stage.app.chat_screen.prompt.text = ""
        await stage.ask("two")
        assert prompt_texts(stage.engine.request()) == [
            ("user", "one"),
            ("assistant", "answer"),
            ("user", "two"),
        ]


async def test_a_question_that_failed_is_asked_again_after_the_store_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.fail("the device is gone")
        await stage.settle()
        with monkeypatch.context() as patch:
            patch.setattr(ChatStore, "begin_answer", _busy)
            await stage.pilot.press("enter")
            await stage.settle()
        await stage.pilot.press("enter")
        await stage.settle()
        assert prompt_texts(stage.engine.request()) == [("user", "one")]


def _busy(*args: object, **options: object) -> None:
    raise StorageError("the database is in use")


async def test_a_message_that_hardly_fits_the_context_says_so_before_it_is_sent(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        area = stage.app.chat_screen.prompt.area
        area.insert("word " * 400)
        await stage.settle()
        assert "Enter send" in stage.text
        area.post_message(events.Paste("word " * 5000))
        await stage.settle()
        assert "Too long? About 9,000 tokens, and the context holds 8,192" in stage.words
        stage.app.chat_screen.prompt.text = ""
        await stage.settle()
        assert "Enter send" in stage.text


async def test_messages_left_out_are_said_from_the_start_and_kept_with_the_answer(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.begin(dropped=4)
        await stage.settle()
        assert "4 oldest messages left out: the context is full" in stage.words
        stage.engine.say("some text")
        await stage.settle()
        assert "4 oldest messages left out" in stage.words
        stage.engine.finish("length")
        await stage.settle()
        await stage.app.chat_screen.open_chat(stage.chat_id)
        await stage.settle()
        assert "left out: the context is full · cut at the token" in stage.words


async def test_editing_keeps_the_indentation_of_the_first_line(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("    if x:\n        return")
        stage.engine.answer("B")
        await stage.settle()
        await stage.pilot.press("ctrl+up", "ctrl+up", "e")
        await stage.settle()
        await stage.pilot.press("f10")
        await stage.settle()
        assert len(stage.engine.sent(SubmitTurn)) == 1
        await stage.pilot.press("e")
        await stage.settle()
        await stage.pilot.press("1", "f10")
        await stage.settle()
        assert contents(stage)[0] == "    if x:\n        return1"


async def test_a_question_whose_answer_could_not_be_begun_is_not_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        with monkeypatch.context() as patch:
            patch.setattr(ChatStore, "begin_answer", _busy)
            await stage.ask("one")
        assert stage.app.chat_screen.prompt.text == "one"
        await stage.pilot.press("enter")
        await stage.settle()
        assert prompt_texts(stage.engine.request()) == [("user", "one")]
        assert len(stage.app.chat_screen.transcript.views) == 2


def fail_choice(stage: Stage, name: str, kept: str) -> None:
    error = ErrorInfo("bad_model", f"{name}.gguf is cut off")
    stage.engine.emit(ModelFailed(name, error, kept=make_model_info(kept)))


async def test_a_bad_model_file_leaves_the_model_in_use_with_all_that_belongs_to_it(
    tmp_path: Path,
) -> None:
    """The path, the drafter and the sampler of the model that failed were left behind."""
    library = FakeLibrary(models=[SMOL])
    library.recommendations = {DEFAULT_MODEL: {"temperature": 0.2}, "bad": {"temperature": 0.9}}
    async with open_stage(tmp_path, library=library) as stage:
        stage.engine.loads_by_itself = False
        bad = FoundModel("bad", Path("/elsewhere/bad.gguf"))
        stage.app.use_chosen(bad, name="/elsewhere/bad.gguf", drafter="/elsewhere/d.gguf")
        assert stage.saved[-1].model == "/elsewhere/bad.gguf"
        fail_choice(stage, "bad", kept=DEFAULT_MODEL)
        await stage.settle()
        assert "bad.gguf is cut off" in stage.notices
        assert (stage.app.model.name, stage.app.model.phase) == (DEFAULT_MODEL, "ready")
        assert stage.saved[-1].model == DEFAULT_MODEL
        assert stage.saved[-1].speculation.drafter_path is None
        assert len(stage.engine.sent(LoadModel)) == 2
        await stage.ask("hello")
        assert stage.engine.request().sampling.temperature == 0.2


async def test_a_model_chosen_while_another_loads_falls_back_on_that_one(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        stage.engine.loads_by_itself = False
        for name in ("second", "bad"):
            stage.app.use_chosen(FoundModel(name, Path(f"/m/{name}.gguf")), name=f"/m/{name}.gguf")
        stage.engine.finish_load("second")
        fail_choice(stage, "bad", kept="second")
        await stage.settle()
        assert stage.app.model.name == "second"
        assert stage.saved[-1].model == "/m/second.gguf"


async def test_a_drafter_that_fails_leaves_the_model_without_it(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        stage.engine.loads_by_itself = False
        smol = FoundModel(SMOL.name, SMOL.path)
        stage.app.use_chosen(smol, name=SMOL.name, drafter="/d.gguf")
        fail_choice(stage, SMOL.name, kept=SMOL.name)
        await stage.settle()
        assert stage.saved[-1].speculation.drafter_path is None


class LateNews(Static):
    """Brings news at the moment it is taken down: from the engine, a download and a worker."""

    async def on_unmount(self) -> None:
        app = self.app
        assert isinstance(app, ForetellApp)
        app.post_message(EngineEventArrived(ModelLoading("other", "weights", 0.5)))
        app.post_message(EngineEventArrived(ModelFailed("other", ErrorInfo("failure", "gone"))))
        app.post_message(DownloadChanged(Download(DEFAULT_MODEL, error="cut off")))
        worker = asyncio.create_task(asyncio.to_thread(app.call_from_worker, app.use_model, None))
        for _ in range(10):  # the app's own queue is served meanwhile, on a half removed screen
            await asyncio.sleep(0)
        await worker


async def test_news_that_comes_while_the_screens_are_taken_down_breaks_nothing(
    tmp_path: Path,
) -> None:
    """Leaving just as a download ended raised NoMatches on the half removed chat screen."""
    async with open_stage(tmp_path) as stage:
        await stage.app.chat_screen.mount(LateNews(), before="#hints")


async def test_the_failure_of_a_model_chosen_before_does_not_touch_the_one_that_loads(
    tmp_path: Path,
) -> None:
    """Its failure ended the questions that waited for the second, and "failed" was shown."""
    engine = FakeEngine(loads_by_itself=False)
    async with open_stage(tmp_path, engine=engine) as stage:
        await stage.ask("hello")
        stage.app.use_model(FoundModel("second", Path("/models/second.gguf")))
        engine.fail_load("smol.gguf is cut off")
        engine.emit(ModelLoading("smollm2-135m", "reading", 0.5))
        await stage.settle()
        assert "second  loading" in stage.text
        assert len(stage.app.conversations.running) == 1
        engine.finish_load("second")
        await stage.settle()
        assert [turn.phase for turn in stage.app.conversations.running] == ["waiting"]
        assert len(engine.sent(SubmitTurn)) == 1


async def test_a_context_changed_while_the_model_loads_is_loaded_again(tmp_path: Path) -> None:
    engine = FakeEngine(loads_by_itself=False)
    async with open_stage(tmp_path, engine=engine) as stage:
        await stage.ask("hello")
        stage.app.change_settings(replace(stage.app.settings, context_len=512))
        await stage.settle()
        assert [load.context_len for load in engine.sent(LoadModel)] == [None, 512]


def _full(*args: object, **options: object) -> None:
    raise StorageError("the disk is full [/]")


async def test_an_answer_that_cannot_be_stored_is_said_once_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk was silent until the end."""
    async with open_stage(tmp_path) as stage:
        await stage.ask("hi")
        stage.engine.begin()
        with monkeypatch.context() as patch:
            patch.setattr(Database, "transaction", _full)
            for _ in range(3):
                stage.engine.say("some text ")
                await stage.settle()
                stage.store.flush()
        assert [n.message for n in stage.app._notifications] == ["the disk is full [/]"]
        stage.engine.finish()
        await stage.settle()
        assert contents(stage)[-1] == "some text some text some text "


async def test_what_is_lost_at_the_end_of_the_program_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("hi")
        stage.engine.begin()
        stage.engine.say("some text")
        await stage.settle()
        with monkeypatch.context() as patch:
            patch.setattr(Database, "transaction", _full)
            await stage.app.action_quit()
        assert stage.app.return_code == 1
        (message,) = stage.app._exit_renderables
        assert str(message) == "foretell: the disk is full [/]"
