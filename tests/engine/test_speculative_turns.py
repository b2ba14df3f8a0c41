"""Whole turns under forced drafters: whatever is accepted, the turn and the next one are plain's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from backends.base import BackendError
from engine.commands import CancelTurn, ForgetChat, UpdateSpeculation
from engine.events import Notice, TurnFinished
from engine.sampling_params import SamplingParams
from engine.speculative.drafters import drafter_factory
from engine.speculative.options import SpeculationOptions
from engine.speculative.registry import SpeculatorRegistry, SpeculatorRequest, default_registry
from engine.speculative.speculator import DraftContext, Proposal, Speculator, SpeculatorTraits
from engine.speculative.target import TargetTraits
from engine.speculative.trunk import Trunk
from tests.engine.fakes_engine import (
    GREEDY,
    PLAIN,
    EngineRig,
    FakeExecutable,
    LinearCache,
    RecurrentCache,
    RingCache,
    fake_model,
    of_type,
)

CACHES = [LinearCache, RingCache, RecurrentCache]
DRAFTERS = ["oracle:8", "oracle:1", "script:3,0,2", "script:0,1,4,6", "garbage:7"]
FORCED = SpeculationOptions(algorithm="forced", use_governor=False)
SAMPLED = SamplingParams(
    temperature=1.1, seed=3, repeat_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
)
PROMPT = tuple(b"a prompt that is longer than one window of the ring, by some words")


def _plain(cache: type[LinearCache], prompt: Sequence[int], **fields: object) -> TurnFinished:
    return EngineRig(FakeExecutable(make_cache=cache)).ask(tuple(prompt), **fields)


def _forced(
    cache: type[LinearCache],
    drafter: str,
    plain: TurnFinished,
    *,
    options: SpeculationOptions = FORCED,
    traits: TargetTraits | None = None,
    prompt: Sequence[int] = PROMPT,
) -> EngineRig:
    registry = default_registry()
    registry.register("forced", drafter_factory(drafter, list(prompt), list(plain.token_ids)))
    model = fake_model(FakeExecutable(make_cache=cache), traits=traits or TargetTraits())
    return EngineRig(model=model, speculation=options, registry=registry)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("persists", [True, False])
def test_s15_every_acceptance_pattern_gives_the_plain_turn_and_the_plain_next_turn(
    cache: type[LinearCache], drafter: str, sampling: SamplingParams, *, persists: bool
) -> None:
    settings = {"sampling": sampling, "max_tokens": 60}
    plain = _plain(cache, PROMPT, **settings)
    traits = TargetTraits(verify_persists_accepted_kv=persists)
    rig = _forced(cache, drafter, plain, traits=traits)
    end = rig.ask(PROMPT, **settings)
    assert (end.token_ids, end.text) == (plain.token_ids, plain.text)
    assert end.stats.verify_steps > 0
    rig.check_holder(PROMPT, end)
    following = (*PROMPT, *end.token_ids, *b"and now?")
    second = rig.ask(following, **settings)
    assert second.token_ids == _plain(cache, following, **settings).token_ids
    assert second.stats.reused_tokens == len(PROMPT) + 59
    rig.check_holder(following, second)


@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize("cache", CACHES)
def test_s19_an_end_token_at_any_place_of_a_window_ends_the_turn_there(
    cache: type[LinearCache], index: int
) -> None:
    """Tokens behind an accepted end token once stayed in the cache (A1, B1)."""
    plain = _plain(cache, PROMPT, max_tokens=40)
    stop_id = plain.token_ids[index]
    first = plain.token_ids.index(stop_id)
    rig = _forced(cache, "oracle:8", plain)
    end = rig.ask(PROMPT, max_tokens=40, stop_ids=(stop_id,))
    assert end.token_ids == plain.token_ids[: first + 1]
    assert end.finish_reason == "stop"
    assert end.stats.draft_n_accepted <= first
    rig.check_holder(PROMPT, end)
    following = (*PROMPT, *end.token_ids, 10, 20)
    assert rig.ask(following).token_ids == _plain(cache, following).token_ids


@pytest.mark.parametrize("num", [1, 2, 7, 8, 9, 10])
def test_a_window_never_passes_the_token_limit_or_the_context(num: int) -> None:
    plain = _plain(LinearCache, PROMPT, max_tokens=40)
    rig = _forced(LinearCache, "oracle:8", plain)
    end = rig.ask(PROMPT, max_tokens=num)
    assert end.token_ids == plain.token_ids[:num]
    rig.check_holder(PROMPT, end)
    widest = max(rows for shape in rig.executable.shapes[2:] or [(0,)] for rows in shape)
    assert widest <= max(num - 1, 0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cache", CACHES)
def test_s42_any_schedule_of_drafting_and_parking_gives_the_plain_stream(
    cache: type[LinearCache], seed: int
) -> None:
    """A plain step after speculative ones once read another state than it should (B7)."""
    schedule = random.Random(seed)
    plain = _plain(cache, PROMPT, max_tokens=150, sampling=SAMPLED)
    rig = _forced(cache, schedule.choice(DRAFTERS), plain)
    request_id = rig.submit(PROMPT, max_tokens=150, sampling=SAMPLED)
    for _ in range(40):
        rig.run(schedule.randrange(1, 4))
        if schedule.random() < 0.3:
            options = PLAIN
        else:
            window = schedule.randrange(1, 9)
            options = SpeculationOptions(algorithm="forced", use_governor=False, window=window)
        rig.engine.apply(UpdateSpeculation(options))
    rig.run()
    end = rig.finished(request_id)
    assert end.token_ids == plain.token_ids
    rig.check_holder(PROMPT, end)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cache", CACHES)
def test_s47_chats_that_come_and_go_change_nobodys_stream(
    cache: type[LinearCache], seed: int
) -> None:
    schedule = random.Random(seed)
    plain = _plain(cache, PROMPT, max_tokens=120, sampling=SAMPLED)
    rig = _forced(cache, "script:3,0,2,5", plain)
    main = rig.submit(PROMPT, "main", max_tokens=120, sampling=SAMPLED)
    others: dict[str, tuple[int, ...]] = {}
    for n in range(6):
        rig.run(schedule.randrange(1, 9))
        prompt = tuple(schedule.randrange(256) for _ in range(schedule.randrange(1, 150)))
        request_id = rig.submit(prompt, f"other-{n}", max_tokens=schedule.randrange(1, 20))
        others[request_id] = prompt
        if schedule.random() < 0.3:
            rig.run(schedule.randrange(3))
            rig.engine.apply(CancelTurn(request_id))
    rig.run()
    end = rig.finished(main)
    assert end.token_ids == plain.token_ids
    rig.check_holder(PROMPT, end)
    for request_id, prompt in others.items():
        other = rig.finished(request_id)
        alone = _plain(cache, prompt, max_tokens=20)
        assert other.token_ids == alone.token_ids[: len(other.token_ids)]
        assert other.finish_reason in ("length", "cancelled")


class _Broken:
    """A drafter that errs where it is told to."""

    traits = SpeculatorTraits(
        name="broken", max_drafts=4, default_min_draft_prob=0.0, can_arm_after_prefix_reuse=True
    )

    def __init__(self, place: str) -> None:
        self._place = place
        self._num_calls = 0
        self.num_resets = 0

    def _fail(self, place: str) -> None:
        self._num_calls += 1
        if place == self._place and self._num_calls > 4:
            raise BackendError("the drafter is broken")

    def propose(self, context: DraftContext) -> Proposal:
        self._fail("propose")
        return Proposal([1, 2])

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        self._fail("commit")

    def reset(self) -> None:
        self.num_resets += 1


def _broken_registry(place: str) -> SpeculatorRegistry:
    def make(request: SpeculatorRequest) -> Speculator:
        if place == "start":
            raise ValueError("the drafter is broken")
        return _Broken(place)

    registry = default_registry()
    registry.register("forced", make)
    return registry


@pytest.mark.parametrize("place", ["start", "propose", "commit"])
def test_a_drafter_that_errs_is_dropped_with_one_line_and_the_answer_goes_on(place: str) -> None:
    rig = EngineRig(speculation=FORCED, registry=_broken_registry(place))
    end = rig.ask(PROMPT, max_tokens=30)
    assert end.token_ids == _plain(LinearCache, PROMPT, max_tokens=30).token_ids
    rig.check_holder(PROMPT, end)
    notices = [event.text for event in of_type(rig.events, Notice)]
    assert len(notices) == 1
    assert "the drafter is broken" in notices[0]
    assert rig.ask((*PROMPT, 1), max_tokens=30).finish_reason == "length"


def _counting_rig(cache: type[LinearCache] = LinearCache) -> tuple[EngineRig, list[_Broken]]:
    """A rig whose drafter never errs, and every drafter that was made."""
    made: list[_Broken] = []

    def make(request: SpeculatorRequest) -> Speculator:
        made.append(_Broken("nowhere"))
        return made[-1]

    registry = default_registry()
    registry.register("forced", make)
    executable = FakeExecutable(make_cache=cache)
    return EngineRig(executable, speculation=FORCED, registry=registry), made


def test_s28_a_kept_drafter_serves_the_next_turn_of_its_chat_and_dies_with_it() -> None:
    rig, made = _counting_rig()
    first = rig.ask(PROMPT)
    rig.ask((*PROMPT, *first.token_ids, 1))
    assert len(made) == 1
    rig.engine.apply(ForgetChat("chat"))
    rig.ask(PROMPT)
    assert len(made) == 2
    rig.engine.apply(UpdateSpeculation(FORCED))
    rig.ask(PROMPT)
    assert len(made) == 3


def test_s28_a_turn_of_one_token_leaves_the_chats_drafter_alone() -> None:
    rig, made = _counting_rig()
    rig.ask(PROMPT)
    rig.ask(PROMPT, max_tokens=1)
    assert rig.ask(PROMPT).stats.verify_steps > 0
    assert len(made) == 1


def test_s47_a_turn_wholly_in_company_leaves_the_chats_drafter_alone() -> None:
    rig, made = _counting_rig()
    first = rig.ask(PROMPT, "a")
    rig.submit((1, 2, 3), "b", max_tokens=40)
    second = rig.submit((*PROMPT, *first.token_ids, 1), "a", max_tokens=5)
    rig.run()
    end = rig.finished(second)
    assert end.stats.verify_steps == 0
    third = (*PROMPT, *first.token_ids, 1, *end.token_ids, 2)
    num_made = len(made)
    assert rig.ask(third, "a").token_ids == _plain(LinearCache, third).token_ids
    assert len(made) == num_made


@pytest.mark.parametrize("cache", CACHES)
def test_s50_a_drafter_goes_with_its_chat_to_another_holder(cache: type[LinearCache]) -> None:
    """Regenerating past a ring's window, and an edit that another chat serves better."""
    rig, made = _counting_rig(cache)
    first = rig.ask(PROMPT, max_tokens=90)
    again = rig.ask(PROMPT, max_tokens=90)
    assert again.token_ids == first.token_ids
    rig.check_holder(PROMPT, again)
    assert len(made) == 1
    edited = PROMPT[::-1]
    rig.ask(edited, "other", max_tokens=5)
    num_made = len(made)
    end = rig.ask(edited, max_tokens=60)
    assert end.token_ids == _plain(cache, edited, max_tokens=60).token_ids
    assert end.stats.verify_steps > 0
    rig.check_holder(edited, end)
    assert len(made) == num_made


