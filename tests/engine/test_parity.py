"""Speculation emits the plain stream and leaves the plain cache, whatever is proposed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from engine.sampling_params import SamplingParams
from engine.speculative.block_speculator import BlockSpeculator
from engine.speculative.draft_head import DraftHeadKind
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.governor import CostGovernor, GovernorPolicy
from engine.speculative.head_speculator import HeadSpeculator
from engine.speculative.ngram import NgramSpeculator
from engine.speculative.speculator import DraftContext, Speculator
from engine.speculative.window import AdaptiveWindow, FixedWindow
from tests.engine.fakes_drafters import FakeHead, ScriptedSpeculator
from tests.engine.fakes_speculative import (
    TARGETS,
    VOCAB,
    ColdTwin,
    FakeClock,
    FakeTarget,
    Turn,
    cold_contents,
    hidden_of,
    plain_stream,
    prefill,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
NUM_TOKENS = 40
WINDOWS = (1, 3, 7, 8, 9, 16)
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "top-k-1": SamplingParams(temperature=0.9, top_k=1),
    "sampled": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=11),
    "filtered": SamplingParams(temperature=0.8, top_k=7, top_p=0.9, min_p=0.02, seed=5),
    "penalised": SamplingParams(
        temperature=0.0, repeat_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5
    ),
    "sampled-penalised": SamplingParams(
        temperature=1.1, top_p=0.95, repeat_penalty=1.2, penalty_window=6, seed=3
    ),
}

Plain = Sequence[int]
"""The whole plain sequence, prompt included, indexed by position."""


def oracle(plain: Plain) -> ScriptedSpeculator:
    return ScriptedSpeculator(lambda c: plain[c.pos + 1 : c.pos + 1 + c.max_drafts])


def script(plain: Plain, accepts: Sequence[int]) -> ScriptedSpeculator:
    """In round i the first accepts[i] drafts are right, the next one is wrong, then noise."""
    rounds = iter(range(10**9))

    def guess(context: DraftContext) -> list[int]:
        num = accepts[next(rounds) % len(accepts)]
        right = list(plain[context.pos + 1 : context.pos + 1 + num])
        after = context.pos + 1 + len(right)
        wrong = (plain[after] + 1) % VOCAB if after < len(plain) else 0
        return [*right, wrong, 7, 7]

    return ScriptedSpeculator(guess)


def garbage(plain: Plain, seed: int) -> ScriptedSpeculator:
    """Random ids of every bad sort: too many, none, -1, V, repeats."""
    rng = random.Random(seed)

    def guess(context: DraftContext) -> list[int]:
        kind = rng.randrange(6)
        if kind == 0:
            return []
        if kind == 1:
            return [rng.randrange(VOCAB)] * (context.max_drafts + 5)
        if kind == 2:
            return [plain[context.pos + 1] if context.pos + 1 < len(plain) else 0, -1, 3]
        if kind == 3:
            return [rng.randrange(VOCAB), VOCAB, 3]
        return [rng.randrange(VOCAB) for _ in range(rng.randrange(context.max_drafts + 3))]

    return ScriptedSpeculator(guess)


def head(kind: DraftHeadKind, *, folds: bool) -> Callable[[Plain, FakeTarget], Speculator]:
    def make(plain: Plain, target: FakeTarget) -> Speculator:
        def guess(pos: int) -> int:  # right two times out of three
            token_id = plain[pos] if pos < len(plain) else 0
            return token_id if pos % 3 else (token_id + 1) % VOCAB

        true_hidden = hidden_rows(target, plain)
        fake = FakeHead(kind, guess, true_hidden, supports_fused_catch_up=folds)
        made = BlockSpeculator if kind is DraftHeadKind.BLOCK else HeadSpeculator
        return made(fake, target)

    return make


def hidden_rows(target: FakeTarget, plain: Plain) -> Callable[[int], np.ndarray]:
    """The target's hidden row at a position of the plain sequence, by a cold pass."""
    kind = next(k for k, make in TARGETS.items() if kind_of(make()) == kind_of(target))
    return cold_rows(kind, tuple(plain)).__getitem__


