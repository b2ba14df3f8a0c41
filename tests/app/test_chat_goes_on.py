"""Answers that go on, chats that are found again, and chats nobody wrote to."""

from __future__ import annotations

from pathlib import Path

from app.settings import Settings
from engine.commands import SubmitTurn
from engine.events import TurnStarted
from storage.chats import ChatStore
from storage.errors import StorageError
from tests.app.app_fixtures import SMOL, Stage, open_stage
from tests.app.fake_engine import FakeEngine


async def enter(stage: Stage, text: str) -> None:
    await stage.type(text)
    await stage.pilot.press("enter")
    await stage.settle()


async def stop_half(stage: Stage) -> None:
    await stage.ask("Tell me")
    stage.engine.begin()
    stage.engine.say("Once upon ")
    await stage.settle()
    await stage.pilot.press("escape")
    await stage.settle()


async def test_a_stopped_answer_goes_on_as_the_same_message(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stop_half(stage)
        assert "/continue goes on" in stage.text
        (_, before) = stage.store.messages(stage.chat_id)
        await enter(stage, "/continue")
        turn = stage.engine.request()
        assert (turn.answer_start, turn.attempt) == ("Once upon ", before.attempt)
        assert [m.content for m in turn.prompt] == ["Tell me"]  # type: ignore[union-attr]
        stage.engine.begin()
        stage.engine.say("a time.")
        await stage.settle()
        assert "Once upon a time." in stage.text
        stage.engine.finish()
        await stage.settle()
        (_, after) = stage.store.messages(stage.chat_id)
        assert (after.id, after.content, after.state) == (
            before.id,
            "Once upon a time.",
            "complete",
        )
        assert after.stats["completion_tokens"] == 4
        assert "/continue" not in stage.text


async def test_an_answer_that_goes_on_and_is_stopped_at_once_loses_nothing(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stop_half(stage)
        for _ in range(2):
            await enter(stage, "/continue")
            stage.engine.begin()
            await stage.pilot.press("escape")
            await stage.settle()
            assert stage.store.messages(stage.chat_id)[-1].content == "Once upon "
        await enter(stage, "/continue")
        stage.engine.fail("the device is gone")
        await stage.settle()
        assert stage.store.messages(stage.chat_id)[-1].content == "Once upon "


async def test_a_full_contexts_answer_goes_on_by_a_key_on_it(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("Tell me")
        stage.engine.begin()
        stage.engine.say("half")
        stage.engine.finish("context")
        await stage.settle()
        await stage.pilot.press("ctrl+up", "g")
        await stage.settle()
        assert stage.engine.request().answer_start == "half"


async def fill_context(stage: Stage, question: str, *, dropped: int = 0) -> None:
    await stage.ask(question)
    stage.engine.begin(dropped=dropped)
    stage.engine.say("half")
    stage.engine.finish("context")
    await stage.settle()


async def test_an_answer_that_filled_the_context_alone_is_not_offered_more(tmp_path: Path) -> None:
    """It was tried, failed, and the answer stood there as failed."""
    async with open_stage(tmp_path) as stage:
        stage.engine.finish_load(context_len=42)
        await fill_context(stage, "one")
        assert "/continue" not in stage.text
        await fill_context(stage, "two")
        assert "/continue goes on" in stage.text
        await fill_context(stage, "three", dropped=4)
        assert "/continue" not in stage.text
        stage.engine.finish_load(context_len=4096)
        await stage.settle()
        await stage.app.chat_screen.open_chat(stage.chat_id)
        assert "/continue goes on" in stage.text


async def test_going_on_that_fails_at_once_leaves_the_answer_as_it_was(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await fill_context(stage, "Tell me")
        before = stage.store.messages(stage.chat_id)[-1]
        await enter(stage, "/continue")
        stage.engine.begin()
        stage.engine.fail("it does not fit")
        await stage.settle()
        after = stage.store.messages(stage.chat_id)[-1]
        assert (after.state, after.model, after.content) == ("complete", before.model, "half")
        assert after.stats == {**before.stats, "note": "it does not fit"}
        assert "it does not fit" in stage.text


async def test_an_answer_another_window_went_on_with_is_left_to_it(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stop_half(stage)
        answer = stage.store.messages(stage.chat_id)[-1]
        other = ChatStore(stage.store.database)
        writer = other.resume_answer(answer.id, model="m", content="Once upon ", state="stopped")
        await enter(stage, "/continue")
        assert "being written in another window" in stage.notices
        assert len(stage.engine.sent(SubmitTurn)) == 1
        assert "/continue" not in stage.text
        writer.append("a time.")
        writer.finish("complete")
        assert stage.store.message(answer.id).content == "Once upon a time."


async def test_an_answer_begun_before_the_load_is_named_by_the_loaded_model(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(loads_by_itself=False)
    settings = Settings(system_prompt="", model=str(SMOL.path))
    async with open_stage(tmp_path, engine=engine, settings=settings) as stage:
        await stage.ask("hello")
        engine.finish_load(SMOL.name)
        await stage.settle()
        engine.answer("hi")
        await stage.settle()
        assert stage.store.messages(stage.chat_id)[-1].model == SMOL.name


async def test_an_answer_that_repeated_itself_is_not_offered_more_of_it(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("Tell me")
        stage.engine.begin()
        stage.engine.say("a a a")
        stage.engine.finish("repetition")
        await stage.settle()
        assert "/continue" not in stage.text


async def test_a_whole_answer_does_not_go_on(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("Tell me")
        stage.engine.answer("All of it.")
        await stage.settle()
        await enter(stage, "/continue")
        assert "Only a newest answer that ended early" in stage.notices
        assert len(stage.engine.sent(SubmitTurn)) == 1


async def test_a_thought_goes_on_thinking(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, "/think off")
        await stage.ask("Tell me")
        stage.engine.begin()
        stage.engine.say("<think>\nhm")
        await stage.settle()
        await stage.pilot.press("escape")
        await stage.settle()
        await enter(stage, "/continue")
        assert stage.engine.request().think is True


async def test_a_thought_the_template_opened_is_folded_and_stored_whole(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("why")
        turn = stage.engine.request()
        stage.engine.emit(TurnStarted(turn.request_id, turn.chat_id, 9, 0, 0, "<think>\n"))
        stage.engine.say("a secret thought")
        await stage.settle()
        assert "a secret thought" not in stage.text
        stage.engine.say("\n</think>\n\nParis")
        stage.engine.finish()
        await stage.settle()
        content = stage.store.messages(stage.chat_id)[-1].content
        assert content == "<think>\na secret thought\n</think>\n\nParis"
        assert "Paris" in stage.text


async def test_copies_leave_the_thinking_out(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        copied: list[str] = []
        stage.app.copy = lambda text, what: copied.append(text)  # type: ignore[method-assign]
        await stage.ask("why")
        stage.engine.answer("<think>\n```\nno\n```\n</think>\n\nSee:\n\n```\nyes\n```")
        await stage.settle()
        await stage.pilot.press("ctrl+o")
        await stage.pilot.press("ctrl+up", "c", "y")
        await stage.settle()
        assert copied == ["See:\n\n```\nyes\n```"] * 2 + ["yes"]


async def test_a_hit_in_another_branch_is_shown(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("Name a fruit")
        stage.engine.answer("A rare durian.")
        await stage.settle()
        await stage.pilot.press("ctrl+r")
        stage.engine.answer("An apple.")
        await stage.settle()
        await stage.pilot.press("ctrl+n")
        await stage.pilot.press("ctrl+f")
        await stage.settle()
        await stage.pilot.press(*"durian", "enter")
        await stage.settle()
        assert "A rare durian." in stage.text
        assert "An apple." not in stage.text


async def test_a_hit_far_above_is_brought_into_view(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        chat = stage.store.create()
        for number in range(30):
            stage.store.add_message(chat.id, "user", f"question {number} {'pear' * (number == 2)}")
            writer = stage.store.begin_answer(chat.id, model="m")
            writer.append("answer\n\n" * 3)
            writer.finish("complete")
        await stage.pilot.press("ctrl+f")
        await stage.settle()
        await stage.pilot.press(*"pear", "enter")
        await stage.settle()
        await stage.settle()
        assert "question 2 pear" in stage.text


async def test_a_hit_that_is_not_shown_mounts_nothing(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        chat = stage.store.create()
        for number in range(30):
            stage.store.add_message(chat.id, "user", f"question {number}")
        await stage.app.chat_screen.open_chat(chat.id)
        transcript = stage.app.chat_screen.transcript
        await transcript.reveal(-1)
        assert len(transcript.views) == 20


async def test_another_models_chat_says_so_and_can_have_it_back(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        chat = stage.store.create()
        stage.store.add_message(chat.id, "user", "q")
        writer = stage.store.begin_answer(chat.id, model="qwen3-8b")
        writer.append("a")
        writer.finish("complete")
        await stage.app.chat_screen.open_chat(chat.id)
        await stage.settle()
        assert "Answered by qwen3-8b; smollm2-135m is loaded" in stage.text
        titles = [c.title for c in stage.app.get_system_commands(stage.app.screen)]
        assert "Use qwen3-8b" in titles
        await stage.ask("go on with this one")
        assert "Answered by" not in stage.text


async def test_what_is_typed_behind_enter_stays(tmp_path: Path) -> None:
    """The field was emptied after the question had been stored, with what stood in it by then."""
    async with open_stage(tmp_path) as stage:
        screen = stage.app.chat_screen
        ask = screen._ask

        async def ask_slowly(text: str) -> None:
            screen.prompt.area.insert("the next one")
            await ask(text)

        screen._ask = ask_slowly  # type: ignore[method-assign]
        await stage.ask("first")
        assert screen.prompt.text == "the next one"


async def test_a_question_that_cannot_be_stored_is_back_in_the_prompt(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:

        async def fail(text: str) -> None:
            raise StorageError("the disk is full")

        stage.app.chat_screen._ask = fail  # type: ignore[method-assign]
        await stage.ask("precious")
        assert stage.app.chat_screen.prompt.text == "precious"
        assert "the disk is full" in stage.notices


async def test_chats_nobody_wrote_to_leave_no_trace(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        for _ in range(3):
            await stage.type("x")
            stage.app.chat_screen.drafts.save()
            assert stage.store.list_chats()
            await stage.pilot.press("backspace", "ctrl+n")
            await stage.settle()
        assert stage.store.list_chats() == []


async def test_a_chat_with_a_draft_or_a_system_prompt_of_its_own_is_kept(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.type("half a thought")
        await stage.pilot.press("ctrl+n")
        await stage.settle()
        await enter(stage, "/system be brief")
        await stage.pilot.press("ctrl+n")
        await stage.settle()
        assert sorted(chat.draft for chat in stage.store.list_chats()) == ["", "half a thought"]
