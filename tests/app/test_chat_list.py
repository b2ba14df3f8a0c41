"""The list of chats: opening, renaming, deleting, searching."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.events import AppBlur, AppFocus

from app.screens.dialogs import ConfirmDialog
from app.screens.settings import SettingsScreen
from app.widgets.chat_list import ChatList
from engine.commands import CancelTurn, ForgetChat
from storage.chats import ChatStore
from storage.database import Database
from tests.app.app_fixtures import Stage, open_stage


async def start_two_chats(stage: Stage) -> tuple[str, str]:
    await stage.ask("about zebras")
    stage.engine.answer("striped")
    await stage.settle()
    first = stage.chat_id
    await stage.pilot.press("ctrl+n")
    await stage.ask("about walruses")
    stage.engine.answer("tusked")
    await stage.settle()
    return first, stage.chat_id


async def focus_list(stage: Stage) -> ChatList:
    chats = stage.app.screen.query_one(ChatList)
    chats.focus()
    await stage.pilot.pause()
    return chats


async def test_enter_opens_the_highlighted_chat(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        first, _ = await start_two_chats(stage)
        await focus_list(stage)
        await stage.pilot.press("down", "enter")
        await stage.settle()
        assert stage.chat_id == first
        assert "striped" in stage.text


async def test_a_chat_is_deleted_only_after_a_yes(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        first, second = await start_two_chats(stage)
        await focus_list(stage)
        for key in ("delete", "escape", "d", "enter"):  # Enter takes the focused "Keep"
            await stage.pilot.press(key)
            await stage.settle()
        assert {chat.id for chat in stage.store.list_chats()} == {first, second}
        await stage.pilot.press("d")
        await stage.settle()
        assert "about walruses" in stage.text
        await stage.pilot.press("y")
        await stage.settle()
        assert [chat.id for chat in stage.store.list_chats()] == [first]
        assert stage.engine.sent(ForgetChat)[-1].chat_id == second


async def test_deleting_a_chat_stops_its_answer(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("endless")
        stage.engine.begin()
        stage.engine.say("and on")
        await stage.settle()
        await focus_list(stage)
        await stage.pilot.press("d")
        await stage.settle()
        await stage.pilot.press("y")
        await stage.settle()
        assert len(stage.engine.sent(CancelTurn)) == 1
        assert stage.store.list_chats() == []


async def test_a_chat_can_be_renamed(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await start_two_chats(stage)
        await focus_list(stage)
        await stage.pilot.press("r")
        await stage.settle()
        dialog = stage.app.screen.query_one("#dialog-input")
        dialog.value = "sea [animals"  # type: ignore[attr-defined]
        await stage.pilot.press("enter")
        await stage.settle()
        assert "sea [animals" in stage.text


async def test_backspace_and_delete_in_the_transcript_remove_nothing(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await start_two_chats(stage)
        await stage.pilot.press("ctrl+up", "backspace", "delete")
        await stage.settle()
        assert len(stage.store.list_chats()) == 2
        assert len(stage.store.messages(stage.chat_id)) == 2


async def test_search_finds_titles_and_texts_and_opens_the_chat(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        first, _ = await start_two_chats(stage)
        await stage.pilot.press("ctrl+f")
        await stage.settle()
        await stage.pilot.press(*"stri")
        await stage.settle()
        assert "striped" in stage.text
        await stage.pilot.press("enter")
        await stage.settle()
        assert stage.chat_id == first


async def test_a_search_text_full_of_query_signs_is_only_text(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await start_two_chats(stage)
        await stage.pilot.press("ctrl+f")
        box = stage.app.screen.query_one("#search-input")
        for text in ("a-b", "(", "AND", "it's", '"', "[/"):
            box.value = text  # type: ignore[attr-defined]
            await stage.settle()
        assert stage.app.is_running


async def test_a_narrow_screen_shows_the_list_in_place_of_the_transcript(tmp_path: Path) -> None:
    async with open_stage(tmp_path, size=(40, 16)) as stage:
        await start_two_chats(stage)
        assert "about zebras" not in stage.text
        await stage.pilot.press("f6")
        await stage.settle()
        assert "about zebras" in stage.text
        await stage.pilot.press("down", "enter")
        await stage.settle()
        assert "striped" in stage.text


async def test_a_chat_deleted_in_another_window_opens_as_an_empty_one(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        first, _ = await start_two_chats(stage)
        stage.store.delete(first)
        await focus_list(stage)
        await stage.pilot.press("down", "enter")
        await stage.settle()
        assert stage.app.chat_screen.chat_id is None
        assert f"there is no chat {first}" in stage.notices


async def test_wishes_on_messages_of_a_deleted_chat_are_one_line(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await start_two_chats(stage)
        stage.store.delete(stage.chat_id)
        await stage.pilot.press("ctrl+up", "left", "r")
        await stage.settle()
        assert "was deleted" in stage.notices
        assert stage.app.is_running


async def test_a_question_is_answered_before_another_page_opens(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await start_two_chats(stage)
        await focus_list(stage)
        await stage.pilot.press("d")
        await stage.settle()
        await stage.pilot.press("f2", "f3")
        await stage.settle()
        assert isinstance(stage.app.screen, ConfirmDialog)


async def test_the_palette_opens_pages_by_name(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.pilot.press("ctrl+p", *"settings")
        await stage.pilot.pause()
        await stage.app.workers.wait_for_complete()
        await stage.pilot.press("enter")
        await stage.pilot.pause()
        await stage.settle()
        assert isinstance(stage.app.screen, SettingsScreen)


async def test_chats_made_in_another_window_are_listed_once_this_one_is_looked_at_again(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        other = ChatStore(Database(tmp_path / "chats.db"))
        other.create(title="made elsewhere")
        await stage.settle()
        assert "made elsewhere" not in stage.text
        stage.app.post_message(AppBlur())
        stage.app.post_message(AppFocus())
        await stage.settle()
        assert "made elsewhere" in stage.text
        other._db.close()


async def test_a_list_that_has_not_changed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        await start_two_chats(stage)
        changed: list[str] = []
        monkeypatch.setattr(
            ChatList, "replace_option_prompt", lambda *args: changed.append(args[1])
        )
        stage.app.chat_screen.show_chats()
        assert changed == []
