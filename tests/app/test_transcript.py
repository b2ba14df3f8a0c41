"""Messages: final form, code blocks, thinking, long texts and long chats."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from app.shown import ShownMessage
from app.thinking import split_thinking
from app.widgets.answer import AnswerView
from app.widgets.markdown import AnswerMarkdown
from app.widgets.message import MessageView, find_code_blocks
from app.widgets.transcript import PAGE_MESSAGES
from engine.events import TurnStats
from tests.app.app_fixtures import Stage, open_stage

DOCUMENT = """# Title

Some *text* with `code` and a [link][ref].

- item
  ```python
  x = [1, "3"]
  ```
- next

| a | b |
|---|---|
| 1 | 2 |

> quote

[ref]: https://example.org
"""


async def render(stage: Stage, pieces: list[str]) -> list[str]:
    await stage.app.chat_screen.open_chat(None)
    transcript = stage.app.chat_screen.transcript
    view = await transcript.add(ShownMessage(1, "assistant", "", state="streaming"))
    for end in range(1, len(pieces) + 1):
        await view.stream("".join(pieces[:end]), TurnStats())
        await view.draw()
    await view.finish(ShownMessage(1, "assistant", "".join(pieces)))
    await stage.settle()
    return stage.lines()


async def test_a_streamed_answer_ends_as_the_whole_would_look(tmp_path: Path) -> None:
    rng = random.Random(4)
    async with open_stage(tmp_path, size=(100, 50)) as stage:
        whole = await render(stage, [DOCUMENT])
        for _ in range(4):
            pieces, rest = [], DOCUMENT
            while rest:
                cut = rng.randint(1, 8)
                pieces.append(rest[:cut])
                rest = rest[cut:]
            assert await render(stage, pieces) == whole


@pytest.mark.parametrize(
    ("text", "thinking", "answer", "is_thinking"),
    [
        ("plain", "", "plain", False),
        ("<think>\nhmm\n</think>\n\nyes", "hmm", "yes", False),
        ("<think>\nhm", "hm", "", True),
        ("<thi", "", "", True),
        ("hmm\n</think>\n\nyes", "hmm", "yes", False),
        ("the tag `</think>` ends it", "", "the tag `</think>` ends it", False),
        ("<think>a</think>b </think> c", "a", "b </think> c", False),
        ("<|channel>thought\nhmm\n<channel|>\nyes", "hmm", "yes", False),
        ("<|channel>thought\n<channel|>yes", "", "yes", False),
        ("<|channel>thought\nhm", "hm", "", True),
        ("<|chan", "", "", True),
        ("<|channel>final\nyes", "", "<|channel>final\nyes", False),
        ("", "", "", False),
    ],
)
def test_thinking_is_told_from_the_answer(
    text: str, thinking: str, answer: str, is_thinking: bool
) -> None:
    split = split_thinking(text)
    assert (split.thinking, split.answer, split.is_thinking) == (thinking, answer, is_thinking)


def test_code_blocks_are_found_whole() -> None:
    text = "a\n```py\nx = '```'\n```\nb\n~~~\ny\n~~~\n```\nopen [end"
    assert find_code_blocks(text) == ["x = '```'", "y", "open [end"]


async def test_a_code_block_can_be_copied_by_key_and_by_click(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("code")
        stage.engine.answer("Here:\n\n```python\nprint([1])\n```\n")
        await stage.settle()
        await stage.pilot.press("ctrl+up", "y")
        await stage.settle()
        assert stage.app.clipboard == "print([1])"
        stage.app.copy_to_clipboard("")
        await stage.pilot.click(".copy-code")
        await stage.settle()
        assert stage.app.clipboard == "print([1])"


async def test_the_newest_answer_is_copied_as_it_was_written(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("x")
        stage.engine.answer("An **answer** [/]")
        await stage.settle()
        await stage.pilot.press("ctrl+o")
        await stage.settle()
        assert stage.app.clipboard == "An **answer** [/]"


async def test_messages_of_100k_characters_are_shown_and_the_keys_answer(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        chat_id = stage.store.create().id
        stage.store.add_message(chat_id, "user", "x" * 100_000)
        writer = stage.store.begin_answer(chat_id, model="m")
        writer.append("\n\n".join(f"paragraph {n} with some words" for n in range(3500)))
        writer.finish("complete")
        await stage.app.chat_screen.open_chat(chat_id)
        await stage.settle()
        assert "paragraph 3499" in stage.text
        await stage.pilot.press("h", "i")
        assert stage.app.chat_screen.prompt.text == "hi"


async def test_a_long_chat_opens_with_its_newest_page_and_brings_older_ones(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        chat_id = stage.store.create().id
        for number in range(120):
            stage.store.add_message(chat_id, "user", f"question {number}")
        await stage.app.chat_screen.open_chat(chat_id)
        await stage.settle()
        transcript = stage.app.chat_screen.transcript
        assert len(transcript.views) == PAGE_MESSAGES
        assert "question 119" in stage.text
        transcript.query_one("EarlierMessages").focus()
        await stage.pilot.press("enter")
        await stage.settle()
        assert len(transcript.views) == 2 * PAGE_MESSAGES
        assert transcript.views[0].shown.text == f"question {120 - 2 * PAGE_MESSAGES}"


async def test_an_interrupted_answer_is_marked_and_opened_first_after_a_crash(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("tell me")
        stage.engine.begin()
        stage.engine.say("as far as this")
        await stage.settle()
        stage.store.flush()
        chat_id = stage.chat_id
        # The process dies: nothing finishes the answer, and its owner is gone.
        with stage.store._db.transaction() as db:
            db.execute("UPDATE messages SET owner_pid = 0 WHERE state = 'partial'")
        stage.app.conversations._turns.clear()
    async with open_stage(tmp_path) as stage:
        assert stage.chat_id == chat_id
        assert "as far as this" in stage.text
        assert "interrupted" in stage.text


async def test_messages_are_told_apart_by_their_role(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("q")
        stage.engine.answer("a")
        await stage.settle()
        roles = [view.has_class("user") for view in stage.app.screen.query(MessageView)]
        assert roles == [True, False]


PARAGRAPHS = "\n\n".join(f"paragraph {n} with some more words" for n in range(300))


class SlowParse:
    """Holds the first update of a Markdown piece until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        update = AnswerMarkdown.update

        async def wait_and_update(piece: AnswerMarkdown, text: str) -> None:
            self.begun.set()
            await self.go_on.wait()
            await update(piece, text)

        monkeypatch.setattr(AnswerMarkdown, "update", wait_and_update)


