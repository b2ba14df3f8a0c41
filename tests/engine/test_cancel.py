"""Cancelled and failed turns: what was said is kept, and cache and ids never part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backends.base import BackendError, OutOfDeviceMemory, RowOutput, Segment
from engine.cache.holder_store import HolderStore
from engine.commands import CancelTurn
from engine.events import Notice, PrefillProgress, TextDelta, TurnFinished, TurnStarted
from engine.speculative.options import SpeculationOptions
from tests.engine.fakes_engine import (
    BOS,
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
PROMPT = tuple(b"abcdefgh" * 25)


def test_a_cancel_in_prefill_stops_at_the_next_chunk_and_keeps_what_was_forwarded() -> None:
    rig = EngineRig()
    request_id = rig.submit(PROMPT)
    rig.run(2)
    rig.engine.apply(CancelTurn(request_id))
    end = rig.finished(request_id)
    assert (end.finish_reason, end.text, end.token_ids) == ("cancelled", "", ())
    assert end.context_used == 128
    again = rig.ask(PROMPT)
    assert again.stats.reused_tokens == 128
    assert again.token_ids == EngineRig().ask(PROMPT).token_ids


def test_a_cancel_in_the_answer_keeps_the_partial_text_and_its_statistics() -> None:
    rig = EngineRig(FakeExecutable(period=26))
    request_id = rig.submit("hello", max_tokens=100)
    rig.run(6)
    rig.engine.apply(CancelTurn(request_id))
    end = rig.finished(request_id)
    assert end.finish_reason == "cancelled"
    assert len(end.token_ids) == end.stats.completion_tokens == 6
    assert end.text == bytes(end.token_ids).decode()
    assert end.stats.decode_ms == pytest.approx(50.0)
    rig.check_holder((BOS, *b"hello"), end)


@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_steps", range(7))
def test_after_a_cancel_anywhere_every_next_turn_equals_a_cold_one(
    cache: type[LinearCache], num_steps: int, options: SpeculationOptions
) -> None:
    def rig() -> EngineRig:
        return EngineRig(FakeExecutable(make_cache=cache, period=3), speculation=options)

    for following in (PROMPT, (*PROMPT, 5, 6), (*PROMPT[:100], 7)):
        warm = rig()
        request_id = warm.submit(PROMPT, max_tokens=50)
        warm.run(num_steps)
        warm.engine.apply(CancelTurn(request_id))
        assert warm.finished(request_id).finish_reason == "cancelled"
        end = warm.ask(following)
        assert end.token_ids == rig().ask(following).token_ids
        warm.check_holder(following, end)


def test_cancelling_what_is_over_or_unknown_does_nothing() -> None:
    rig = EngineRig()
    end = rig.ask("hello")
    num_events = len(rig.events)
    rig.engine.apply(CancelTurn(end.request_id))
    rig.engine.apply(CancelTurn("nobody"))
    assert len(rig.events) == num_events


def test_a_waiting_turn_can_be_cancelled() -> None:
    rig = EngineRig()
    first, second = rig.submit("one"), rig.submit("two")
    rig.run(1)
    rig.engine.apply(CancelTurn(second))
    rig.run()
    assert rig.finished(second).finish_reason == "cancelled"
    assert rig.finished(first).finish_reason == "length"
    assert [e.request_id for e in of_type(rig.events, TurnStarted)] == [first]


def test_cancelling_one_chat_leaves_the_others_stream_alone() -> None:
    rig = EngineRig()
    keep = rig.submit("keep me", "a", max_tokens=30)
    drop = rig.submit("drop me", "b", max_tokens=30)
    rig.run(8)
    rig.engine.apply(CancelTurn(drop))
    rig.run()
    solo = EngineRig().ask("keep me", max_tokens=30)
    assert rig.finished(keep).token_ids == solo.token_ids


@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("fail_at", range(1, 12))
@pytest.mark.parametrize("half_way", [False, True])
def test_a_forward_that_fails_leaves_cache_and_ids_in_step(
    cache: type[LinearCache], fail_at: int, options: SpeculationOptions, *, half_way: bool
) -> None:
    """A list written after the cache once made the next turn continue another prompt (B9)."""
    faulty = FakeExecutable(make_cache=cache, period=3, fail_at=fail_at, fails_half_way=half_way)
    rig = EngineRig(faulty, speculation=options)
    rig.submit(PROMPT, max_tokens=20)
    rig.run()
    holder = rig.engine.holder("chat")
    assert holder is None or holder.is_intact
    faulty.fail_at = None
    following = (*PROMPT[:90], *b"something else")
    end = rig.ask(following)
    fresh = EngineRig(FakeExecutable(make_cache=cache, period=3)).ask(following)
    assert end.token_ids == fresh.token_ids
    rig.check_holder(following, end)


def test_a_failed_turn_keeps_its_text_and_says_what_happened() -> None:
    executable = FakeExecutable(period=26, fail_at=4)
    rig = EngineRig(executable)
    request_id = rig.submit("hello")
    rig.run()
    failure = rig.failed(request_id)
    assert failure.error.message == "the device is gone"
    assert len(failure.text) == 3
    assert rig.ask("hello").finish_reason == "length"


def test_a_failure_in_company_ends_nobody_else() -> None:
    """A failed joint step is repeated one by one; only who fails alone is lost."""
    executable = FakeExecutable(fail_at=5)
    rig = EngineRig(executable)
    turns = {chat: rig.submit(chat * 3, chat, max_tokens=20) for chat in ("a", "b", "c")}
    rig.run()
    for chat, request_id in turns.items():
        alone = EngineRig().ask(chat * 3, max_tokens=20)
        assert rig.finished(request_id).token_ids == alone.token_ids


@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
def test_a_full_device_first_gives_up_idle_chats(options: SpeculationOptions) -> None:
    executable = FakeExecutable(error=OutOfDeviceMemory("the device is full"))
    rig = EngineRig(executable, speculation=options)
    rig.ask("idle", "idle")
    executable.fail_at = executable.num_forwards + 3
    end = rig.ask("busy", "busy")
    assert end.finish_reason == "length"
    assert rig.engine.holder("idle") is None
    executable.fail_at = executable.num_forwards + 3
    request_id = rig.submit("again", "busy")
    rig.run()
    assert rig.failed(request_id).error.message == "the device is full"


class _SmallDevice(FakeExecutable):
    """Refuses a forward whose rows of logits do not fit beside every chat's cache."""

    room = 10**9
    store: HolderStore

    def forward(self, segments: Sequence[Segment], **wanted: object) -> RowOutput:  # type: ignore[override]
        num_rows = sum(len(s.token_ids) for s in segments)
        num_logit_rows = num_rows if wanted["want_logits"] == "all" else 1
        if self.store.num_bytes + 8 * num_rows + 100 * num_logit_rows > self.room:
            raise OutOfDeviceMemory("the device is full")
        return super().forward(segments, **wanted)  # type: ignore[arg-type]


