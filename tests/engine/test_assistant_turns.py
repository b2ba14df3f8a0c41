"""Whole turns with the assistant drafter on a real executable: the stream is plain decoding's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.cache.holder import Holder
from engine.commands import CancelTurn, UpdateSpeculation
from engine.contracts import LoadedModel
from engine.diagnostics import cold_check
from engine.events import Notice, TurnFinished
from engine.options import EngineOptions
from engine.sampling_params import SamplingParams
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.governor import CostGovernor, StepSample
from engine.speculative.head_speculator import HeadSpeculator
from engine.speculative.options import SpeculationOptions
from engine.speculative.trunk import Trunk
from engine.speculative.window import FixedWindow
from models.loader import Loader
from tests.cpu_backend import CPU_BACKEND
from tests.engine.fakes_engine import GREEDY, PLAIN, EngineRig, of_type
from tests.engine.fakes_speculative import FakeClock, Turn
from tests.engine.speculative_bench import take_step
from tests.models.tiny_assistant import (
    VOCAB,
    WINDOW,
    predictable,
    write_assistant,
    write_trunk,
)
from tests.models.trunk_fixtures import available

FORCED = SpeculationOptions(
    algorithm="draft-head", window=4, min_draft_prob=0.0, use_governor=False
)
SAMPLED = SamplingParams(temperature=0.8, top_k=12, seed=5, repeat_penalty=1.1)
PROMPT = tuple(np.random.default_rng(2).integers(4, VOCAB, 23).tolist())
NUM_TOKENS = 90
"""The window of 16 tokens wraps several times."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A trunk whose drafter is right most of the time, but not always."""
    folder = tmp_path_factory.mktemp("assistant")
    trunk, assistant = predictable()
    return Loader(lambda: available(CPU_BACKEND))(
        write_trunk(folder, trunk),
        name="tiny",
        speculation=SpeculationOptions(drafter_path=str(write_assistant(folder, assistant))),
        progress=lambda stage, share: None,
    )


def rig_on(
    model: LoadedModel, speculation: SpeculationOptions, options: EngineOptions | None = None
) -> EngineRig:
    """An engine on the shared model, which it never closes."""
    return EngineRig(model=model, speculation=speculation, options=options)


def plain_turn(model: LoadedModel, prompt: Sequence[int], **fields: object) -> TurnFinished:
    return rig_on(model, PLAIN).ask(tuple(prompt), **fields)


def assert_cold(rig: EngineRig, prompt: Sequence[int], end: TurnFinished) -> None:
    holder = rig.engine.holder(end.chat_id)
    assert holder is not None
    assert holder.token_ids == [*prompt, *end.token_ids[:-1]]
    assert cold_check(rig.model, holder, list(prompt), list(end.token_ids))


def test_the_tiny_drafter_is_right_often_but_not_always(model: LoadedModel) -> None:
    """What the tests below stand on: full, partial and no acceptance all happen."""
    stats = rig_on(model, FORCED).ask(PROMPT, max_tokens=NUM_TOKENS).stats
    assert 0.2 < stats.draft_n_accepted / stats.draft_n < 0.9
    assert stats.accepted_per_position[0] > stats.accepted_per_position[3] > 0


@pytest.mark.parametrize("window", [1, 4, 7, 24])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_s51_the_stream_and_the_cache_are_plain_decodings_to_the_bit(
    model: LoadedModel, sampling: SamplingParams, window: int
) -> None:
    """Windows up to beyond the trunk's own of 16 tokens."""
    settings = {"sampling": sampling, "max_tokens": NUM_TOKENS}
    plain = plain_turn(model, PROMPT, **settings)
    rig = rig_on(model, replace(FORCED, window=window))
    end = rig.ask(PROMPT, **settings)
    assert end.token_ids == plain.token_ids
    assert end.stats.algorithm == "gemma4-assistant"
    assert end.stats.draft_n_accepted > 0
    assert_cold(rig, PROMPT, end)


def test_s32_drafts_from_the_prompts_last_row_on(model: LoadedModel) -> None:
    """The first step after the prompt is a verify, in a new chat and in a mostly cached one."""
    rig = rig_on(model, FORCED)
    prompt = PROMPT
    for _ in range(2):
        end = rig.ask(prompt, max_tokens=3)
        assert end.token_ids == plain_turn(model, prompt, max_tokens=3).token_ids
        assert end.stats.draft_n > 0  # a plain step would leave one token, too few to draft
        prompt = (*prompt, *end.token_ids, 60)


