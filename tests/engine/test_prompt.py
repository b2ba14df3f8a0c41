"""From messages, text or ids to a prompt that fits the context."""

from __future__ import annotations

import pytest

from engine.events import (
    Notice,
    TurnStarted,
)
from engine.speculative.options import SpeculationOptions
from tests.engine.fakes_engine import (
    BOS,
    PLAIN,
    EngineRig,
    FakeExecutable,
    LinearCache,
    fake_model,
    of_type,
)

PROMPT = tuple(b"the cat sat on the mat and the cat sat on the hat, " * 2)


def _rig(
    cache: type[LinearCache] = LinearCache,
    options: SpeculationOptions = PLAIN,
    *,
    period: int = 4,
    **fields: object,
) -> EngineRig:
    executable = FakeExecutable(make_cache=cache, period=period)
    return EngineRig(executable, speculation=options, **fields)  # type: ignore[arg-type]


def test_oldest_turns_are_dropped_and_system_and_newest_message_stay() -> None:
    history = [("system", "S" * 10)]
    for n in range(10):
        history += [("user", f"question {n} " * 2), ("assistant", f"answer {n} " * 2)]
    history.append(("user", "the newest question"))
    rig = _rig(context_len=200)
    rig.ask(history, max_tokens=10)
    started = of_type(rig.events, TurnStarted)[-1]
    assert started.dropped_messages > 0
    assert started.dropped_messages % 2 == 0
    holder = rig.engine.holder("chat")
    assert holder is not None
    text = bytes(i for i in holder.token_ids if i < 256)
    assert text.startswith(b"S" * 10 + b"question")
    assert b"the newest question" in text
    assert b"question 0" not in text


def test_what_was_dropped_stays_dropped_so_that_the_cache_is_reused() -> None:
    """Dropping just enough each turn would forward the whole context with every message."""
    rig = _rig(context_len=400)
    history = []
    reused = 0
    for n in range(40):
        history.append(("user", f"question number {n}"))
        end = rig.ask(history, max_tokens=6)
        history.append(("assistant", end.text))
        reused += end.stats.reused_tokens > 100
    assert of_type(rig.events, TurnStarted)[-1].dropped_messages > 20
    assert reused > 20


def test_the_fail_policy_drops_nothing() -> None:
    rig = _rig(context_len=100)
    history = [("user", "x" * 60), ("assistant", "y" * 60), ("user", "z")]
    request_id = rig.submit(history, context_policy="fail")
    error = rig.failed(request_id).error
    assert error.kind == "does_not_fit"
    assert "100" in error.message


def test_a_newest_message_that_does_not_fit_alone_fails() -> None:
    rig = _rig(context_len=50)
    request_id = rig.submit([("user", "a"), ("assistant", "b"), ("user", "z" * 80)])
    assert rig.failed(request_id).error.kind == "does_not_fit"


@pytest.mark.parametrize(("prompt", "word"), [((), "empty"), ((5, 999), "999"), ((-1,), "-1")])
def test_impossible_prompts_fail_with_one_clear_line(prompt: tuple[int, ...], word: str) -> None:
    rig = _rig()
    error = rig.failed(rig.submit(prompt)).error
    assert word in error.message
    assert "\n" not in error.message


def test_a_raw_prompt_begins_with_one_bos() -> None:
    rig = _rig()
    rig.ask("hi", max_tokens=1)
    assert rig.engine.holder("chat").token_ids == [BOS, *b"hi"]  # type: ignore[union-attr]


def test_a_base_model_continues_raw_text_and_says_so_once() -> None:
    rig = EngineRig(model=fake_model(template=None))
    for _ in range(2):
        rig.ask([("user", "one"), ("assistant", "two"), ("user", "three")], max_tokens=2)
    notices = [e.text for e in of_type(rig.events, Notice)]
    assert len(notices) == 1
    assert "no chat template" in notices[0]
    assert bytes(rig.engine.holder("chat").token_ids[1:]).startswith(b"one\n\ntwo\n\nthree")  # type: ignore[union-attr]
