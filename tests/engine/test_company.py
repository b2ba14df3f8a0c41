"""Several chats at once: each gets the stream it gets alone."""

from __future__ import annotations

import pytest

from engine.events import (
    TurnStarted,
)
from engine.options import EngineOptions
from engine.sampling_params import SamplingParams
from engine.speculative.options import SpeculationOptions
from tests.engine.fakes_engine import (
    GREEDY,
    PLAIN,
    EngineRig,
    FakeExecutable,
    LinearCache,
    RecurrentCache,
    RingCache,
    of_type,
)

CACHES = [LinearCache, RingCache, RecurrentCache]
DRAFTING = SpeculationOptions(algorithm="ngram", use_governor=False)
SAMPLED = SamplingParams(temperature=0.9, seed=11, repeat_penalty=1.1, frequency_penalty=0.2)
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


@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("cache", CACHES)
def test_chats_in_company_get_the_streams_they_get_alone(
    cache: type[LinearCache], sampling: SamplingParams, options: SpeculationOptions
) -> None:
    prompts = {"a": PROMPT, "b": tuple(b"quite another text " * 9), "c": (1, 2, 3)}
    rig = _rig(cache, options)
    turns = {}
    for chat, prompt in prompts.items():
        turns[chat] = rig.submit(prompt, chat, sampling=sampling, max_tokens=40)
        rig.run(4)
    rig.run()
    for chat, prompt in prompts.items():
        alone = _rig(cache, options).ask(prompt, sampling=sampling, max_tokens=40)
        end = rig.finished(turns[chat])
        assert end.token_ids == alone.token_ids
        rig.check_holder(prompt, end)


def test_s48_running_chats_share_one_forward_per_step() -> None:
    rig = _rig()
    for chat in ("a", "b", "c"):
        rig.submit((1, 2, 3), chat, max_tokens=20)
    rig.run()
    assert (1, 1, 1) in rig.executable.shapes


def test_s48_a_newcomers_prefill_interleaves_with_decoding() -> None:
    rig = _rig()
    rig.submit((1, 2, 3), "a", max_tokens=50)
    rig.run(3)
    rig.executable.shapes.clear()
    rig.submit(tuple(range(200)), "b")
    rig.run(4)
    assert rig.executable.shapes == [(64,), (1,), (64,), (1,), (64,), (1,), (8,), (1,)]


def test_s46_nobody_drafts_beside_another_chat() -> None:
    rig = _rig(options=DRAFTING)
    rig.submit(PROMPT, "a", max_tokens=30)
    rig.submit(PROMPT[::-1], "b", max_tokens=30)
    rig.run(8)
    assert len(of_type(rig.events, TurnStarted)) == 2
    assert {rows for shape in rig.executable.shapes for rows in shape} == {64, 38, 1}


def test_s47_a_drafter_outlives_company_without_being_indexed_again() -> None:
    rig = _rig(options=DRAFTING, period=26)
    long_turn = rig.submit(PROMPT, "a", max_tokens=120)
    rig.run(6)
    (request,) = rig.engine._session._scheduler.requests  # type: ignore[union-attr]
    armed = request.execution
    assert armed is not None
    rig.submit((1, 2, 3), "b", max_tokens=4)
    rig.run(3)
    assert len(request.interlude_ids) == 3
    rig.run(4)
    assert request.execution is armed
    rig.run()
    end = rig.finished(long_turn)
    assert end.token_ids == _rig(period=26).ask(PROMPT, max_tokens=120).token_ids
    assert end.stats.verify_steps > 3


def test_one_chat_answers_one_turn_at_a_time() -> None:
    rig = _rig()
    first, second = rig.submit(PROMPT), rig.submit((*PROMPT, 7))
    rig.run()
    order = [e.request_id for e in rig.events if isinstance(e, TurnStarted)]
    assert order == [first, second]
    assert rig.finished(second).stats.reused_tokens >= len(PROMPT) - 1


def test_more_turns_than_may_run_wait_their_turn() -> None:
    rig = _rig(options=PLAIN)
    rig = EngineRig(FakeExecutable(), options=EngineOptions(max_running=2))
    ids = [rig.submit((n, n), f"chat-{n}", max_tokens=5) for n in range(5)]
    rig.run(2)
    assert len(of_type(rig.events, TurnStarted)) == 2
    rig.run()
    assert all(len(rig.finished(i).token_ids) == 5 for i in ids)


def test_a_turn_waits_for_memory_while_others_run_and_then_gets_it() -> None:
    rig = EngineRig(options=EngineOptions(holder_budget_bytes=8 * 250), context_len=250)
    first = rig.submit(tuple(b"a" * 100), "a", max_tokens=100)
    second = rig.submit(tuple(b"b" * 100), "b", max_tokens=100)
    rig.run(20)
    assert [e.request_id for e in of_type(rig.events, TurnStarted)] == [first]
    rig.run()
    assert len(rig.finished(second).token_ids) == 100
