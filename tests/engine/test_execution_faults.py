"""Faults in every phase, and sampling settings under drafting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from backends.base import BackendError, RowOutput
from engine.errors import NotANumber
from engine.sampling_params import SamplingParams
from engine.speculative.governor import CostGovernor
from engine.speculative.ngram import NgramSpeculator
from engine.speculative.speculator import DraftContext
from engine.speculative.window import AdaptiveWindow
from tests.engine.fakes_drafters import ScriptedSpeculator
from tests.engine.fakes_speculative import (
    LinearTarget,
    Turn,
    cold_contents,
    plain_stream,
    prefill,
)
from tests.engine.speculative_bench import KINDS, PROMPT, Bench, forced

# -- faults (B9, decision: speculation never fails a turn)


class Breaking(ScriptedSpeculator):
    """Raises in one method from the n-th call on."""

    def __init__(self, method: str, number: int, plain: Sequence[int], error: Exception) -> None:
        super().__init__(lambda c: ([*PROMPT, *plain])[c.pos + 1 : c.pos + 4])
        self._method, self._left, self._error = method, number, error

    def _maybe(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left < 0:
                raise self._error

    def propose(self, context: DraftContext):  # type: ignore[no-untyped-def]
        self._maybe("propose")
        return super().propose(context)

    def commit(self, token_ids, hidden, start_pos):  # type: ignore[no-untyped-def]
        self._maybe("commit")
        super().commit(token_ids, hidden, start_pos)


@pytest.mark.parametrize(
    "error",
    [BackendError("no memory left"), ValueError("shape"), RuntimeError("cuda"), KeyError(3)],
)
@pytest.mark.parametrize("method", ["propose", "commit"])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_drafter_that_errs_is_dropped_and_the_answer_goes_on(
    kind: str, number: int, method: str, error: Exception
) -> None:
    plain = plain_stream(kind, PROMPT, 30)
    bench = Bench(
        Breaking(method, number, plain, error), kind=kind, turn=Turn(PROMPT, max_tokens=30)
    )
    assert bench.finish() == plain
    bench.assert_cold()
    assert bench.execution.dropped == f"scripted stopped drafting: {error}"


@pytest.mark.parametrize("offset", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_b9_failed_forward_leaves_tokens_and_cache_in_step(kind: str, offset: int) -> None:
    """FAULT(n) in verify, replay and plain steps: carried on plainly, or raised with nothing lost."""
    plain = plain_stream(kind, PROMPT, 30)
    bench = Bench(forced("script:2,0,3,1", plain), kind=kind, turn=Turn(PROMPT, max_tokens=30))
    bench.target.fail_at = {bench.target.num_forwards + offset}
    while not bench.turn.is_over:
        before = bench.target.contents(), list(bench.turn.emitted)
        try:
            bench.step()
        except BackendError:
            assert (bench.target.contents(), bench.turn.emitted) == before
    assert bench.turn.emitted == plain
    bench.assert_cold()


@pytest.mark.parametrize("kind", KINDS)
def test_verify_that_fails_becomes_a_plain_step(kind: str) -> None:
    plain = plain_stream(kind, PROMPT, 10)
    bench = Bench(forced("oracle:4", plain), kind=kind)
    bench.target.fail_at = {bench.target.num_forwards}
    result = bench.step()
    assert (result.kind, result.token_ids) == ("plain", plain[1:2])
    assert bench.execution.dropped is not None
    assert "injected fault" in bench.execution.dropped
    assert bench.step().kind == "plain"


@pytest.mark.parametrize("kind", KINDS)
def test_verify_without_memory_for_its_logits_becomes_a_plain_step(kind: str) -> None:
    """A buffer of [rows, V] that numpy cannot allocate is a MemoryError and no BackendError."""
    plain = plain_stream(kind, PROMPT, 30)
    bench = Bench(forced("oracle:4", plain), kind=kind, turn=Turn(PROMPT, max_tokens=30))
    forward = bench.target.forward_rows

    def cramped(token_ids: Sequence[int], **wanted: object) -> RowOutput:
        if len(token_ids) > 1:
            raise MemoryError
        return forward(token_ids, **wanted)  # type: ignore[arg-type]

    bench.target.forward_rows = cramped  # type: ignore[method-assign]
    assert bench.finish() == plain
    assert bench.execution.dropped == "oracle:4 stopped drafting: MemoryError"
    bench.assert_cold()


@pytest.mark.parametrize("kind", ["recurrent", "ring-reforward"])
def test_replay_without_memory_goes_on_row_by_row(kind: str) -> None:
    plain = plain_stream(kind, PROMPT, 30)
    bench = Bench(forced("script:2", plain), kind=kind, turn=Turn(PROMPT, max_tokens=30))
    forward = bench.target.forward_rows

    def cramped(token_ids: Sequence[int], **wanted: object) -> RowOutput:
        if len(token_ids) > 1 and wanted.get("want_logits") == "none":
            raise MemoryError
        return forward(token_ids, **wanted)  # type: ignore[arg-type]

    bench.target.forward_rows = cramped  # type: ignore[method-assign]
    assert bench.finish() == plain
    bench.assert_cold()


@pytest.mark.parametrize("error", [NotANumber("the model's output is not a number"), MemoryError()])
@pytest.mark.parametrize("row", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_draw_that_fails_inside_a_verify_leaves_no_draft_in_the_cache(
    kind: str, row: int, error: Exception
) -> None:
    """Drafts behind it stood in the cache as if they had been said."""
    plain = plain_stream(kind, PROMPT, 10)
    bench = Bench(forced("oracle:4", plain), kind=kind)
    left = row

    def draw(logits: np.ndarray, position: int, argmax: int | None = None) -> int | None:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return bench.turn.draw(logits, position)

    assert bench.last_id is not None
    with pytest.raises(type(error)):
        bench.execution.step(bench.last_id, 9, draw)
    said = [*PROMPT, *bench.turn.emitted]
    assert bench.target.contents() == cold_contents(kind, said)


# -- a drafter with a smaller context than its target (B19)

DRAFTER_CONTEXT = 32


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_b19_drafter_with_a_small_context_leaves_the_rest_to_plain_decoding(
    kind: str, *, raises: bool
) -> None:
    """Elsewhere: a crash there, or half the speed of plain decoding from there on."""
    num_tokens = 200
    plain = plain_stream(kind, PROMPT, num_tokens)
    stream = [*PROMPT, *plain]

    def guess(context: DraftContext) -> Sequence[int]:
        bench.clock.advance_ms(3.0)
        if context.pos < DRAFTER_CONTEXT:
            return stream[context.pos + 1 : context.pos + 4]
        if raises:
            raise BackendError(f"a cache of {DRAFTER_CONTEXT} tokens is full")
        return []

    speculator, governor = ScriptedSpeculator(guess), CostGovernor()
    turn = Turn(PROMPT, max_tokens=num_tokens)
    bench = Bench(speculator, kind=kind, governor=governor, turn=turn)
    assert bench.finish() == plain
    bench.assert_cold()
    assert bench.execution.stats.draft_n_accepted > 0
    num_asked = sum(context.pos >= DRAFTER_CONTEXT for context in speculator.contexts)
    if raises:
        assert bench.execution.dropped == "scripted stopped drafting: a cache of 32 tokens is full"
        assert num_asked == 1
    else:
        # A hold and the probes that fit the turn, each ended by steps that bring nothing.
        policy = governor.policy
        num_probes = sum(sum(policy.park_steps[:n]) < num_tokens for n in range(5))
        assert num_asked <= policy.held_samples + num_probes * policy.zero_steps_to_lose


# -- sampling (A4, A5, A7, A10)


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0, top_k=0, top_p=1.0, seed=s) for s in (0, 1)]
)
def test_a5_drafting_the_argmax_does_not_flatten_the_distribution(params: SamplingParams) -> None:
    """An equality test on argmaxes made answers near-greedy; here the draw itself is compared."""
    target = LinearTarget()

    def argmax_of(context: DraftContext) -> list[int]:
        del context
        return [int(np.argmax(target._logits[0]))] * 4

    bench = Bench(ScriptedSpeculator(argmax_of), turn=Turn(PROMPT, params, max_tokens=300))
    target = bench.target  # type: ignore[assignment]
    assert bench.finish() == plain_stream("linear", PROMPT, 300, params)


@pytest.mark.parametrize("spec", ["oracle:4", "script:3,0,2,4", "garbage:3"])
def test_a7_penalties_count_every_accepted_token_and_no_rejected_one(spec: str) -> None:
    params = SamplingParams(
        temperature=0.0, repeat_penalty=1.3, frequency_penalty=0.5, penalty_window=0
    )
    plain = plain_stream("linear", PROMPT, 60, params)
    bench = Bench(forced(spec, plain), turn=Turn(PROMPT, params, max_tokens=60))
    assert bench.finish() == plain


def test_a10_same_seed_twice_gives_the_same_text_whatever_ran_between() -> None:
    params = SamplingParams(temperature=1.0, seed=1)
    streams = []
    for window in (8, 2):
        bench = Bench(NgramSpeculator(), window=window, turn=Turn(PROMPT, params, max_tokens=80))
        streams.append(bench.finish())
        Bench(NgramSpeculator(), turn=Turn(PROMPT, SamplingParams(1.0, seed=9))).finish()
    assert streams[0] == streams[1]


class BrokenPolicy(AdaptiveWindow):
    """A bug in the policies beside the loop."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method
        self.costs = self  # type: ignore[assignment]

    def choose(self, *args: object, **kwargs: object) -> int:
        return self._fail("choose") or 4

    def record(self, num_rows: int, ms: float) -> None:
        self._fail("record")

    is_known = False

    def _fail(self, method: str) -> int:
        if method == self._method:
            raise ZeroDivisionError("float division by zero")
        return 0


