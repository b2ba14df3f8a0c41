"""What a turn reuses of the chat's cache, and that reuse never changes an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.commands import CancelTurn, ForgetChat
from engine.errors import EngineError
from engine.events import TurnStarted
from engine.options import EngineOptions
from engine.speculative.options import SpeculationOptions
from tests.engine.fakes_engine import (
    PLAIN,
    EngineRig,
    FakeExecutable,
    FakeTemplate,
    LinearCache,
    RecurrentCache,
    RingCache,
    fake_model,
    of_type,
)

CACHES = [LinearCache, RingCache, RecurrentCache]
DRAFTING = SpeculationOptions(algorithm="ngram", use_governor=False)
LONG = "tell me something long about rings and states, " * 3


def _ids(*messages: tuple[str, str]) -> list[int]:
    from engine.commands import Message

    return FakeTemplate().encode([Message(r, c) for r, c in messages])  # type: ignore[arg-type]


def test_s50_turn_two_forwards_only_new_tokens() -> None:
    rig = EngineRig()
    first = rig.ask("once upon a time")
    before = rig.executable.num_rows
    prompt = (*rig.engine.holder("chat").token_ids, first.token_ids[-1], *b" and then")  # type: ignore[union-attr]
    second = rig.ask(prompt, max_tokens=1)
    assert second.stats.reused_tokens == len(prompt) - len(b" and then") - 1
    assert rig.executable.num_rows - before == len(b" and then") + 1


@pytest.mark.parametrize("cache", CACHES)
def test_three_turns_on_one_holder_equal_three_cold_prompts(cache: type[LinearCache]) -> None:
    warm = EngineRig(FakeExecutable(make_cache=cache))
    prompt: tuple[int, ...] = tuple(LONG.encode())
    for turn in range(3):
        end = warm.ask(prompt)
        cold = EngineRig(FakeExecutable(make_cache=cache)).ask(prompt)
        assert end.token_ids == cold.token_ids
        warm.check_holder(prompt, end)
        prompt = (*prompt, *end.token_ids, *b"next %d" % turn)


@pytest.mark.parametrize("cache", CACHES)
def test_regenerating_gives_what_a_cold_run_gives(cache: type[LinearCache]) -> None:
    rig = EngineRig(FakeExecutable(make_cache=cache))
    prompt = [("user", LONG)]
    first = rig.ask(prompt, max_tokens=60)
    again = rig.ask(prompt, max_tokens=60)
    assert again.token_ids == first.token_ids
    rig.check_holder(_ids(*prompt), again)
    third = rig.ask(prompt, max_tokens=60)
    assert third.token_ids == first.token_ids


def test_regenerating_forwards_one_prompt_token_where_the_cache_rewinds() -> None:
    rig = EngineRig()
    first = rig.ask("hello")
    again = rig.ask("hello")
    assert again.stats.reused_tokens == first.stats.prompt_tokens - 1


@pytest.mark.parametrize("cache", [RingCache, RecurrentCache])
def test_regenerating_resumes_before_the_answer_where_the_cache_cannot_rewind(
    cache: type[LinearCache],
) -> None:
    rig = EngineRig(FakeExecutable(make_cache=cache))
    first = rig.ask([("user", LONG)], max_tokens=80)
    for _ in range(2):
        again = rig.ask([("user", LONG)], max_tokens=80)
        assert again.stats.reused_tokens == first.stats.prompt_tokens - 1
        assert again.token_ids == first.token_ids


@pytest.mark.parametrize("prompt_len", [30, 50, 63])
@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
def test_a_ring_is_copied_before_it_loses_what_regenerating_needs(
    prompt_len: int, options: SpeculationOptions
) -> None:
    rig = EngineRig(FakeExecutable(make_cache=RingCache, period=5), speculation=options)
    prompt = tuple(range(prompt_len))
    first = rig.ask(prompt, max_tokens=90)
    for _ in range(2):
        again = rig.ask(prompt, max_tokens=90)
        assert again.token_ids == first.token_ids
        assert again.stats.reused_tokens == prompt_len - 1


@pytest.mark.parametrize("cache", [RingCache, RecurrentCache])
def test_a_message_cancelled_and_edited_does_not_forward_the_whole_chat_again(
    cache: type[LinearCache],
) -> None:
    rig = EngineRig(FakeExecutable(make_cache=cache))
    first = rig.ask(tuple(range(200)), max_tokens=70)
    history = (*range(200), *first.token_ids)
    request_id = rig.submit((*history, *(7 for _ in range(190))))
    rig.run(2)
    rig.engine.apply(CancelTurn(request_id))
    end = rig.ask((*history, 8))
    assert end.stats.reused_tokens >= 199
    cold = EngineRig(FakeExecutable(make_cache=cache)).ask((*history, 8))
    assert end.token_ids == cold.token_ids


def test_a_resume_point_is_evicted_before_its_chat() -> None:
    budget = EngineOptions(holder_budget_bytes=8 * 400)
    rig = EngineRig(FakeExecutable(make_cache=RecurrentCache), options=budget, context_len=400)
    rig.ask(tuple(range(200)), max_tokens=60)
    assert rig.engine._session.store.num_bytes == 8 * 259  # type: ignore[union-attr]
    assert rig.engine.holder("chat") is not None


def test_a_cache_that_rewinds_is_never_copied_for_its_own_chat() -> None:
    rig = EngineRig()
    rig.ask(tuple(range(200)), max_tokens=90)
    store = rig.engine._session.store  # type: ignore[union-attr]
    assert store.num_bytes == 8 * (200 + 89)


def test_an_opening_the_template_leaves_out_later_costs_only_the_last_answer() -> None:
    """A thinking block in the generation prompt parts the history at the last header (C6)."""
    model = fake_model(
        FakeExecutable(make_cache=RecurrentCache), template=FakeTemplate("<think></think>")
    )
    rig = EngineRig(model=model)
    first = rig.ask([("user", LONG)], max_tokens=20)
    rig.ask([("user", LONG), ("assistant", first.text), ("user", "go on")])
    started = of_type(rig.events, TurnStarted)
    history = len(_ids(("user", LONG))) - 1
    assert started[-1].reused_tokens == history


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "edit", [lambda t: t[:-1] + "!", lambda t: "X" + t[1:], lambda t: t[:40], lambda t: t + " "]
)
def test_an_edited_message_answers_like_a_fresh_chat(
    cache: type[LinearCache], edit: Callable[[str], str]
) -> None:
    rig = EngineRig(FakeExecutable(make_cache=cache))
    first = rig.ask([("user", LONG)], max_tokens=40)
    rig.ask([("user", LONG), ("assistant", first.text), ("user", "more")])
    edited = [("user", edit(LONG))]
    end = rig.ask(edited)
    fresh = EngineRig(FakeExecutable(make_cache=cache)).ask(edited)
    assert end.token_ids == fresh.token_ids
    rig.check_holder(_ids(*edited), end)


def test_a_prompt_that_is_a_prefix_of_the_cache_is_answered_afresh() -> None:
    rig = EngineRig()
    rig.ask("abcdefgh")
    end = rig.ask("abcd")
    assert end.token_ids == EngineRig().ask("abcd").token_ids


@pytest.mark.parametrize("cache", CACHES)
def test_s49_a_new_chat_starts_behind_the_shared_system_prompt(cache: type[LinearCache]) -> None:
    rig = EngineRig(FakeExecutable(make_cache=cache))
    system = ("system", "You are a careful assistant who answers in one line.")
    rig.ask([system, ("user", "first")], "a")
    end = rig.ask([system, ("user", "second")], "b")
    assert end.stats.reused_tokens >= len(system[1])
    cold = EngineRig(FakeExecutable(make_cache=cache)).ask([system, ("user", "second")], "b")
    assert end.token_ids == cold.token_ids


@pytest.mark.parametrize("cache", CACHES)
def test_s49_chats_cloned_from_a_checkpoint_share_nothing_with_it(
    cache: type[LinearCache],
) -> None:
    rig = EngineRig(FakeExecutable(make_cache=cache))
    system = ("system", "You are a careful assistant who answers in one line.")
    rig.ask([system, ("user", "make the checkpoint")], "first")
    (checkpoint,) = rig.engine._session.store.checkpoints  # type: ignore[union-attr]
    state, ids = checkpoint.cache.state(), list(checkpoint.token_ids)  # type: ignore[attr-defined]
    for turn in ("one", "two"):
        for chat in ("a", "b"):
            end = rig.ask([system, ("user", turn + chat)], chat, max_tokens=70)
            cold = EngineRig(FakeExecutable(make_cache=cache)).ask(
                [system, ("user", turn + chat)], max_tokens=70
            )
            assert end.token_ids == cold.token_ids
    rig.engine.apply(ForgetChat("a"))
    assert rig.engine._session.store.checkpoints == (checkpoint,)  # type: ignore[union-attr]
    assert checkpoint.cache.state() == state  # type: ignore[attr-defined]
    assert checkpoint.token_ids == ids


def test_a_prefix_is_only_shared_in_whole_chunks_where_rows_depend_on_the_cut() -> None:
    """Else a chat would get other low bits in company than alone."""
    rig = EngineRig(FakeExecutable(is_chunk_independent=False))
    system = ("system", "s" * 200)
    rig.ask([system, ("user", "first")], "a")
    end = rig.ask([system, ("user", "second")], "b")
    assert end.stats.reused_tokens == 192


@pytest.mark.parametrize("is_chunk_independent", [True, False])
def test_prefill_chunks_end_at_fixed_positions(is_chunk_independent: bool) -> None:
    rig = EngineRig(FakeExecutable(is_chunk_independent=is_chunk_independent))
    rig.ask(tuple(range(150)), max_tokens=1)
    tail = [(22,)] if is_chunk_independent else [(21,), (1,)]
    assert rig.executable.shapes == [(64,), (64,), *tail]
    rig.executable.shapes.clear()
    rig.ask((*range(100), *range(100)), max_tokens=1)
    assert rig.executable.shapes[0] == (28,)


def test_s50_least_recently_used_chats_are_evicted_and_running_ones_never() -> None:
    rig = EngineRig(options=EngineOptions(holder_budget_bytes=8 * 300), context_len=300)
    for chat in ("a", "b", "c"):
        rig.ask(tuple(b"%s" % chat.encode() * 80), chat)
    rig.ask(tuple(b"a" * 80 + b"z"), "a")
    rig.submit(tuple(b"d" * 100), "d", max_tokens=50)
    rig.run(3)
    rig.ask(tuple(b"e" * 100), "e")
    assert rig.engine.holder("d") is not None
    assert rig.engine.holder("b") is None
    assert rig.engine.holder("c") is None


def test_forgetting_a_chat_frees_its_cache() -> None:
    rig = EngineRig()
    rig.ask("hello", "a")
    rig.engine.apply(ForgetChat("a"))
    assert rig.engine.holder("a") is None
    assert rig.engine._session.store.num_bytes == 0  # type: ignore[union-attr]


class _NeedsGenerationPrompt(FakeTemplate):
    """A template that cannot end with a question."""

    def encode(self, *args: object, **options: object) -> list[int]:
        if not options["add_generation_prompt"]:
            raise EngineError("the last message must be an answer")
        return super().encode(*args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_letters", [10, 100])
def test_a_template_that_wants_its_generation_prompt_still_answers(num_letters: int) -> None:
    executable = FakeExecutable(make_cache=RingCache, period=5)
    rig = EngineRig(model=fake_model(executable, template=_NeedsGenerationPrompt()))
    end = rig.ask([("user", "a" * num_letters)], max_tokens=90)
    assert end.finish_reason == "length"


def test_a_resume_point_without_memory_ends_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(self: RingCache) -> RingCache:
        raise MemoryError

    monkeypatch.setattr(RingCache, "clone", clone)
    rig = EngineRig(FakeExecutable(make_cache=RingCache))
    assert rig.ask(tuple(range(30)), max_tokens=90).finish_reason == "length"


@pytest.mark.parametrize("prompt_len", [100, 200, 250])
def test_s50_a_chat_beyond_half_the_budget_keeps_its_own_cache(prompt_len: int) -> None:
    rig = EngineRig(options=EngineOptions(holder_budget_bytes=8 * 400), context_len=400)
    rig.ask((7, 7, 7), "other")
    prompt = tuple(range(prompt_len))
    first = rig.ask(prompt, max_tokens=20)
    second = rig.ask((*prompt, *first.token_ids, 1), max_tokens=20)
    assert second.stats.reused_tokens == prompt_len + 19
    rig.ask(prompt[::-1], "other", max_tokens=20)
    assert (rig.engine.holder("chat") is None) is (prompt_len > 100)


class _DoublingCache(LinearCache):
    """Takes memory in powers of two, as real caches do."""

    @property
    def num_bytes(self) -> int:
        return 8 << max(self.length - 1, 0).bit_length()


def test_s50_a_cache_that_doubled_over_the_budget_is_kept_until_the_room_is_needed() -> None:
    budget = EngineOptions(holder_budget_bytes=8 * 400)
    executable = FakeExecutable(make_cache=_DoublingCache)
    rig = EngineRig(executable, options=budget, context_len=400)
    prompt = tuple(range(250))
    first = rig.ask(prompt, max_tokens=20)
    second = rig.ask((*prompt, *first.token_ids, 1), max_tokens=20)
    assert second.stats.reused_tokens == 269
    rig.ask((7, 7, 7), "other")
    assert rig.engine.holder("chat") is None