def test_s50_a_drafter_that_is_not_used_keeps_no_earlier_holder_alive() -> None:
    """Its memory would be counted nowhere."""
    rig, _ = _counting_rig()
    rig.ask(PROMPT, "a")
    rig.submit((1, 2, 3), "b", max_tokens=40)
    rig.submit(PROMPT[::-1], "a", max_tokens=5)
    rig.run()
    kept = rig.engine._session.store.execution("a")  # type: ignore[union-attr]
    assert isinstance(kept.target, Trunk)  # type: ignore[union-attr]
    assert kept.target.holder is rig.engine.holder("a")  # type: ignore[union-attr]


def test_s03_a_drafter_is_reset_where_not_one_token_of_its_text_stands() -> None:
    rig, made = _counting_rig()
    first = rig.ask(PROMPT)
    rig.ask((*PROMPT, *first.token_ids, 1))
    assert made[0].num_resets == 0
    rig.ask((9, 9, 9))
    assert (len(made), made[0].num_resets) == (1, 1)


class _ReadsHidden:
    """Chains from hidden rows and cannot draft after a token whose row it missed."""

    traits = SpeculatorTraits(
        name="reads", max_drafts=3, default_min_draft_prob=0.0, needs_hidden=True
    )

    def __init__(self) -> None:
        self.rows: list[float] = []
        """One number of the hidden row of each committed position."""

    def propose(self, context: DraftContext) -> Proposal:
        assert len(self.rows) == context.pos, "a row was missed"
        return Proposal([97, 98, 99])

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        assert hidden is not None, "a token came without its hidden row"
        assert start_pos <= len(self.rows), "a gap"
        del self.rows[start_pos:]
        self.rows.extend(float(row[0]) for row in hidden)

    def reset(self) -> None:
        self.rows.clear()