@cache
def cold_rows(kind: str, token_ids: tuple[int, ...]) -> list[np.ndarray]:
    fresh = TARGETS[kind]()
    rows = []
    for token_id in token_ids:
        hidden = fresh.forward_rows([token_id], want_hidden=True).hidden
        assert hidden is not None
        rows.append(hidden[0].copy())
    return rows


def kind_of(target: FakeTarget) -> tuple[type, bool]:
    return type(target), target.traits.verify_persists_accepted_kv


@cache
def reference(kind: str, sampling: str) -> tuple[list[int], object]:
    """The plain stream, and what a cold cache holds after it."""
    expected = plain_stream(kind, PROMPT, NUM_TOKENS, SAMPLING[sampling])
    return expected, cold_contents(kind, [*PROMPT, *expected[:-1]])


SPECULATORS: dict[str, Callable[[Plain, FakeTarget], Speculator]] = {
    "oracle": lambda plain, _: oracle(plain),
    "script": lambda plain, _: script(plain, [3, 0, 2, 6, 1]),
    "garbage": lambda plain, _: garbage(plain, 1),
    "ngram": lambda plain, _: NgramSpeculator(),
    "head": head(DraftHeadKind.PER_TOKEN, folds=False),
    "head-folding": head(DraftHeadKind.PER_TOKEN, folds=True),
    "block": head(DraftHeadKind.BLOCK, folds=False),
}


def run_turn(
    execution: SpeculativeExecution,
    target: FakeTarget,
    turn: Turn,
    first_row: np.ndarray,
    after_step: Callable[[list[int]], None] = lambda cached: None,
) -> list[int]:
    """The engine's loop around `step`; `after_step` sees the tokens the cache must hold."""
    token_id = turn.draw(first_row, len(turn.prompt_ids))
    while not turn.is_over:
        assert token_id is not None
        before = target.cached_len
        drawn = execution.step(token_id, turn.num_remaining, turn.draw)
        assert target.cached_len == before + len(drawn)
        assert drawn == turn.emitted[-len(drawn) :]
        token_id = drawn[-1]
        after_step([*turn.prompt_ids, *turn.emitted[:-1]])
    return turn.emitted


def stays_cold(kind: str, target: FakeTarget) -> Callable[[list[int]], None]:
    """A check for `after_step`: the cache equals one that was fed row by row."""
    twin = ColdTwin(kind)

    def check(cached: list[int]) -> None:
        assert target.contents() == twin.contents(cached)

    return check


def prefill_for(execution: SpeculativeExecution, target: FakeTarget) -> np.ndarray:
    """The prompt through the context or plainly and seeded, as the drafter needs it."""
    if execution.prefills_through_context:
        logits = execution.prefill(PROMPT).logits
        assert logits is not None
        return logits[-1].copy()
    row = prefill(target, PROMPT)
    execution.seed_committed(PROMPT)
    return row


@pytest.mark.parametrize(
    ("sampling", "window"),
    [
        (sampling, window)
        for sampling in SAMPLING
        for window in (WINDOWS if sampling in ("greedy", "sampled") else (3, 9))
    ],
)
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", SPECULATORS)
def test_s15_stream_and_cache_equal_plain_decoding(
    name: str, kind: str, window: int, sampling: str
) -> None:
    expected, contents = reference(kind, sampling)
    target = TARGETS[kind]()
    speculator = SPECULATORS[name]([*PROMPT, *expected], target)
    execution = SpeculativeExecution(
        target, speculator, FixedWindow(window), clock=FakeClock(), min_draft_prob=0.0
    )
    turn = Turn(PROMPT, SAMPLING[sampling], max_tokens=NUM_TOKENS)
    first_row = prefill_for(execution, target)
    assert run_turn(execution, target, turn, first_row) == expected
    assert target.contents() == contents
    assert execution.dropped is None
    assert max(len(call.token_ids) for call in target.calls[3:]) <= window + 1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", TARGETS)