def test_s32_drafts_on_the_second_turn_of_a_chat(model: LoadedModel) -> None:
    rig = rig_on(model, FORCED)
    first = rig.ask(PROMPT, max_tokens=40)
    following = (*PROMPT, *first.token_ids, *PROMPT[:9])
    second = rig.ask(following, max_tokens=40)
    assert second.token_ids == plain_turn(model, following, max_tokens=40).token_ids
    assert second.stats.reused_tokens == len(PROMPT) + 39
    assert second.stats.draft_n_accepted > 0
    assert_cold(rig, following, second)


def test_s32_drafts_in_a_chat_that_starts_from_another_chats_prefix(model: LoadedModel) -> None:
    """A clone of a prefix: the hidden rows of it were never computed in this chat."""
    rig = rig_on(model, FORCED)
    rig.ask(PROMPT, "first", max_tokens=30)
    prompt = (*PROMPT[:20], 50, 51)
    end = rig.ask(prompt, "second", max_tokens=40)
    assert end.token_ids == plain_turn(model, prompt, max_tokens=40).token_ids
    assert end.stats.draft_n_accepted > 0
    assert_cold(rig, prompt, end)


def test_s32_drafts_again_after_a_gap_of_plain_steps(model: LoadedModel) -> None:
    """Drafting is switched off in mid-answer and on again: the head was told nothing meanwhile."""
    plain = plain_turn(model, PROMPT, max_tokens=NUM_TOKENS)
    rig = rig_on(model, FORCED)
    request_id = rig.submit(PROMPT, max_tokens=NUM_TOKENS)
    for options in (FORCED, PLAIN, FORCED):
        rig.engine.apply(UpdateSpeculation(options))
        rig.run(6)
    rig.run()
    end = rig.finished(request_id)
    assert end.token_ids == plain.token_ids
    assert end.stats.draft_n_accepted > 0
    assert_cold(rig, PROMPT, end)


def test_s32_drafts_again_when_company_has_left(model: LoadedModel) -> None:
    """Beside another chat rows are batched plainly; alone again, the head goes on."""
    plain = plain_turn(model, PROMPT, max_tokens=NUM_TOKENS)
    rig = rig_on(model, FORCED)
    request_id = rig.submit(PROMPT, max_tokens=NUM_TOKENS)
    rig.run(6)
    other = rig.submit(PROMPT[5:], "other", max_tokens=6)
    rig.run()
    assert rig.finished(request_id).token_ids == plain.token_ids
    alone = plain_turn(model, PROMPT[5:], max_tokens=6)
    assert rig.finished(other).token_ids == alone.token_ids
    assert_cold(rig, PROMPT, rig.finished(request_id))


@pytest.mark.parametrize("num_steps", [4, 8, 12])
def test_s51_a_cancelled_turn_leaves_a_cache_the_next_turn_goes_on_from(
    model: LoadedModel, num_steps: int
) -> None:
    rig = rig_on(model, FORCED)
    request_id = rig.submit(PROMPT, max_tokens=NUM_TOKENS)
    rig.run(num_steps)
    rig.engine.apply(CancelTurn(request_id))
    rig.run()
    end = rig.finished(request_id)
    assert end.finish_reason == "cancelled"
    assert_cold(rig, PROMPT, end)
    following = (*PROMPT, *end.token_ids, 40)
    again = rig.ask(following, max_tokens=30)
    assert again.token_ids == plain_turn(model, following, max_tokens=30).token_ids
    assert again.stats.draft_n_accepted > 0
    assert_cold(rig, following, again)


