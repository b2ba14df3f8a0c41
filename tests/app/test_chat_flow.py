"""What a person does in a chat, on a scripted engine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from app.screens.dialogs import EditDialog
from app.settings import SamplingSettings, Settings
from app.widgets.message import MessageView
from engine.commands import CancelTurn, LoadModel, Stop, SubmitTurn, UpdateSpeculation
from engine.events import Notice
from engine.sampling_params import SamplingParams
from tests.app.app_fixtures import Stage, open_stage
from tests.app.fake_engine import FakeEngine


def prompt_texts(turn: SubmitTurn) -> list[tuple[str, str]]:
    assert isinstance(turn.prompt, tuple)
    return [(m.role, m.content) for m in turn.prompt]  # type: ignore[union-attr]


def contents(stage: Stage) -> list[str]:
    return [message.content for message in stage.store.messages(stage.chat_id)]


async def test_an_answer_streams_into_the_transcript_and_the_store(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("What is the capital of France?")
        stage.engine.begin()
        stage.engine.say("The capital is ")
        await stage.settle()
        assert "The capital is" in stage.text
        stage.engine.say("**Paris**.")
        stage.engine.finish()
        await stage.settle()
        assert "The capital is Paris." in stage.text
        assert contents(stage) == ["What is the capital of France?", "The capital is **Paris**."]


async def test_a_second_question_carries_the_whole_talk(tmp_path: Path) -> None:
    settings = Settings(system_prompt="Be brief.")
    async with open_stage(tmp_path, settings=settings) as stage:
        await stage.ask("A")
        stage.engine.answer("B")
        await stage.settle()
        await stage.ask("C")
        first, second = stage.engine.sent(SubmitTurn)
        assert prompt_texts(second) == [
            ("system", "Be brief."),
            ("user", "A"),
            ("assistant", "B"),
            ("user", "C"),
        ]
        assert first.chat_id == second.chat_id
        assert first.request_id != second.request_id


async def test_escape_keeps_the_partial_answer_marked_stopped(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("Count to ten")
        stage.engine.begin()
        stage.engine.say("one two three")
        await stage.settle()
        await stage.pilot.press("escape")
        await stage.settle()
        (cancel,) = stage.engine.sent(CancelTurn)
        assert cancel.request_id == stage.engine.sent(SubmitTurn)[0].request_id
        assert "stopped" in stage.text
        answer = stage.store.messages(stage.chat_id)[-1]
        assert (answer.content, answer.state) == ("one two three", "stopped")


async def test_escape_stops_while_the_prompt_is_being_read(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("A long text")
        stage.engine.begin()
        stage.engine.prefill(300, 1000)
        await stage.settle()
        assert "reading 30%" in stage.text
        await stage.pilot.press("escape")
        await stage.settle()
        assert stage.store.messages(stage.chat_id)[-1].state == "stopped"


async def test_escape_stops_a_turn_that_waits_for_the_model(tmp_path: Path) -> None:
    engine = FakeEngine(loads_by_itself=False)
    async with open_stage(tmp_path, engine=engine) as stage:
        await stage.ask("hello")
        assert not engine.sent(SubmitTurn)
        assert "waiting" in stage.text
        await stage.pilot.press("escape")
        engine.finish_load()
        await stage.settle()
        assert not engine.sent(SubmitTurn)
        assert stage.store.messages(stage.chat_id)[-1].state == "stopped"


async def test_a_question_asked_during_the_load_is_answered_after_it(tmp_path: Path) -> None:
    engine = FakeEngine(loads_by_itself=False)
    async with open_stage(tmp_path, engine=engine) as stage:
        await stage.ask("hello")
        engine.finish_load()
        await stage.settle()
        (turn,) = engine.sent(SubmitTurn)
        assert prompt_texts(turn) == [("user", "hello")]


async def test_regenerate_asks_with_the_same_prompt_as_a_new_attempt(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        for question, answer in (("A", "B"), ("C", "D")):
            await stage.ask(question)
            stage.engine.answer(answer)
            await stage.settle()
        await stage.pilot.press("ctrl+r")
        await stage.settle()
        _, second, third = stage.engine.sent(SubmitTurn)
        assert third.prompt == second.prompt
        assert (second.attempt, third.attempt) == (0, 1)
        stage.engine.answer("D2")
        await stage.settle()
        assert contents(stage) == ["A", "B", "C", "D2"]
        assert "← 2/2 →" in stage.text


async def test_an_old_answer_is_one_key_away(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("A")
        stage.engine.answer("first answer")
        await stage.settle()
        await stage.pilot.press("ctrl+r")
        stage.engine.answer("second answer")
        await stage.settle()
        assert "first answer" not in stage.text
        await stage.pilot.press("ctrl+up", "left")
        await stage.settle()
        assert "first answer" in stage.text
        assert "← 1/2 →" in stage.text
        assert contents(stage) == ["A", "first answer"]


async def test_a_regeneration_stopped_before_its_first_character_leaves_the_old_answer(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("A")
        stage.engine.answer("kept answer")
        await stage.settle()
        await stage.pilot.press("ctrl+r")
        stage.engine.begin()
        await stage.settle()
        await stage.pilot.press("escape")
        await stage.settle()
        assert contents(stage) == ["A", "kept answer"]
        assert "kept answer" in stage.text


async def test_editing_a_question_branches_and_keeps_the_old_branch(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        for question, answer in (("first", "one"), ("second", "two")):
            await stage.ask(question)
            stage.engine.answer(answer)
            await stage.settle()
        stage.app.chat_screen.transcript.views[0].focus()
        await stage.pilot.press("e")
        await stage.settle()
        dialog = stage.app.screen
        assert isinstance(dialog, EditDialog)
        dialog.query_one("#dialog-text").text = "other first"  # type: ignore[attr-defined]
        await stage.pilot.press("f10")
        await stage.settle()
        assert prompt_texts(stage.engine.sent(SubmitTurn)[-1]) == [("user", "other first")]
        stage.engine.answer("uno")
        await stage.settle()
        assert contents(stage) == ["other first", "uno"]
        stage.app.chat_screen.transcript.views[0].focus()
        await stage.pilot.press("left")
        await stage.settle()
        assert contents(stage) == ["first", "one", "second", "two"]


async def test_an_answer_goes_on_while_another_chat_is_open(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("slow question")
        slow = stage.chat_id
        stage.engine.begin()
        stage.engine.say("half")
        await stage.settle()
        await stage.pilot.press("ctrl+n")
        await stage.settle()
        assert "half" not in stage.text
        assert "+1 elsewhere" in stage.text
        stage.engine.say(" and whole")
        await stage.settle()
        await stage.app.chat_screen.open_chat(slow)
        await stage.settle()
        assert "half and whole" in stage.text
        stage.engine.say(", live")
        await stage.settle()
        assert "half and whole, live" in stage.text


async def test_a_chat_whose_answer_ended_unseen_is_marked_until_it_is_opened(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("slow question")
        slow = stage.chat_id
        await stage.pilot.press("ctrl+n")
        await stage.settle()
        assert "▸ slow question" in stage.text
        stage.engine.answer("done")
        await stage.settle()
        assert "● slow question" in stage.text
        await stage.app.chat_screen.open_chat(slow)
        await stage.settle()
        assert "● slow question" not in stage.text


async def test_two_chats_answer_at_once_without_mixing(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("zebra question")
        first = stage.chat_id
        await stage.pilot.press("ctrl+n")
        await stage.ask("walrus question")
        second = stage.chat_id
        one, two = stage.engine.sent(SubmitTurn)
        for word in ("a", "b", "c"):
            stage.engine.say(f"zebra {word} ", one.request_id)
            stage.engine.say(f"walrus {word} ", two.request_id)
        stage.engine.finish(request_id=one.request_id)
        stage.engine.finish(request_id=two.request_id)
        await stage.settle()
        assert stage.store.messages(first)[-1].content == "zebra a zebra b zebra c "
        assert stage.store.messages(second)[-1].content == "walrus a walrus b walrus c "
        assert "zebra a" not in stage.text


async def test_quitting_keeps_the_partial_answer_and_stops_the_engine(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("tell me all")
        stage.engine.begin()
        stage.engine.say("this much")
        await stage.settle()
        chat_id = stage.chat_id
        await stage.pilot.press("ctrl+q")
        await stage.pilot.pause()
        answer = stage.store.messages(chat_id)[-1]
        assert (answer.content, answer.state) == ("this much", "stopped")
    assert stage.engine.sent(Stop)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM handling there")
async def test_a_request_to_end_keeps_the_partial_answer(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("tell me all")
        stage.engine.begin()
        stage.engine.say("this much")
        await stage.settle()
        chat_id = stage.chat_id
        os.kill(os.getpid(), signal.SIGTERM)
        await stage.until(lambda: stage.store.messages(chat_id)[-1].state == "stopped")
        answer = stage.store.messages(chat_id)[-1]
        assert (answer.content, answer.state) == ("this much", "stopped")


async def test_a_chat_reads_the_same_after_a_restart(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("A [/INST] question")
        stage.engine.begin()
        stage.engine.say("An **answer**", draft_n=35, draft_n_accepted=20)
        stage.engine.finish()
        await stage.settle()
        chat_id, before = stage.chat_id, stage.text
    async with open_stage(tmp_path, chat_id=chat_id) as stage:
        shown = [line for line in before.splitlines() if "answer" in line or "question" in line]
        assert [line for line in stage.lines() if "answer" in line or "question" in line] == shown
        assert "drafts 20/35" in stage.text


async def test_a_draft_is_there_again_after_a_crash(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.type("45 minutes of [work")
        stage.app.chat_screen.drafts.save()  # what the timer calls a second later
    async with open_stage(tmp_path) as stage:
        assert stage.app.chat_screen.prompt.text == "45 minutes of [work"


async def test_each_chat_keeps_its_own_draft(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.answer("1")
        await stage.settle()
        first = stage.chat_id
        await stage.type("draft of one")
        await stage.pilot.press("ctrl+n")
        await stage.type("draft of two")
        await stage.app.chat_screen.open_chat(first)
        assert stage.app.chat_screen.prompt.text == "draft of one"


async def test_ctrl_t_switches_speculation_under_the_running_answer(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("go")
        stage.engine.begin()
        stage.engine.say("text")
        await stage.settle()
        await stage.pilot.press("ctrl+t")
        await stage.settle()
        (update,) = stage.engine.sent(UpdateSpeculation)
        assert not update.options.is_enabled
        assert "spec off" in stage.text
        assert len(stage.engine.sent(LoadModel)) == 1
        assert not stage.saved[-1].speculation.is_enabled
        await stage.pilot.press("ctrl+t")
        await stage.settle()
        assert stage.engine.sent(UpdateSpeculation)[-1].options.is_enabled


async def test_enter_while_an_answer_runs_keeps_what_was_typed(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        await stage.ask("two")
        assert len(stage.engine.sent(SubmitTurn)) == 1
        assert stage.app.chat_screen.prompt.text == "two"


HOSTILE = [
    "[/]",
    "[/",
    "[bold",
    "[b + ",
    '[1, "3"]',
    "[@click=app.quit]x[/]",
    "[red]",
    "\\[",
    "see [/INST] ok",
    "# [/mnt/data/models]",
    "yield [link=x]y",
    "List<int> y",
    "漢字漢字 🙂👩‍👩‍👧",
]


async def test_any_text_is_shown_as_it_is(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        for text in HOSTILE:
            await stage.pilot.press("ctrl+n")
            await stage.ask(text)
            stage.engine.begin()
            for character in text:
                stage.engine.say(character)
            stage.engine.finish()
            stage.engine.emit(Notice(text))
            stage.store.rename(stage.chat_id, text)
            await stage.app.chat_screen.open_chat(stage.chat_id)
            await stage.settle()
            # The question is literal; the answer is Markdown, so only its marks may be gone.
            answer = text.strip().removeprefix("# ").replace("\\[", "[")
            assert text.strip() in stage.text
            assert sum(answer in line for line in stage.lines()) >= 3, text
            assert contents(stage) == [text, text]


async def test_settings_of_a_run_reach_the_turn(tmp_path: Path) -> None:
    settings = Settings(sampling=SamplingSettings(temperature=0.0, seed=7), think="off")
    async with open_stage(tmp_path, settings=settings) as stage:
        stage.app.conversations.recommended = {"temperature": 0.6, "top_k": 20}
        await stage.ask("x")
        (turn,) = stage.engine.sent(SubmitTurn)
        assert turn.sampling == SamplingParams(temperature=0.0, top_k=20, seed=7)
        assert turn.think is False


async def test_thinking_is_folded_and_unfolds_with_a_key(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("why")
        stage.engine.begin()
        for piece in ("<thi", "nk>\nsecret musing", "\n</thi", "nk>\n\nThe answer"):
            stage.engine.say(piece)
            await stage.settle()
        stage.engine.finish()
        await stage.settle()
        assert "secret musing" not in stage.text
        assert "Thought (2 words)" in stage.text
        assert "The answer" in stage.text
        await stage.pilot.press("ctrl+up", "t")
        await stage.settle()
        assert "secret musing" in stage.text


async def test_the_transcript_stays_where_the_person_scrolled(tmp_path: Path) -> None:
    async with open_stage(tmp_path, size=(80, 16)) as stage:
        await stage.ask("long")
        stage.engine.begin()
        stage.engine.say("\n\n".join(f"line {n}" for n in range(60)))
        await stage.settle()
        assert "line 59" in stage.text
        await stage.pilot.press("pageup")
        await stage.settle()
        place = stage.app.chat_screen.transcript.scroll_y
        stage.engine.say("\n\n" + "\n\n".join(f"more {n}" for n in range(30)))
        await stage.settle()
        assert stage.app.chat_screen.transcript.scroll_y == place
        for _ in range(20):
            await stage.pilot.press("pagedown")
        stage.engine.say("\n\nthe very end")
        await stage.settle()
        assert "the very end" in stage.text


@pytest.mark.parametrize("size", [(20, 5), (40, 12), (80, 24), (200, 60)])
async def test_every_size_works_while_an_answer_streams(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("go")
        stage.engine.begin()
        stage.engine.say("some words and ")
        await stage.pilot.resize_terminal(*size)
        stage.engine.say("the end")
        await stage.settle()
        assert "end" in stage.text
        assert "answering" in stage.text
        assert len(stage.app.screen.query(MessageView)) == 2


async def test_a_reopened_chat_says_how_much_of_the_context_it_takes(tmp_path: Path) -> None:
    """It said 0 until its next turn; one of another run that stored nothing says nothing."""
    async with open_stage(tmp_path) as stage:
        assert "0/8.2k" in stage.text
        await stage.ask("one")
        stage.engine.answer("some words that count")
        await stage.settle()
        assert "44/8.2k" in stage.text
        chat_id = stage.chat_id
        old = stage.store.create().id
        stage.store.add_message(old, "user", "asked long ago")
    async with open_stage(tmp_path, chat_id=chat_id) as stage:
        assert "44/8.2k" in stage.text
        await stage.ask("two")
        assert "44/8.2k" in stage.text
        await stage.app.chat_screen.open_chat(old)
        await stage.settle()
        assert "/8.2k" not in stage.text
        await stage.pilot.press("ctrl+n")
        await stage.settle()
        assert "0/8.2k" in stage.text


async def test_another_version_says_how_much_of_the_context_it_takes(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.answer("a b c d e f")
        await stage.settle()
        await stage.pilot.press("ctrl+r")
        await stage.settle()
        stage.engine.answer("a")
        await stage.settle()
        assert "41/8.2k" in stage.text
        await stage.pilot.press("ctrl+up", "left")
        await stage.settle()
        assert "46/8.2k" in stage.text