async def test_a_chat_left_just_as_its_answer_ends_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view was removed while a piece was parsed; the next piece found no place: MountError."""
    async with open_stage(tmp_path) as stage:
        transcript = stage.app.chat_screen.transcript
        await transcript.add(ShownMessage(1, "assistant", "", state="streaming"))
        parse = SlowParse(monkeypatch)
        ended = asyncio.create_task(transcript.finish(ShownMessage(1, "assistant", PARAGRAPHS)))
        await parse.begun.wait()
        left = asyncio.create_task(transcript.show([], "nothing"))
        await stage.pilot.pause()
        parse.go_on.set()
        await asyncio.gather(ended, left)
        assert transcript.views == []


async def test_a_view_that_is_removed_while_it_draws_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        transcript = stage.app.chat_screen.transcript
        view = await transcript.add(ShownMessage(1, "assistant", "", state="streaming"))
        answer = view.query_one(AnswerView)
        parse = SlowParse(monkeypatch)
        drawn = asyncio.create_task(answer.show(PARAGRAPHS))
        await parse.begun.wait()
        removed = asyncio.create_task(_remove(view))
        await stage.pilot.pause()
        parse.go_on.set()
        await asyncio.gather(drawn, removed)
        await answer.show("all over")
        await answer.stream("all over again")


async def _remove(view: MessageView) -> None:
    await view.remove()
