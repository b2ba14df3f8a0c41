"""Answers that go on from a beginning, and the switch for thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from engine.commands import CancelTurn, Message
from engine.events import ModelLoaded, TurnStarted
from engine.prompt import encode_answer_start
from tests.engine.fakes_engine import (
    EOS,
    ByteTokenizer,
    EngineRig,
    FakeExecutable,
    FakeTemplate,
    LinearCache,
    RecurrentCache,
    RingCache,
    fake_model,
    of_type,
)

TALK = [("user", "say the alphabet")]


class ThinkingTemplate(FakeTemplate):
    """Opens a thought when told to think, and an empty one when told not to."""

    has_thinking_switch = True

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> list[int]:
        ids = super().encode(messages, add_generation_prompt=add_generation_prompt)
        opening = {True: b"<think>\n", False: b"<think></think>"}
        said = opening.get((extra or {}).get("enable_thinking"), b"")  # type: ignore[call-overload]
        return ids + list(said) * add_generation_prompt


class SpacingTokenizer(ByteTokenizer):
    """Puts a space in front of what it encodes, as SentencePiece vocabularies do."""

    def encode(self, text: str) -> list[int]:
        return list((" " + text).encode())


def thinking_rig() -> EngineRig:
    return EngineRig(model=fake_model(FakeExecutable(period=4), template=ThinkingTemplate()))


@pytest.mark.parametrize("cache", [LinearCache, RingCache, RecurrentCache])
def test_a_stopped_answer_goes_on_as_if_never_stopped_and_forwards_nothing_again(
    cache: type[LinearCache],
) -> None:
    whole = EngineRig(FakeExecutable(make_cache=cache, period=4)).ask(TALK, max_tokens=20)
    rig = EngineRig(FakeExecutable(make_cache=cache, period=4))
    request_id = rig.submit(TALK, max_tokens=20)
    rig.run(8)
    rig.engine.apply(CancelTurn(request_id))
    part = rig.finished(request_id).text
    rows = rig.executable.num_rows
    rest = rig.ask(TALK, answer_start=part, max_tokens=20 - len(part))
    assert part + rest.text == whole.text
    assert 0 < len(part) < 20
    assert rig.executable.num_rows - rows == len(rest.token_ids)


def test_tokens_of_the_cache_are_used_as_they_are_and_the_rest_is_encoded() -> None:
    model = fake_model()
    assert encode_answer_start("abcd", [1, 2], model, [1, 2, *b"abX"]) == list(b"abcd")
    assert encode_answer_start("ab", [1, 2], model, [1, 3, *b"ab"]) == list(b"ab")
    assert encode_answer_start("aé", [1], model, [1, *"aê".encode()]) == list("aé".encode())


@pytest.mark.parametrize("text", ["", "ab"])
def test_a_control_token_behind_the_beginning_is_left_to_the_answer(text: str) -> None:
    """Its piece is empty, and every text goes on with an empty one."""
    held = [1, 2, *text.encode(), EOS]
    assert encode_answer_start(text, [1, 2], fake_model(), held) == list(text.encode())


def test_a_beginning_gets_no_space_the_answer_did_not_have() -> None:
    model = fake_model(tokenizer=SpacingTokenizer())
    assert encode_answer_start("cd", [1], model) == list(b"cd")


def test_an_answer_that_filled_the_context_goes_on_without_the_oldest_turns() -> None:
    history = [("user", "q" * 60), ("assistant", "a" * 60), ("user", "the newest question")]
    rig = EngineRig(FakeExecutable(period=4), context_len=200)
    first = rig.ask(history, max_tokens=None)
    assert first.finish_reason == "context"
    rest = rig.ask(history, answer_start=first.text, max_tokens=5)
    assert of_type(rig.events, TurnStarted)[-1].dropped_messages == 2
    assert len(rest.token_ids) == 5


def test_a_beginning_makes_no_turn_drop_messages_that_fitted_before() -> None:
    history = [("user", "q" * 60), ("assistant", "a" * 60), ("user", "z" * 15)]
    rig = EngineRig(FakeExecutable(period=4), context_len=200)
    first = rig.ask(history, max_tokens=20)
    rig.ask(history, answer_start=first.text, max_tokens=5)
    assert of_type(rig.events, TurnStarted)[-1].dropped_messages == 0


def test_the_switch_reaches_the_template_and_none_leaves_it_alone() -> None:
    rig = thinking_rig()
    tails = []
    for think in (None, True, False):
        rig.ask(TALK, think=think)
        tails.append(of_type(rig.events, TurnStarted)[-1].prompt_tail)
    assert tails == ["<a>", "<think>\n", "</think>"]


def test_a_model_says_whether_it_has_the_switch() -> None:
    infos = [of_type(rig.events, ModelLoaded)[0].info for rig in (thinking_rig(), EngineRig())]
    assert [info.has_thinking_switch for info in infos] == [True, False]


def test_switching_thinking_keeps_the_cached_history() -> None:
    rig = thinking_rig()
    first = rig.ask(TALK, think=True)
    history = [*TALK, ("assistant", first.text), ("user", "and now")]
    second = rig.ask(history, think=False)
    assert second.stats.reused_tokens > len(TALK[0][1])


def test_a_thought_the_template_opens_is_not_opened_twice() -> None:
    rig = thinking_rig()
    first = rig.ask(TALK, think=True)
    rig.ask(TALK, think=True, answer_start="<think>\n" + first.text, max_tokens=1)
    holder = rig.engine.holder("chat")
    assert holder is not None
    text = bytes(token_id for token_id in holder.token_ids if token_id < 256)
    assert text.count(b"<think>") == 1


def test_each_way_of_thinking_shares_its_own_system_prefix() -> None:
    class SystemTemplate(FakeTemplate):
        def encode(
            self,
            messages: Sequence[Message],
            *,
            add_generation_prompt: bool = True,
            extra: Mapping[str, object] | None = None,
        ) -> list[int]:
            mark = "!" if (extra or {}).get("enable_thinking") else "."
            told = [Message(m.role, mark + m.content) for m in messages]
            return super().encode(told, add_generation_prompt=add_generation_prompt)

    rig = EngineRig(model=fake_model(FakeExecutable(period=4), template=SystemTemplate()))
    talk = [("system", "be kind and brief, and answer in the language of the question"), *TALK]
    for think in (False, True):
        rig.ask(talk, chat_id=f"warm {think}", think=think)
        end = rig.ask(talk, chat_id=f"new {think}", think=think)
        assert end.stats.reused_tokens > len(talk[0][1])
