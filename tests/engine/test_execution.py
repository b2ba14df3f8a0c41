"""The loop's contracts beside the stream: stops, limits, costs, faults, counters."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from engine.speculative import execution as execution_module
from engine.speculative.draft_head import DraftHeadKind
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.governor import CostGovernor, GovernorState
from engine.speculative.head_speculator import HeadSpeculator
from engine.speculative.speculator import DraftContext, SpeculatorTraits
from engine.speculative.window import FixedWindow
from tests.engine.fakes_drafters import FakeHead, ScriptedSpeculator
from tests.engine.fakes_speculative import (
    TARGETS,
    VOCAB,
    FakeClock,
    LinearTarget,
    Turn,
    hidden_of,
    plain_stream,
    prefill,
)
from tests.engine.speculative_bench import KINDS, PROMPT, Bench, forced

# -- stops (S19, A1, A2, B1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(9))
def test_s19_stop_inside_a_window_ends_the_turn_there(index: int, kind: str) -> None:
    """A1: an end token accepted in the middle of a block was run past."""
    plain = plain_stream(kind, PROMPT, 30)
    stop_id = plain[index]
    first = plain.index(stop_id)
    bench = Bench(forced("oracle:8", plain), kind=kind, turn=Turn(PROMPT, stop_ids=[stop_id]))
    assert bench.finish() == plain[: first + 1]
    bench.assert_cold()


def test_s19_drafts_behind_a_stop_never_count_as_accepted() -> None:
    plain = plain_stream("linear", PROMPT, 30)
    stop_at = next(i for i in range(3, 9) if plain.index(plain[i]) == i)
    bench = Bench(forced("oracle:8", plain), turn=Turn(PROMPT, stop_ids=[plain[stop_at]]))
    bench.finish()
    stats = bench.execution.stats
    assert len(bench.turn.emitted) == 1 + stats.draft_n_accepted + stats.verify_steps
    assert sum(stats.accepted_per_position) == stats.draft_n_accepted


def test_s19_nothing_is_drawn_behind_a_stop() -> None:
    """The penalty state, the text and the random positions stay where plain decoding ends."""
    plain = plain_stream("linear", PROMPT, 30)
    turn = Turn(PROMPT, stop_ids=[plain[4]])
    bench = Bench(forced("oracle:8", plain), turn=turn)
    bench.finish()
    assert turn.positions == list(range(len(PROMPT), len(PROMPT) + len(turn.emitted)))


def test_s19_no_window_starts_at_a_stop() -> None:
    """Stepping on after the end is a bug of the caller and is said so."""
    plain = plain_stream("linear", PROMPT, 30)
    bench = Bench(forced("oracle:8", plain), turn=Turn(PROMPT, stop_ids=[plain[0]]))
    assert bench.turn.is_over
    with pytest.raises(AssertionError, match="after the turn had ended"):
        bench.step()


@pytest.mark.parametrize("kind", KINDS)
def test_b1_second_turn_after_a_stop_evaluates_only_new_tokens(kind: str) -> None:
    """B1: rows behind the stop stayed in the cache, so the next prompt no longer matched."""
    plain = plain_stream(kind, PROMPT, 30)
    bench = Bench(forced("oracle:6", plain), kind=kind, turn=Turn(PROMPT, stop_ids=[plain[3]]))
    emitted = bench.finish()
    follow_up = [emitted[-1], 7, 8, 9]
    row = prefill(bench.target, follow_up)
    cold = TARGETS[kind]()
    assert np.array_equal(row, prefill(cold, [*PROMPT, *emitted[:-1], *follow_up]))


# -- limits (A3)


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9])
def test_a3_exactly_the_tokens_asked_for(max_tokens: int) -> None:
    plain = plain_stream("linear", PROMPT, 30)
    bench = Bench(forced("oracle:8", plain), turn=Turn(PROMPT, max_tokens=max_tokens))
    assert bench.finish() == plain[:max_tokens]
    bench.assert_cold()


@pytest.mark.parametrize("kind", KINDS)
def test_a3_window_shrinks_to_what_the_context_holds(kind: str) -> None:
    """Context 16, prompt 8: the last steps are plain ones and nothing indexes past the end."""
    plain = plain_stream(kind, PROMPT, 30)
    bench = Bench(
        forced("oracle:8", plain), kind=kind, turn=Turn(PROMPT, max_tokens=9), max_context_len=16
    )
    assert bench.finish() == plain[:9]
    assert bench.target.cached_len == 16


def test_a3_window_minds_the_context_whatever_the_budget_says() -> None:
    plain = plain_stream("linear", PROMPT, 30)
    turn = Turn(PROMPT, max_tokens=1000)
    bench = Bench(forced("oracle:8", plain), turn=turn, max_context_len=16)
    while bench.target.cached_len < 16:
        bench.step()
    assert turn.emitted == plain[:9]


@pytest.mark.parametrize("window", [1, 3, 7, 8, 9, 16, 64])
def test_verify_never_exceeds_window_plus_one_rows(window: int) -> None:
    plain = plain_stream("linear", PROMPT, 200)
    speculator = ScriptedSpeculator(lambda c: ([*PROMPT, *plain] * 3)[c.pos + 1 : c.pos + 99])
    bench = Bench(speculator, window=window, turn=Turn(PROMPT, max_tokens=200))
    num_prefills = len(bench.target.calls)
    bench.finish()
    rows = [len(call.token_ids) for call in bench.target.calls[num_prefills:]]
    assert max(rows) == window + 1


@pytest.mark.parametrize("bad", [[-1], [VOCAB], [-1, 3], [VOCAB + 5, 2]])
def test_ids_outside_the_vocabulary_never_reach_the_target(bad: list[int]) -> None:
    bench = Bench(ScriptedSpeculator(lambda _: bad))
    result = bench.step()
    assert (result.kind, result.num_drafts) == ("plain", 0)


def test_drafts_behind_a_bad_id_are_dropped_with_it() -> None:
    plain = plain_stream("linear", PROMPT, 10)
    bench = Bench(ScriptedSpeculator(lambda _: [plain[1], VOCAB, plain[3]]))
    result = bench.step()
    assert (result.num_drafts, result.num_accepted) == (1, 1)


# -- rollback (S16, S18, B8)


def test_s16_persisting_trunk_only_rewinds() -> None:
    plain = plain_stream("linear", PROMPT, 30)
    bench = Bench(forced("script:2,0,5", plain))
    num_prefills = len(bench.target.calls)
    num_steps = 0
    while not bench.turn.is_over:
        bench.step()
        num_steps += 1
    assert len(bench.target.calls) - num_prefills == num_steps


def test_s16_other_trunk_restores_and_forwards_the_kept_prefix_again() -> None:
    plain = plain_stream("recurrent", PROMPT, 30)
    bench = Bench(forced("script:2", plain), kind="recurrent")
    num_before = len(bench.target.calls)
    bench.step()
    verify, replay = bench.target.calls[num_before:]
    assert replay.token_ids == verify.token_ids[:3]
    assert replay.want_logits == "none"


@pytest.mark.parametrize("kind", ["recurrent", "ring-reforward"])
def test_full_acceptance_restores_nothing(kind: str) -> None:
    """A fully accepted window got its evicted rows back over its own, 30 logits off later."""
    plain = plain_stream(kind, PROMPT, 30)
    bench = Bench(forced("oracle:4", plain), kind=kind, window=4)
    num_before = len(bench.target.calls)
    assert bench.step().num_accepted == 4
    assert len(bench.target.calls) == num_before + 1
    bench.assert_cold()


def test_s18_verify_is_resolved_before_any_rollback_and_on_full_acceptance_too() -> None:
    plain = plain_stream("ring", PROMPT, 30)
    bench = Bench(forced("script:4,1", plain), kind="ring", window=4)
    bench.step()
    bench.step()
    assert bench.target.resolved == [(5, 4), (3, 1)]


def test_b8_replay_never_decides_again() -> None:
    """A replay whose rows came out otherwise was verified again, and rejected, for ever."""

    class Fickle(TARGETS["recurrent"]):  # type: ignore[misc,name-defined]
        def _row_logits(self) -> np.ndarray:
            row = super()._row_logits()
            is_replay = self.calls[-1].want_logits == "none"
            return np.roll(row, 1) if is_replay else row

    plain = plain_stream("recurrent", PROMPT, 40)
    bench = Bench(forced("script:2,0", plain), kind="recurrent")
    fickle = Fickle()
    bench.execution.target = bench.target = fickle
    bench.turn = Turn(PROMPT, max_tokens=40)
    bench.last_id = bench.turn.draw(prefill(fickle, PROMPT), len(PROMPT))
    num_rounds = 0
    while not bench.turn.is_over:
        assert bench.step().token_ids
        num_rounds += 1
    assert num_rounds <= 40
    assert bench.turn.emitted == plain


# -- the plain branch (S22, S24, S39)


def test_s22_plain_step_hands_the_sampler_the_targets_own_row() -> None:
    """No vocabulary-sized copy per token."""
    bench = Bench(ScriptedSpeculator(lambda _: []))
    rows = []
    draw = bench.turn.draw

    def spy(row: np.ndarray, position: int, argmax: int | None = None) -> int | None:
        rows.append(row)
        return draw(row, position)

    assert bench.last_id is not None
    bench.execution.step(bench.last_id, 10, spy)
    assert np.shares_memory(rows[0], bench.target._logits)


def test_s24_steps_without_drafts_are_the_models_own_decode() -> None:
    """One row, no hidden rows, no snapshot, for the rest of the run of such steps."""
    bench = Bench(ScriptedSpeculator(lambda _: []), kind="recurrent")
    bench.target.snapshot_state = lambda: pytest.fail("no snapshot")  # type: ignore[method-assign]
    num_before = len(bench.target.calls)
    for _ in range(6):
        bench.step()
    for call in bench.target.calls[num_before:]:
        assert (len(call.token_ids), call.want_hidden) == (1, False)


def parked_governor() -> CostGovernor:
    governor = CostGovernor()
    governor.state = GovernorState.PARKED
    governor._steps_left = 10**6
    return governor


@pytest.mark.parametrize("can_resume", [True, False])
def test_s39_parked_step_captures_rows_only_for_a_head_that_cannot_resume(can_resume: bool) -> None:
    traits = SpeculatorTraits(
        "head", 8, 0.0, needs_hidden=True, can_arm_after_prefix_reuse=can_resume
    )
    speculator = ScriptedSpeculator(lambda _: [1], traits=traits)
    bench = Bench(speculator, governor=parked_governor())
    assert bench.step().kind == "parked"
    assert bench.target.calls[-1].want_hidden is not can_resume
    assert not speculator.contexts


def test_parked_steps_tell_a_learned_drafter_its_tokens() -> None:
    """C4: parking saved the drafter's work and its state fell behind for good."""
    traits = SpeculatorTraits("head", 8, 0.0, needs_hidden=True, can_arm_after_prefix_reuse=True)
    speculator = ScriptedSpeculator(lambda _: [1], traits=traits)
    bench = Bench(speculator, governor=parked_governor())
    for _ in range(5):
        bench.step()
    told = [token_id for ids, _, _ in speculator.commits for token_id in ids]
    assert told == [*PROMPT, *bench.turn.emitted[:-1]]