def test_cache_equals_a_cold_one_after_every_step_of_a_mixed_schedule(kind: str, seed: int) -> None:
    """B7: drafting, parked and plain steps mixed at random; the wrong slot shows at the switch."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.7, seed=seed)
    expected = plain_stream(kind, PROMPT, 120, params)
    plain = [*PROMPT, *expected]
    target = TARGETS[kind]()

    def guess(context: DraftContext) -> list[int]:
        num = rng.randrange(7)
        right = rng.randrange(num + 1)
        ids = list(plain[context.pos + 1 : context.pos + 1 + num])
        return [i if n < right else (i + 1) % VOCAB for n, i in enumerate(ids)]

    governor = CostGovernor(GovernorPolicy(park_steps=(3, 5), hold_steps=6))
    execution = SpeculativeExecution(
        target,
        ScriptedSpeculator(guess),
        FixedWindow(6),
        governor=governor,
        clock=target_clock(target),
    )
    first_row = prefill_for(execution, target)

    check = stays_cold(kind, target)
    turn = Turn(PROMPT, params, max_tokens=120)
    assert run_turn(execution, target, turn, first_row, check) == expected


def target_clock(target: FakeTarget) -> FakeClock:
    target.clock = FakeClock()
    return target.clock


@pytest.mark.parametrize("pattern", [(0,), (1,), (5, 0), (6,), (0, 0, 6), (3, 3, 1, 0, 6, 5)])
@pytest.mark.parametrize("width", range(1, 7))
def test_s18_ring_is_exact_before_and_after_it_wrapped(
    width: int, pattern: tuple[int, ...]
) -> None:
    """B2: every total length 1..40 on a ring of 8, accepts of 0, 1, k-1 and k."""
    for kind in ("ring", "ring-reforward"):
        expected = plain_stream(kind, [1], 40)
        target = TARGETS[kind]()
        plain = [1, *expected]
        execution = SpeculativeExecution(
            target, script(plain, pattern), FixedWindow(width), clock=FakeClock()
        )
        turn = Turn([1], max_tokens=40)
        first_row = prefill(target, [1])
        execution.seed_committed([1])

        check = stays_cold(kind, target)
        assert run_turn(execution, target, turn, first_row, check) == expected


@pytest.mark.parametrize("num_rows", range(1, 18))
@pytest.mark.parametrize("kind", ["recurrent", "recurrent-slots"])
def test_s17_recurrent_state_is_exact_at_every_row_count(kind: str, num_rows: int) -> None:
    """Beyond 8 rows too, with every accept count and two rejections in a row (B6)."""
    for num_right in range(num_rows):
        expected = plain_stream(kind, PROMPT, 30)
        target = TARGETS[kind]()
        plain = [*PROMPT, *expected]
        speculator = script(plain, [num_right])
        execution = SpeculativeExecution(
            target, speculator, FixedWindow(max(num_rows - 1, 1)), clock=FakeClock()
        )
        turn = Turn(PROMPT, max_tokens=30)
        first_row = prefill_for(execution, target)

        check = stays_cold(kind, target)
        assert run_turn(execution, target, turn, first_row, check) == expected


def test_s70_governor_timing_changes_no_token() -> None:
    """Parking, holding and the chosen window depend on time; the stream must not."""
    params = SamplingParams(temperature=0.9, seed=2)
    streams = []
    for cost in (lambda rows: 1.0, lambda rows: 5.0 * rows, lambda rows: 1.0 + (rows == 9) * 90):
        target = TARGETS["linear"](row_ms=cost)
        window = AdaptiveWindow()
        execution = SpeculativeExecution(
            target,
            NgramSpeculator(),
            window,
            governor=CostGovernor(),
            costs=window,
            clock=target_clock(target),
        )
        turn = Turn(PROMPT, params, max_tokens=200)
        first_row = prefill_for(execution, target)
        streams.append(run_turn(execution, target, turn, first_row))
    assert streams[0] == streams[1] == streams[2] == plain_stream("linear", PROMPT, 200, params)


def test_hidden_of_is_exact_enough_to_tell_rows_apart() -> None:
    rows = {tuple(hidden_of([1, 2, n]).tolist()) for n in range(VOCAB)}
    assert len(rows) == VOCAB
