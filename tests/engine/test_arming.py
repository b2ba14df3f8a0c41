"""When and how a chat is armed, and what survives between turns and interludes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from engine.speculative.draft_head import DraftHead, DraftHeadKind
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.governor import GovernorState, StepSample
from engine.speculative.options import SpeculationOptions
from engine.speculative.registry import SpeculatorRegistry, default_registry
from engine.speculative.runtime import SpeculationRuntime
from engine.speculative.speculator import Decline, SpeculatorTraits
from engine.speculative.target import TargetTraits
from tests.engine.fakes_drafters import FakeHead, ScriptedSpeculator
from tests.engine.fakes_speculative import (
    TARGETS,
    VOCAB,
    FakeClock,
    FakeTarget,
    LinearTarget,
    Turn,
    cold_contents,
    hidden_of,
    plain_stream,
    prefill,
)
from tests.engine.speculative_bench import take_step

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Recording:
    """A runtime whose one algorithm records what it is told; `made` are its speculators."""

    def __init__(
        self,
        traits: SpeculatorTraits | None = None,
        *,
        trunk: TargetTraits | None = None,
        **options: object,
    ) -> None:
        self.made: list[ScriptedSpeculator] = []
        registry = SpeculatorRegistry()
        registry.register("recording", lambda _: self._make(traits))
        self.runtime = SpeculationRuntime(
            registry,
            trunk or TargetTraits(),
            None,
            options=SpeculationOptions(algorithm="recording", **options),  # type: ignore[arg-type]
            clock=FakeClock(),
        )

    def _make(self, traits: SpeculatorTraits | None) -> ScriptedSpeculator:
        self.made.append(ScriptedSpeculator(lambda _: [], traits=traits))
        return self.made[-1]

    def arm(self, target: FakeTarget, ids: Sequence[int] = ()) -> SpeculativeExecution:
        execution = self.runtime.arm(target, max_tokens=9, committed_ids=ids)
        assert not isinstance(execution, Decline)
        return execution

    @property
    def told(self) -> list[tuple[tuple[int, ...], bool, int]]:
        """(ids, had hidden rows, start) of every commit of the last speculator."""
        return [(ids, rows is not None, start) for ids, rows, start in self.made[-1].commits]


ROWS_NEEDED = SpeculatorTraits("head", 8, 0.0, needs_hidden=True)
RESUMING = SpeculatorTraits("head", 8, 0.0, needs_hidden=True, can_arm_after_prefix_reuse=True)


def runtime_with(
    head: FakeHead | None = None, traits: TargetTraits | None = None, **options: object
) -> SpeculationRuntime:
    return SpeculationRuntime(
        default_registry(),
        traits or TargetTraits(),
        cast(DraftHead | None, head),
        options=SpeculationOptions(**options),  # type: ignore[arg-type]
        clock=FakeClock(),
    )


def filled(ids: Sequence[int] = PROMPT) -> LinearTarget:
    target = LinearTarget()
    prefill(target, ids)
    return target


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_s20_request_that_cannot_decode_two_tokens_is_never_armed(max_tokens: int) -> None:
    recording = Recording()
    declined = recording.runtime.arm(LinearTarget(), max_tokens=max_tokens)
    assert isinstance(declined, Decline)
    assert recording.made == []


def test_s09_refusing_trunk_is_never_armed_and_says_why() -> None:
    runtime = runtime_with(traits=TargetTraits(refusal="no exact verify here"))
    assert runtime.decline == "no exact verify here"
    assert runtime.algorithm is None
    assert runtime.algorithms == ()
    assert runtime.arm(LinearTarget(), max_tokens=9) == Decline("no exact verify here")


@pytest.mark.parametrize("resumes", [True, False])
def test_s25_head_arms_after_a_reused_prefix_if_it_resumes(resumes: bool) -> None:
    head = FakeHead(
        DraftHeadKind.PER_TOKEN,
        lambda _: 0,
        lambda pos: hidden_of([pos]),
        resumes_after_gap=resumes,
    )
    armed = runtime_with(head).arm(filled(), max_tokens=9, committed_ids=PROMPT)
    assert isinstance(armed, SpeculativeExecution) is resumes


@pytest.mark.parametrize("kind", [None, DraftHeadKind.BLOCK])
def test_s25_ngram_and_block_arm_after_a_reused_prefix(kind: DraftHeadKind | None) -> None:
    head = kind and FakeHead(kind, lambda _: 0, lambda pos: hidden_of([pos]))
    armed = runtime_with(head).arm(filled(), max_tokens=9, committed_ids=PROMPT)
    assert isinstance(armed, SpeculativeExecution)


def test_s26_next_chunk_of_the_prompt_is_no_reuse() -> None:
    """Every chunk armed again: the tokens of the first one were lost, a head was declined."""
    recording = Recording(ROWS_NEEDED)
    target = LinearTarget()
    execution = recording.arm(target)
    for start in (0, 3, 6):
        piece = PROMPT[start : start + 3]
        execution.prefill(piece)
    assert len(recording.made) == 1
    assert recording.told == [
        ((3, 1, 4), True, 0),
        ((1, 5, 9), True, 3),
        ((2, 6), True, 6),
    ]


def test_s26_chunks_hand_over_the_rows_of_their_own_tokens() -> None:
    recording = Recording(ROWS_NEEDED)
    target = LinearTarget()
    execution = recording.arm(target)
    for start in (0, 5):
        execution.prefill(PROMPT[start : start + 5])
    rows = [row for _, hidden, _ in recording.made[0].commits for row in hidden]  # type: ignore[union-attr]
    for pos, row in enumerate(rows):
        np.testing.assert_array_equal(row, hidden_of(PROMPT[: pos + 1]))


def test_s27_drafter_without_hidden_rows_arms_after_a_plain_prefill() -> None:
    recording = Recording()
    recording.arm(filled(), PROMPT)
    assert recording.told == [(tuple(PROMPT), False, 0)]


@pytest.mark.parametrize("kind", TARGETS)
def test_s28_arms_on_a_holder_it_never_filled(kind: str) -> None:
    """A chat's own holder or a checkpoint's clone: every later turn lives there."""
    plain = plain_stream(kind, PROMPT, 40)
    target = TARGETS[kind]()
    row = prefill(target, PROMPT)
    runtime = runtime_with(traits=target.traits, use_governor=False)
    execution = runtime.arm(target, max_tokens=40, committed_ids=PROMPT)
    assert isinstance(execution, SpeculativeExecution)
    turn = Turn(PROMPT, max_tokens=40)
    token_id = turn.draw(row, len(PROMPT))
    while not turn.is_over:
        assert token_id is not None
        token_id = execution.step(token_id, turn.num_remaining, turn.draw)[-1]
    assert turn.emitted == plain
    assert target.contents() == cold_contents(kind, [*PROMPT, *plain[:-1]])


@pytest.mark.parametrize(
    ("traits", "expected"), [(None, False), (RESUMING, False), (ROWS_NEEDED, True)]
)
def test_s29_only_a_head_that_needs_the_prompts_rows_prefills_through_the_context(
    traits: SpeculatorTraits | None, expected: bool
) -> None:
    assert Recording(traits).arm(LinearTarget()).prefills_through_context is expected


def test_s29_arming_and_seeding_touch_the_target_not_at_all() -> None:
    target = filled()
    num_before = target.num_forwards
    runtime_with().arm(target, max_tokens=9, committed_ids=PROMPT)
    assert target.num_forwards == num_before


def test_s30_reused_tokens_are_handed_over_before_anything_else() -> None:
    recording = Recording()
    target = filled()
    execution = recording.arm(target, PROMPT)
    execution.step(7, 5, Turn([*PROMPT, 7]).draw)
    assert recording.told[0] == (tuple(PROMPT), False, 0)
    assert recording.told[1] == ((7,), False, len(PROMPT))


def test_second_turn_tells_only_the_new_tokens() -> None:
    """No re-index: the drafter lives on beside the chat's holder."""
    recording = Recording()
    target = filled()
    execution = recording.arm(target, PROMPT)
    prefill(target, [7, 8])
    execution.begin_turn()
    execution.seed_committed([*PROMPT, 7, 8])
    execution.seed_committed([*PROMPT, 7, 8])
    assert recording.told == [(tuple(PROMPT), False, 0), ((7, 8), False, len(PROMPT))]