def test_s41_without_a_governor_every_step_drafts() -> None:
    bench = Bench(ScriptedSpeculator(lambda _: [0]), turn=Turn(PROMPT, max_tokens=100))
    bench.finish()
    assert bench.execution.stats.plain_steps <= 1  # the last token leaves no room for a draft
    assert bench.execution.governor_line == ""
    assert bench.execution.governor_state == "off"


def test_s33_losing_drafter_is_parked_and_says_so() -> None:
    bench = Bench(
        ScriptedSpeculator(lambda _: [0, 0, 0]),
        governor=CostGovernor(),
        turn=Turn(PROMPT, max_tokens=300),
    )
    bench.finish()
    stats = bench.execution.stats
    assert stats.parked_steps > 200
    assert stats.plain_steps >= stats.parked_steps
    assert f"parked={stats.parked_steps}" in bench.execution.governor_line
    assert bench.execution.governor_state in ("parked", "probing")


# -- counters (S64)


def test_s64_phases_are_timed_and_counters_add_up() -> None:
    plain = plain_stream("recurrent", PROMPT, 60)
    bench = Bench(forced("script:2,0,3", plain), kind="recurrent", turn=Turn(PROMPT, max_tokens=60))
    bench.finish()
    stats = bench.execution.stats
    assert {"draft", "snapshot", "verify", "sample", "rollback", "catch_up"} <= set(stats.phase_ms)
    assert stats.phase_ms["verify"] > 0
    assert stats.phase_ms["rollback"] > 0  # the fake's replays cost time
    assert len(bench.turn.emitted) == 1 + stats.draft_n_accepted + stats.verify_steps + (
        stats.plain_steps
    )
    assert 0 <= stats.draft_n_accepted <= stats.draft_n
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)