def test_s51_regenerating_takes_the_answer_back_whether_or_not_the_window_wrapped(
    model: LoadedModel,
) -> None:
    for num_tokens in (WINDOW // 2, NUM_TOKENS):
        rig = rig_on(model, FORCED)
        first = rig.ask(PROMPT, max_tokens=num_tokens)
        second = rig.ask(PROMPT, max_tokens=num_tokens)
        assert second.token_ids == first.token_ids
        assert_cold(rig, PROMPT, second)


def test_s33_the_governed_stream_is_the_plain_one_too(model: LoadedModel) -> None:
    """Measuring and parking change no token; nothing is said to the person."""
    plain = plain_turn(model, PROMPT, max_tokens=NUM_TOKENS)
    rig = rig_on(model, SpeculationOptions())
    end = rig.ask(PROMPT, max_tokens=NUM_TOKENS)
    assert end.token_ids == plain.token_ids
    assert end.stats.algorithm == "gemma4-assistant"
    assert not of_type(rig.events, Notice)
    assert_cold(rig, PROMPT, end)


class ParkingGovernor(CostGovernor):
    """Parked for a stretch of steps and drafting around it, whatever the steps cost."""

    def __init__(self, parked: range) -> None:
        super().__init__()
        self._parked, self._num_steps = parked, 0

    @property
    def may_draft(self) -> bool:
        return self._num_steps not in self._parked

    def record_plain(self, ms: float) -> None:
        self._num_steps += 1

    def record_speculative(self, sample: StepSample) -> None:
        self._num_steps += 1


@pytest.mark.parametrize("num_parked", [1, 5, WINDOW, 2 * WINDOW])
def test_s32_drafts_again_after_a_park(model: LoadedModel, num_parked: int) -> None:
    """Parked steps capture no hidden rows; one plain step later the head has its row again."""
    plain = plain_turn(model, PROMPT, max_tokens=NUM_TOKENS)
    holder = Holder(model.executable)
    target = Trunk(holder, model.traits, vocab_size=VOCAB, max_context_len=512)
    assert model.draft_head is not None
    speculator = HeadSpeculator(model.draft_head, target)
    parked = range(4, 4 + num_parked)
    execution = SpeculativeExecution(
        target,
        speculator,
        FixedWindow(4),
        governor=ParkingGovernor(parked),
        min_draft_prob=0.0,
        clock=FakeClock(),
    )
    turn = Turn(list(PROMPT), GREEDY, max_tokens=NUM_TOKENS)
    logits = execution.prefill(PROMPT).logits
    assert logits is not None
    token_id = turn.draw(logits[-1], len(PROMPT))
    num_steps = accepted_after = 0
    while not turn.is_over:
        assert token_id is not None
        result = take_step(execution, token_id, turn.num_remaining, turn.draw)
        token_id = result.token_ids[-1]
        assert result.num_drafts == 0 or num_steps not in parked
        accepted_after += result.num_accepted * int(num_steps >= parked.stop)
        num_steps += 1
    assert tuple(turn.emitted) == plain.token_ids
    assert accepted_after > 0
    assert cold_check(model, holder, list(PROMPT), turn.emitted)


@pytest.mark.parametrize("seed", range(4))
def test_s42_any_schedule_of_switches_edits_cancels_and_company_gives_plain_streams(
    model: LoadedModel, seed: int
) -> None:
    """Three chats take turns of all kinds; every answer that was not cut short is plain's."""
    schedule = random.Random(seed)
    rig = rig_on(model, FORCED)
    texts: dict[str, tuple[int, ...]] = dict.fromkeys(("a", "b", "c"), PROMPT[:10])
    running: dict[str, tuple[str, tuple[int, ...]]] = {}
    num_compared = 0
    for _ in range(120):
        chat = schedule.choice(sorted(texts))
        if chat not in running:
            kept = texts[chat] if schedule.random() < 0.6 else texts[chat][: len(texts[chat]) // 2]
            prompt = (*kept[:200], *schedule.choices(PROMPT, k=schedule.choice((1, 4, 9))))
            running[chat] = (rig.submit(prompt, chat, max_tokens=25), prompt)
        elif schedule.random() < 0.1:
            rig.engine.apply(CancelTurn(running[chat][0]))
        if schedule.random() < 0.2:
            window = schedule.choice((1, 4, 24))
            rig.engine.apply(
                UpdateSpeculation(schedule.choice((PLAIN, replace(FORCED, window=window))))
            )
        rig.run(schedule.randrange(1, 6))
        for chat, (request_id, prompt) in list(running.items()):
            if not any(e.request_id == request_id for e in of_type(rig.events, TurnFinished)):
                continue
            end = rig.finished(request_id)
            assert_cold(rig, prompt, end)
            if end.finish_reason != "cancelled":
                assert end.token_ids == plain_turn(model, prompt, max_tokens=25).token_ids
                num_compared += 1
            texts[chat] = (*prompt, *end.token_ids)
            del running[chat]
    assert num_compared > 10
