"""What is typed and not sent: no key, no other chat and no failing store costs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.chats import ChatStore
from storage.errors import StorageError
from tests.app.app_fixtures import Stage, make_app, open_stage
from tests.app.fake_engine import FakeEngine


async def ask_and_answer(stage: Stage, *questions: str) -> str:
    for question in questions:
        await stage.ask(question)
        stage.engine.answer("ok")
        await stage.settle()
    return stage.chat_id


def refuse_drafts(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    patch.setattr(ChatStore, "save_draft", fail)


async def test_a_chat_left_while_it_is_still_being_shown_keeps_its_own_draft(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        screen = stage.app.chat_screen
        first = await ask_and_answer(stage, "one")
        await stage.type("draft of one")
        await stage.pilot.press("ctrl+n")
        await stage.type("draft of two")
        show = screen.show_messages

        async def leave_meanwhile() -> None:
            screen.drafts.leave()
            await show()

        screen.show_messages = leave_meanwhile  # type: ignore[method-assign]
        await screen.open_chat(first)
        drafts = {chat.draft for chat in stage.store.list_chats()}
        assert stage.store.get(first).draft == "draft of one"
        assert drafts == {"draft of one", "draft of two"}


async def test_looking_at_an_earlier_question_leaves_the_stored_draft(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await ask_and_answer(stage, "one")
        await stage.type("half a thought")
        await stage.pilot.press("up")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "one"
        stage.app.chat_screen.drafts.save()
        assert stage.store.get(stage.chat_id).draft == "half a thought"
        await stage.pilot.press("!")
        await stage.settle()
        stage.app.chat_screen.drafts.save()
        assert stage.store.get(stage.chat_id).draft == "one!"


async def test_sending_an_earlier_question_again_gives_the_draft_back(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await ask_and_answer(stage, "one")
        await stage.type("half a thought")
        await stage.pilot.press("up", "enter")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "half a thought"
        stage.app.chat_screen.drafts.save()
        assert stage.store.get(stage.chat_id).draft == "half a thought"


async def test_an_earlier_question_that_cannot_be_sent_now_is_looked_at_as_before(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        prompt = stage.app.chat_screen.prompt
        await ask_and_answer(stage, "one")
        await stage.ask("two")  # and its answer runs
        await stage.type("half a thought")
        await stage.pilot.press("up", "up", "enter")
        await stage.settle()
        assert (prompt.text, prompt.unsent) == ("one", "half a thought")
        await stage.pilot.press("down", "down")
        await stage.settle()
        assert prompt.text == "half a thought"


async def test_an_earlier_question_of_one_chat_is_forgotten_in_the_next(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await ask_and_answer(stage, "one")
        await stage.type("of the first")
        await stage.pilot.press("up", "ctrl+n")
        await stage.settle()
        await stage.type("one")
        assert stage.app.chat_screen.prompt.unsent == "one"


async def test_a_chat_whose_draft_cannot_be_stored_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        chat_id = await ask_and_answer(stage, "one")
        await stage.type("precious")
        with monkeypatch.context() as patch:
            refuse_drafts(patch)
            await stage.pilot.press("ctrl+n")
            await stage.settle()
        assert "the disk is full" in stage.notices
        assert (stage.chat_id, stage.app.chat_screen.prompt.text) == (chat_id, "precious")


async def test_leaving_the_program_says_what_could_not_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        said: list[object] = []
        monkeypatch.setattr(stage.app, "exit", lambda **options: said.append(options))
        await stage.type("precious")
        refuse_drafts(monkeypatch)
        await stage.app.action_quit()
        (options,) = said
        assert options["return_code"] == 1  # type: ignore[index]
        message = str(options["message"])  # type: ignore[index]
        assert "the disk is full" in message
        assert "precious" in message


async def test_the_draft_of_a_chat_deleted_in_another_window_gets_a_chat_of_its_own(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        chat_id = await ask_and_answer(stage, "one")
        await stage.type("precious")
        stage.store.delete(chat_id)
        await stage.pilot.press("ctrl+n")
        await stage.settle()
        assert [chat.draft for chat in stage.store.list_chats()] == ["precious"]
        assert stage.app.chat_screen.prompt.text == ""


async def test_leaving_before_the_screen_is_there_is_no_error(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        stage.app.chat_screen._is_ready = False
        await stage.app.chat_screen.prompt.remove()
        await stage.app.action_quit()
        assert stage.app.return_code == 0


@pytest.mark.parametrize("is_given", [True, False])
async def test_an_empty_chat_that_is_opened_again_is_not_deleted(
    tmp_path: Path, is_given: bool
) -> None:
    app = make_app(tmp_path, engine=FakeEngine())
    store = app.services.open_chats()
    chat_id = store.create().id
    store.database.close()
    async with open_stage(tmp_path, chat_id=chat_id if is_given else None) as stage:
        await stage.app.chat_screen.open_chat(chat_id)
        await stage.app.chat_screen.open_chat(chat_id)
        assert stage.chat_id == chat_id
        assert not stage.notices