def test_b10_regenerated_turn_replaces_the_old_answer() -> None:
    recording = Recording()
    target = filled()
    execution = recording.arm(target, PROMPT)
    target.rewind_to(5)
    execution.begin_turn()
    execution.seed_committed(PROMPT[:5])
    assert recording.told[-1] == ((), False, 5)
    prefill(target, [40, 41])
    execution.seed_committed([*PROMPT[:5], 40, 41])
    assert recording.told[-1] == ((40, 41), False, 5)


def test_s31_gap_discards_pending_rows_and_waits_for_a_fresh_one() -> None:
    plain = [*PROMPT, *plain_stream("linear", PROMPT, 30)]
    rows = [hidden_of(plain[: pos + 1]) for pos in range(len(plain))]
    head = FakeHead(
        DraftHeadKind.PER_TOKEN, plain.__getitem__, rows.__getitem__, supports_fused_catch_up=True
    )
    target = filled()
    runtime = runtime_with(head, use_governor=False, window=3)
    execution = runtime.arm(target, max_tokens=30, committed_ids=PROMPT)
    assert isinstance(execution, SpeculativeExecution)
    turn = Turn(PROMPT, max_tokens=30)
    turn.emitted.append(plain[len(PROMPT)])
    turn.sampler.accept(turn.emitted[0])
    first = take_step(execution, turn.emitted[-1], 20, turn.draw)
    assert first.kind == "plain"  # no row to chain from yet
    second = take_step(execution, turn.emitted[-1], 20, turn.draw)
    assert (second.num_drafts, second.num_accepted) == (3, 3)
    interlude = plain[target.cached_len : target.cached_len + 2]
    prefill(target, interlude)
    execution.catch_up(interlude)
    turn.emitted = list(plain[len(PROMPT) : target.cached_len + 1])
    turn.sampler = Turn(plain[: target.cached_len + 1]).sampler
    num_folds = head.num_folds
    assert take_step(execution, turn.emitted[-1], 9, turn.draw).kind == "plain"
    assert head.num_folds == num_folds
    assert take_step(execution, turn.emitted[-1], 9, turn.draw).num_accepted == 3