def test_s64_debug_log_tells_every_steps_decision(caplog: pytest.LogCaptureFixture) -> None:
    """A drafter that stayed silent on every follow-up turn was found by such a log."""
    plain = plain_stream("linear", PROMPT, 10)
    bench = Bench(forced("script:2,0", plain))
    with caplog.at_level("DEBUG", "engine.speculative.execution"):
        bench.step()
        bench.step()
    assert [record.message for record in caplog.records] == [
        "step=verify pos=8 proposed=3 first_prob=- verified=3 accepted=2 governor=off",
        "step=verify pos=11 proposed=1 first_prob=- verified=1 accepted=0 governor=off",
    ]


def test_new_turn_starts_with_fresh_counters() -> None:
    plain = plain_stream("linear", PROMPT, 10)
    bench = Bench(forced("oracle:4", plain))
    bench.step()
    bench.execution.begin_turn()
    assert bench.execution.stats.verify_steps == 0
    assert bench.execution.stats.algorithm == "oracle:4"


# -- the seams (S03, S04, S06)


def test_s03_new_signal_is_a_new_field() -> None:
    """One frozen struct goes to every drafter; it carries what the window and the gate allow."""
    speculator = ScriptedSpeculator(lambda _: [])
    bench = Bench(speculator, window=5, turn=Turn(PROMPT, max_tokens=4))
    bench.step()
    assert speculator.contexts == [
        DraftContext(
            last_token_id=bench.turn.emitted[0], pos=len(PROMPT), max_drafts=2, min_draft_prob=0.0
        )
    ]