def _reading_rig() -> tuple[EngineRig, list[_ReadsHidden]]:
    made: list[_ReadsHidden] = []

    def make(request: SpeculatorRequest) -> Speculator:
        made.append(_ReadsHidden())
        return made[-1]

    registry = default_registry()
    registry.register("forced", make)
    return EngineRig(speculation=FORCED, registry=registry), made


def test_s29_a_head_that_needs_the_prompts_hidden_rows_prefills_through_its_context() -> None:
    rig, made = _reading_rig()
    prompt = PROMPT * 3
    end = rig.ask(prompt, max_tokens=30)
    assert end.token_ids == _plain(LinearCache, prompt, max_tokens=30).token_ids
    assert end.stats.verify_steps > 0
    (speculator,) = made
    expected = LinearCache()
    rows = []
    for token_id in (*prompt, *end.token_ids[:-1]):
        expected.append(token_id)
        rows.append(float(expected.state() % 97))
    assert speculator.rows == rows


def test_s29_such_a_prefill_computes_the_logits_of_the_prompts_last_row_only() -> None:
    rig, made = _reading_rig()
    rig.ask(PROMPT * 3, max_tokens=2)
    assert len(made[0].rows) == rig.executable.num_rows == 3 * len(PROMPT) + 1
    assert rig.executable.num_logit_rows == 2