def _small_device(options: SpeculationOptions) -> tuple[EngineRig, _SmallDevice, HolderStore]:
    """Three idle chats of 50 tokens each beside whatever comes."""
    executable = _SmallDevice(period=4)
    rig = EngineRig(executable, speculation=options)
    executable.store = store = rig.engine._session.store  # type: ignore[union-attr]
    for number, chat in enumerate(("oldest", "older", "newest")):
        rig.ask((number,) * 41, chat, max_tokens=10)
    return rig, executable, store


def test_s50_a_full_device_gives_up_the_least_recently_used_chat_and_no_more() -> None:
    rig, executable, store = _small_device(PLAIN)
    executable.room = store.num_bytes + 8 * 40 + 100
    assert rig.ask((9,) * 30, "busy", max_tokens=20).finish_reason == "length"
    assert rig.engine.holder("oldest") is None
    assert rig.engine.holder("older") is not None
    assert rig.engine.holder("newest") is not None


def test_s50_drafts_are_worth_nobodys_cache() -> None:
    """The extra rows of a verify once threw every other chat away."""
    prompt = tuple(b"abcd" * 10)
    rig, executable, store = _small_device(DRAFTING)
    executable.room = store.num_bytes + 8 * (len(prompt) + 20) + 100
    request_id = rig.submit(prompt, "busy", max_tokens=19)
    rig.run()
    end = rig.finished(request_id)
    assert end.finish_reason == "length"
    assert all(rig.engine.holder(chat) for chat in ("oldest", "older", "newest"))
    assert end.stats.verify_steps == 0
    assert [e.text for e in of_type(rig.events, Notice)] == [
        "ngram stopped drafting: the device is full"
    ]


def test_a_model_that_answers_no_numbers_fails_the_turn_and_not_the_engine() -> None:
    executable = FakeExecutable(eos_bias=float("nan"))
    rig = EngineRig(executable)
    request_id = rig.submit("hello")
    rig.run()
    assert "not a number" in rig.failed(request_id).error.message
    executable.eos_bias = -20.0
    assert rig.ask("hello").finish_reason == "length"


@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
def test_a_cache_behind_no_numbers_is_not_used_again(options: SpeculationOptions) -> None:
    """What made the row so may stand in the cache: the chat would never answer again."""
    executable = FakeExecutable(period=5)
    rig = EngineRig(executable, speculation=options)
    rig.ask(PROMPT)
    request_id = rig.submit((*PROMPT, 1), max_tokens=60)
    rig.run(3)
    executable.eos_bias = float("nan")
    rig.run()
    assert "not a number" in rig.failed(request_id).error.message
    assert rig.engine.holder("chat") is None


def test_every_turn_is_answered_exactly_once() -> None:
    rig = EngineRig(FakeExecutable(fail_at=9, error=BackendError("gone")))
    ids = [rig.submit(f"chat {n}", f"c{n % 3}", max_tokens=n) for n in range(9)]
    rig.run(5)
    for request_id in ids[::2]:
        rig.engine.apply(CancelTurn(request_id))
    rig.run()
    ends = [e.request_id for e in rig.events if type(e).__name__ in ("TurnFinished", "TurnFailed")]
    assert sorted(ends) == sorted(ids)


def test_progress_counts_up_to_the_whole_prompt() -> None:
    rig = EngineRig()
    rig.ask(PROMPT)
    done = [e.num_done for e in of_type(rig.events, PrefillProgress)]
    assert done == [64, 128, 192, 200]
    rig.ask((*PROMPT, 1))
    assert of_type(rig.events, PrefillProgress)[-1].num_done == 201


def test_a_cancel_in_the_middle_of_a_character_stores_valid_text() -> None:
    executable = FakeExecutable()
    rig = EngineRig(executable)
    request_id = rig.submit("hello", max_tokens=100)
    rig.run(3)
    rig.engine.apply(CancelTurn(request_id))
    end = rig.finished(request_id)
    assert end.text.encode().decode() == end.text
    assert of_type(rig.events, TextDelta)[-1].stats.completion_tokens <= len(end.token_ids)
    assert isinstance(end, TurnFinished)