@pytest.mark.parametrize("method", ["choose", "record"])
def test_bug_in_a_policy_drops_the_drafter_and_not_the_turn(method: str) -> None:
    plain = plain_stream("linear", PROMPT, 20)
    bench = Bench(forced("oracle:4", plain), turn=Turn(PROMPT, max_tokens=20))
    policy = BrokenPolicy(method)
    bench.execution._window = bench.execution._costs = policy
    assert bench.finish() == plain
    assert bench.execution.dropped is not None
    bench.assert_cold()


class RuledTurn(Turn):
    """A grammar that hangs on what was emitted: odd tokens only, from a marker on even ones."""

    def __init__(self, marker: int | None = None) -> None:
        super().__init__(PROMPT, max_tokens=50)
        self.marker = marker
        self.phases: list[bool] = []

    def draw(self, row: np.ndarray, position: int, argmax: int | None = None) -> int | None:
        is_after = self.marker in self.emitted
        self.phases.append(is_after)
        ruled = np.full_like(row, -1e9)
        first = 0 if is_after else 1
        ruled[first::2] = row[first::2]
        return super().draw(ruled, position)


def ruled_plain(marker: int | None) -> RuledTurn:
    target = LinearTarget()
    turn = RuledTurn(marker)
    token_id = turn.draw(prefill(target, PROMPT), len(PROMPT))
    while not turn.is_over:
        assert token_id is not None
        logits = target.forward_rows([token_id]).logits
        assert logits is not None
        token_id = turn.draw(logits[0], target.cached_len)
    return turn


@pytest.mark.parametrize("spec", ["oracle:6", "garbage:5", "script:3,0,6"])
def test_a12_rule_on_the_draw_holds_whatever_is_drafted(spec: str) -> None:
    """A draft that broke the grammar crashed, or advanced it."""
    plain = ruled_plain(None)
    bench = Bench(forced(spec, plain.emitted), turn=RuledTurn())
    assert bench.finish() == plain.emitted
    assert all(token_id % 2 for token_id in bench.turn.emitted)


@pytest.mark.parametrize("index", range(1, 9))
def test_a13_rule_that_changes_inside_a_window_changes_for_the_drafts_behind_it(index: int) -> None:
    """Drafts behind the marker in the same window were judged by the old rule."""
    marker = ruled_plain(None).emitted[index]
    plain = ruled_plain(marker)
    turn = RuledTurn(marker)
    bench = Bench(forced("oracle:6", plain.emitted), turn=turn)
    assert bench.finish() == plain.emitted
    assert turn.phases[: len(plain.phases)] == plain.phases
    assert any(turn.phases)