# -- governor and window are shared (S33)


def test_s33_one_governor_serves_every_request_of_a_model() -> None:
    runtime = runtime_with()
    first = runtime.arm(filled(), max_tokens=9, committed_ids=PROMPT)
    second = runtime.arm(filled(), max_tokens=9, committed_ids=PROMPT)
    assert isinstance(first, SpeculativeExecution)
    assert isinstance(second, SpeculativeExecution)
    assert first.governor is second.governor is not None


def test_s35_new_request_on_a_kept_drafter_cuts_the_park_short() -> None:
    recording = Recording()
    execution = recording.arm(filled(), PROMPT)
    governor = execution.governor
    assert governor is not None
    for _ in range(3):
        governor.record_plain(1.0)
    while governor.state is not GovernorState.PARKED:
        governor.record_speculative(StepSample(9.0, 1, 0))
    governor._steps_left = 200
    execution.begin_turn()
    assert governor._steps_left == 32


def test_s41_governor_can_be_switched_off() -> None:
    assert Recording(use_governor=False).arm(filled(), PROMPT).governor is None


@pytest.mark.parametrize(
    ("typed", "preferred", "expected"), [(None, None, 8), (None, 3, 3), (16, 3, 16), (1, 7, 1)]
)
def test_s23_preferred_window_narrows_the_default_but_no_typed_number(
    typed: int | None, preferred: int | None, expected: int
) -> None:
    trunk = TargetTraits(preferred_window=preferred)
    for governed in (True, False):
        recording = Recording(trunk=trunk, window=typed, use_governor=governed)
        execution = recording.arm(filled(), PROMPT)
        turn = Turn([*PROMPT, 7], max_tokens=60)
        execution.step(7, 50, turn.draw)
        while not recording.made[-1].contexts:  # the governor measures plain steps first
            execution.step(turn.emitted[-1], 50, turn.draw)
        assert recording.made[-1].contexts[0].max_drafts == expected


