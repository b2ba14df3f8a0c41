"""The prompt: keys, pastes and chips."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events

from engine.commands import SubmitTurn
from tests.app.app_fixtures import Stage, open_stage


async def paste(stage: Stage, text: str) -> None:
    stage.app.chat_screen.prompt.area.post_message(events.Paste(text))
    await stage.settle()


@pytest.mark.parametrize("key", ["ctrl+j", "shift+enter", "alt+enter"])
async def test_a_newline_key_breaks_the_line_and_sends_nothing(tmp_path: Path, key: str) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.pilot.press("a", key, "b")
        assert stage.app.chat_screen.prompt.text == "a\nb"
        assert not stage.engine.sent(SubmitTurn)
        await stage.pilot.press("enter")
        await stage.settle()
        assert stage.engine.request().prompt[-1].content == "a\nb"  # type: ignore[union-attr]


async def test_a_burst_of_keys_acts_in_the_order_it_was_typed(tmp_path: Path) -> None:
    """A line piped into the terminal was sent before its letters had been inserted."""
    async with open_stage(tmp_path) as stage:
        for key in ("a", "b", "enter", "c", "ctrl+j", "d", "enter"):
            stage.app.post_message(events.Key(key, key if len(key) == 1 else None))
        await stage.settle()
        assert stage.engine.request().prompt[-1].content == "ab"  # type: ignore[union-attr]
        assert stage.app.chat_screen.prompt.text == "c\nd"


async def test_blank_text_is_not_sent(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.type("  \n ")
        await stage.pilot.press("enter")
        await stage.settle()
        assert not stage.engine.sent(SubmitTurn)


async def test_a_pasted_text_of_several_lines_is_inserted_and_not_sent(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await paste(stage, "one\r\ntwo\rthree")
        assert stage.app.chat_screen.prompt.text == "one\ntwo\nthree"
        assert not stage.engine.sent(SubmitTurn)


async def test_a_big_paste_becomes_a_chip_and_is_sent_whole_once(tmp_path: Path) -> None:
    lines = "\n".join(f"line {n} [x" for n in range(20_000))
    async with open_stage(tmp_path) as stage:
        await stage.type("Summarise:")
        await paste(stage, lines)
        assert stage.app.chat_screen.prompt.area.text == "Summarise:"
        assert "20,000 lines" in stage.text
        await stage.pilot.press("enter")
        await stage.settle()
        (turn,) = stage.engine.sent(SubmitTurn)
        content = turn.prompt[-1].content  # type: ignore[union-attr]
        assert content == f"{lines}\n\nSummarise:"
        assert stage.app.chat_screen.prompt.text == ""


async def test_backspace_in_an_empty_field_drops_the_last_chip(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await paste(stage, "a\n" * 500)
        await paste(stage, "b\n" * 900)
        assert "paste 2" in stage.text
        await stage.pilot.press("backspace")
        await stage.settle()
        assert "paste 2" not in stage.text
        assert stage.app.chat_screen.prompt.text == ("a\n" * 500).strip("\n")


async def test_up_in_an_empty_field_recalls_the_last_prompt(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("first prompt")
        stage.engine.answer("ok")
        await stage.settle()
        await stage.pilot.press("up")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "first prompt"


async def test_up_walks_back_through_the_questions_and_down_to_the_draft(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        prompt = stage.app.chat_screen.prompt
        for text in ("one", "two\nlines", "three"):
            await stage.ask(text)
            stage.engine.answer("ok")
            await stage.settle()
        await stage.type("my draft")
        seen = []
        for key in ("up", "up", "up", "up", "up", "down", "down", "down", "down", "down"):
            await stage.pilot.press(key)
            await stage.settle()
            seen.append(prompt.text)
        two = "two\nlines"
        assert seen[:5] == ["three", two, two, "one", "one"]
        assert seen[5:] == [two, "three", "my draft", "my draft", "my draft"]


async def test_without_earlier_questions_up_and_down_go_to_the_ends(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.type("text")
        await stage.pilot.press("up", "<")
        await stage.pilot.press("down", ">")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "<text>"


async def test_a_recalled_question_that_was_changed_is_the_draft(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        prompt = stage.app.chat_screen.prompt
        await stage.ask("one")
        stage.engine.answer("ok")
        await stage.settle()
        await stage.pilot.press("up", "!")
        await stage.settle()
        await stage.pilot.press("up", "down")
        await stage.settle()
        assert prompt.text == "one!"


async def test_attachments_come_back_with_the_draft(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.answer("ok")
        await stage.settle()
        await paste(stage, "a\n" * 500)
        await stage.pilot.press("up")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "one"
        await stage.pilot.press("down")
        await stage.settle()
        assert "paste 1" in stage.text


async def test_a_paste_can_be_looked_into(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await paste(stage, "[the first line\n" + "more\n" * 20_000)
        await stage.pilot.click("#prompt-chips")
        await stage.settle()
        assert "[the first line" in stage.text
        await stage.pilot.press("escape")
        assert stage.app.screen is stage.app.chat_screen


async def test_a_long_draft_is_a_chip_again_after_a_restart(tmp_path: Path) -> None:
    lines = "x\n" * 5_000 + "end"
    async with open_stage(tmp_path) as stage:
        await paste(stage, lines)
        stage.app.chat_screen.drafts.save()
    async with open_stage(tmp_path) as stage:
        assert stage.app.chat_screen.prompt.area.text == ""
        assert stage.app.chat_screen.prompt.text == lines


async def test_wide_characters_leave_the_cursor_behind_their_cells(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        area = stage.app.chat_screen.prompt.area
        before = area.cursor_screen_offset.x
        await stage.type("漢字")
        area.move_cursor(area.document.end)
        await stage.pilot.pause()
        assert area.cursor_screen_offset.x == before + 4