def test_s25_such_a_head_goes_on_with_the_next_turn_of_its_chat() -> None:
    rig, made = _reading_rig()
    first = rig.ask(PROMPT, max_tokens=20)
    second = rig.ask((*PROMPT, *first.token_ids, 1, 2), max_tokens=20)
    assert second.stats.reused_tokens == len(PROMPT) + 19
    assert second.stats.verify_steps > 0
    assert len(made) == 1


def test_s25_such_a_head_does_not_go_on_behind_rows_of_another_text() -> None:
    """As many tokens as it knows, but others: their rows were computed in company."""
    rig, _ = _reading_rig()
    rig.ask(PROMPT, "a", max_tokens=30)
    rig.submit((1, 2, 3), "b", max_tokens=60)
    edited = (*PROMPT[:20], *range(40))
    rig.submit(edited, "a", max_tokens=5)
    rig.run()
    prompt = (*edited, 7, 8, 9)
    assert len(prompt) < len(PROMPT) + 30
    end = rig.ask(prompt, "a", max_tokens=20)
    assert end.stats.reused_tokens == len(edited)
    assert end.token_ids == _plain(LinearCache, prompt, max_tokens=20).token_ids
    assert end.stats.verify_steps == 0


def test_s47_such_a_head_is_given_up_when_others_run_beside_its_chat() -> None:
    rig, made = _reading_rig()
    request_id = rig.submit(PROMPT, "a", max_tokens=60)
    rig.run(6)
    other = rig.submit((1, 2, 3), "b", max_tokens=5)
    rig.run()
    end = rig.finished(request_id)
    assert end.token_ids == _plain(LinearCache, PROMPT, max_tokens=60).token_ids
    assert end.stats.verify_steps > 0
    assert end.stats.plain_steps > 20
    assert rig.finished(other).stats.verify_steps == 0
    assert len(made) == 1


def test_s25_such_a_head_is_given_up_when_its_next_prompt_was_read_beside_others() -> None:
    rig, _ = _reading_rig()
    first = rig.ask(PROMPT, "a", max_tokens=20)
    rig.submit((1, 2, 3), "b", max_tokens=3)
    request_id = rig.submit((*PROMPT, *first.token_ids, 1, 2), "a", max_tokens=20)
    rig.run()
    assert rig.finished(request_id).stats.verify_steps == 0
    assert not of_type(rig.events, Notice)