# -- switching (S42)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("switch_at", range(0, 24, 5))
def test_s42_switching_between_any_two_steps_changes_no_token(kind: str, switch_at: int) -> None:
    plain = plain_stream(kind, PROMPT, 30)
    target = TARGETS[kind]()
    row = prefill(target, PROMPT)
    runtime = runtime_with(traits=target.traits, use_governor=False)
    policies = [
        SpeculationOptions(algorithm="ngram", window=2, use_governor=False),
        SpeculationOptions(is_enabled=False),
        SpeculationOptions(algorithm="auto", window=9),
    ]
    turn = Turn(PROMPT, max_tokens=30)
    token_id = turn.draw(row, len(PROMPT))
    num_steps = 0
    execution: SpeculativeExecution | Decline = Decline("not yet")
    while not turn.is_over:
        if num_steps % (switch_at + 1) == 0:
            runtime.set_options(policies[num_steps % 3])
            cached = [*PROMPT, *turn.emitted[:-1]]
            execution = runtime.arm(target, max_tokens=turn.num_remaining, committed_ids=cached)
        token_id = one_step(execution, target, turn, token_id)
        num_steps += 1
    assert turn.emitted == plain
    assert target.contents() == cold_contents(kind, [*PROMPT, *plain[:-1]])


def one_step(
    execution: SpeculativeExecution | Decline, target: FakeTarget, turn: Turn, last: int | None
) -> int | None:
    assert last is not None
    if isinstance(execution, SpeculativeExecution):
        return execution.step(last, turn.num_remaining, turn.draw)[-1]
    logits = target.forward_rows([last]).logits
    assert logits is not None
    return turn.draw(logits[0], target.cached_len)


def test_s42_decline_and_algorithm_follow_the_options() -> None:
    runtime = runtime_with()
    assert (runtime.algorithm, runtime.decline) == ("ngram", None)
    runtime.set_options(SpeculationOptions(is_enabled=False))
    assert (runtime.algorithm, runtime.decline) == (None, "speculation is off")


# -- interludes (S46, S47)


@pytest.mark.parametrize("kind", TARGETS)
def test_s47_context_survives_an_interlude_beside_other_chats(kind: str) -> None:
    """1 -> N -> 1: no re-index and no fresh probe; the tokens are told without hidden rows."""
    plain = plain_stream(kind, PROMPT, 40)
    stream = [*PROMPT, *plain]
    target = TARGETS[kind]()
    speculator = ScriptedSpeculator(lambda c: stream[c.pos + 1 : c.pos + 4])
    execution = execution_of(speculator, target)
    turn = Turn(PROMPT, max_tokens=40)
    token_id = turn.draw(prefill(target, PROMPT), len(PROMPT))
    execution.seed_committed(PROMPT)
    while not turn.is_over:
        assert token_id is not None
        token_id = execution.step(token_id, turn.num_remaining, turn.draw)[-1]
        interlude = []
        while not turn.is_over and len(interlude) < 3:
            assert token_id is not None
            interlude.append(token_id)
            logits = target.forward_rows([token_id]).logits
            assert logits is not None
            token_id = turn.draw(logits[0], target.cached_len)
        if interlude:
            execution.catch_up(interlude)
    assert turn.emitted == plain
    assert speculator.num_resets == 0
    told = [i for ids, _, _ in speculator.commits for i in ids]
    assert told == [*PROMPT, *plain[:-1]]


def execution_of(speculator: ScriptedSpeculator, target: FakeTarget) -> SpeculativeExecution:
    registry = SpeculatorRegistry()
    registry.register("one", lambda _: speculator)
    runtime = SpeculationRuntime(
        registry,
        target.traits,
        None,
        options=SpeculationOptions(algorithm="one", use_governor=False),
        clock=FakeClock(),
    )
    execution = runtime.arm(target, max_tokens=99)
    assert isinstance(execution, SpeculativeExecution)
    return execution


@pytest.mark.parametrize("seed", range(4))
def test_b12_clones_of_one_prefix_do_not_touch_each_other(seed: int) -> None:
    """Two chats on copies of one target: the drafter of one never learns the other's tokens."""
    runtime = runtime_with(use_governor=False)
    streams = []
    for turn_seed in (seed, seed + 1):
        first = [*PROMPT, (5 + turn_seed) % VOCAB]
        target = filled(first)
        execution = runtime.arm(target, max_tokens=30, committed_ids=first)
        assert isinstance(execution, SpeculativeExecution)
        turn = Turn(first, max_tokens=30)
        token_id = turn.draw(target._row_logits(), len(first))
        while not turn.is_over:
            assert token_id is not None
            token_id = execution.step(token_id, turn.num_remaining, turn.draw)[-1]
        streams.append(turn.emitted)
        assert turn.emitted == plain_stream("linear", first, 30)