def test_s03_typed_gate_replaces_the_algorithms_own() -> None:
    speculator = ScriptedSpeculator(lambda _: [], traits=SpeculatorTraits("gated", 4, 0.35))
    for typed, expected in ((None, 0.35), (0.6, 0.6), (0.0, 0.0)):
        target = LinearTarget()
        execution = SpeculativeExecution(
            target, speculator, FixedWindow(4), min_draft_prob=typed, clock=FakeClock()
        )
        execution.prefill([1, 2])
        execution.step(3, 5, Turn([1, 2, 3]).draw)
        assert speculator.contexts[-1].min_draft_prob == expected


def test_s03_algorithms_own_limit_bounds_the_proposal() -> None:
    traits = SpeculatorTraits("short", 2, 0.0, can_arm_after_prefix_reuse=True)
    speculator = ScriptedSpeculator(lambda c: [0] * 9, traits=traits)
    bench = Bench(speculator, window=8)
    assert bench.step().num_drafts == 2
    assert speculator.contexts[0].max_drafts == 2


def test_s04_committed_rows_are_the_kept_ones_and_outlive_the_targets_buffers() -> None:
    """B14: a pointer into a buffer that the next forward overwrites, or the last drafted row."""
    for kind in ("linear", "recurrent"):
        plain = plain_stream(kind, PROMPT, 20)
        stream = [*PROMPT, *plain]
        traits = SpeculatorTraits("head", 8, 0.0, needs_hidden=True)
        speculator = ScriptedSpeculator(
            lambda c, stream=stream: [*stream[c.pos + 1 : c.pos + 3], 0, 0],  # type: ignore[misc]
            traits=traits,
        )
        bench = Bench(speculator, kind=kind)
        bench.step()
        ids, hidden, start = speculator.commits[-1]
        assert (list(ids), start) == (stream[8:11], 8)
        assert hidden is not None
        fresh = TARGETS[kind]()
        for pos, token_id in enumerate(stream[:11]):
            true_row = fresh.forward_rows([token_id], want_hidden=True).hidden
            assert true_row is not None
            if pos >= 8:
                np.testing.assert_array_equal(hidden[pos - 8], true_row[0])


def test_s06_step_reads_as_its_phases() -> None:
    """The loop knows no algorithm: not one of their names stands in its file."""
    source = inspect.getsource(execution_module).lower()
    for name in ("ngram", "draft-head", "medusa", "block_spec", "head_spec", "oracle", "registry"):
        assert name not in source
    body = inspect.getsource(SpeculativeExecution.step)
    phases = [body.index(f"self._{name}(") for name in ("draft", "verify", "rollback", "commit")]
    assert phases == sorted(phases)


def test_s32_head_without_state_drafts_from_any_position() -> None:
    """It reads the target's own cache and the row it is handed; a gap costs it one plain step."""
    plain = plain_stream("linear", PROMPT, 40)
    stream = [*PROMPT, *plain]
    head = FakeHead(
        DraftHeadKind.PER_TOKEN, stream.__getitem__, lambda pos: hidden_of(stream[: pos + 1])
    )
    bench = Bench(HeadSpeculator(head, LinearTarget()), window=3)
    kinds = [bench.step().kind for _ in range(3)]
    skipped = bench.turn.emitted[-1]
    logits = bench.target.forward_rows([skipped]).logits
    assert logits is not None
    bench.last_id = bench.turn.draw(logits[0], bench.target.cached_len)
    bench.execution.catch_up([skipped])
    kinds += [bench.step().kind for _ in range(3)]
    assert kinds == ["plain", "verify", "verify", "plain", "verify", "verify"]
    assert bench.execution.dropped is None
