"""Names, refusals and new algorithms: only the registry knows which ones exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from engine.errors import EngineError
from engine.speculative.block_speculator import BlockSpeculator
from engine.speculative.draft_head import DraftHead, DraftHeadKind
from engine.speculative.drafters import drafter_factory
from engine.speculative.head_speculator import HeadSpeculator
from engine.speculative.ngram import NgramSpeculator
from engine.speculative.options import SpeculationOptions
from engine.speculative.registry import SpeculatorRegistry, SpeculatorRequest, default_registry
from engine.speculative.runtime import SpeculationRuntime
from engine.speculative.speculator import (
    Decline,
    DraftContext,
    Proposal,
    Speculator,
    SpeculatorTraits,
)
from engine.speculative.target import TargetTraits
from tests.engine.fakes_drafters import FakeHead
from tests.engine.fakes_speculative import (
    TARGETS,
    FakeClock,
    FakeTarget,
    LinearTarget,
    Turn,
    cold_contents,
    hidden_of,
    plain_stream,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PLAIN = TargetTraits()
UNPROFITABLE = TargetTraits(is_speculation_profitable=False)
REFUSING = TargetTraits(refusal="this trunk cannot reproduce its own decode")


def head(kind: DraftHeadKind) -> DraftHead:
    return cast(DraftHead, FakeHead(kind, lambda pos: 0, lambda pos: hidden_of([pos])))


def request(draft_head: DraftHead | None = None) -> SpeculatorRequest:
    return SpeculatorRequest(LinearTarget(), draft_head)


def resolve(
    algorithm: str, traits: TargetTraits = PLAIN, draft_head: DraftHead | None = None
) -> str:
    resolved = default_registry().resolve(
        SpeculationOptions(algorithm=algorithm), traits, draft_head
    )
    return resolved.reason if isinstance(resolved, Decline) else resolved


def test_s05_every_shipped_name_makes_its_algorithm() -> None:
    registry = default_registry()
    per_token, block = head(DraftHeadKind.PER_TOKEN), head(DraftHeadKind.BLOCK)
    assert isinstance(registry.create("ngram", request()), NgramSpeculator)
    assert isinstance(registry.create("draft-head", request(per_token)), HeadSpeculator)
    assert isinstance(registry.create("block", request(block)), BlockSpeculator)


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("draft-head", DraftHeadKind.BLOCK), ("block", DraftHeadKind.PER_TOKEN)],
)
def test_s05_head_of_the_wrong_kind_is_declined_with_the_right_name(
    algorithm: str, kind: DraftHeadKind
) -> None:
    """Before a chat is armed: what is asked for and cannot be had is said with the model."""
    fitting = "draft-head" if algorithm == "block" else "block"
    assert resolve(algorithm, draft_head=head(kind)).endswith(f"; use spec-type {fitting}")


def test_s05_missing_head_is_said_up_front() -> None:
    assert resolve("draft-head") == "draft-head needs a draft head and this model has none"
    assert resolve("block") == "block needs a draft head and this model has none"


def test_unknown_name_lists_the_known_ones() -> None:
    assert resolve("medusa") == (
        "spec-type medusa is unknown; known are auto, ngram, draft-head, block"
    )


def test_s08_model_without_a_drafter_gets_ngram() -> None:
    assert default_registry().available(PLAIN, None) == ("ngram",)


def test_s13_auto_takes_the_drafter_the_checkpoint_carries_else_ngram() -> None:
    assert resolve("auto") == "ngram"
    assert resolve("auto", draft_head=head(DraftHeadKind.PER_TOKEN)) == "draft-head"
    assert resolve("auto", draft_head=head(DraftHeadKind.BLOCK)) == "block"


def test_s13_available_names_put_auto_first() -> None:
    registry = default_registry()
    assert registry.available(PLAIN, head(DraftHeadKind.BLOCK)) == ("block", "ngram")
    assert registry.available(PLAIN, head(DraftHeadKind.PER_TOKEN)) == ("draft-head", "ngram")


@pytest.mark.parametrize("algorithm", ["auto", "ngram", "draft-head", "block"])
def test_s09_refusal_declines_every_algorithm(algorithm: str) -> None:
    assert resolve(algorithm, REFUSING, head(DraftHeadKind.BLOCK)) == REFUSING.refusal
    assert default_registry().available(REFUSING, head(DraftHeadKind.BLOCK)) == ()


def test_s09_unprofitable_trunk_declines_weight_free_algorithms_only() -> None:
    assert "would not pay" in resolve("ngram", UNPROFITABLE)
    assert "would not pay" in resolve("auto", UNPROFITABLE)
    assert resolve("auto", UNPROFITABLE, head(DraftHeadKind.BLOCK)) == "block"


def test_speculation_switched_off_is_a_reason() -> None:
    resolved = default_registry().resolve(SpeculationOptions(is_enabled=False), PLAIN, None)
    assert resolved == Decline("speculation is off")


@pytest.mark.parametrize("algorithm", ["ngram", "draft-head", "block"])
def test_s14_each_algorithm_has_its_own_gate(algorithm: str) -> None:
    kind = DraftHeadKind.BLOCK if algorithm == "block" else DraftHeadKind.PER_TOKEN
    made = default_registry().create(algorithm, request(head(kind)))
    assert not isinstance(made, Decline)
    gates = {"ngram": 0.0, "draft-head": 0.15, "block": 0.35}
    assert made.traits.default_min_draft_prob == gates[algorithm]


@pytest.mark.parametrize("spec", ["oracle", "oracle:x", "script:", "script:1,b", "magic:3", ""])
def test_forced_drafter_that_cannot_be_read_names_the_spec(spec: str) -> None:
    with pytest.raises(EngineError, match=f"drafter {spec} is unknown"):
        drafter_factory(spec, [1], [2])


# -- S07: a new algorithm is one class and one register call


class ToyMedusa:
    """Guesses several tokens from one hidden row, each with its own "head" (here: wrong a lot)."""

    traits = SpeculatorTraits("medusa", 4, 0.6, needs_hidden=True)

    def __init__(self, plain: Sequence[int]) -> None:
        self._plain = plain
        self._row: np.ndarray | None = None
        self.rows_seen: list[tuple[int, tuple[float, ...]]] = []

    def propose(self, context: DraftContext) -> Proposal:
        if self._row is None:
            return Proposal()
        wrong = int(self._row[0]) % 5
        ids = [
            self._plain[context.pos + 1 + i] if i != wrong else 0
            for i in range(min(4, context.max_drafts))
        ]
        return Proposal(ids, [0.9**i for i in range(1, len(ids) + 1)])

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        self._row = None if hidden is None else hidden[-1].copy()
        if hidden is not None:
            rows = enumerate(hidden.tolist(), start=start_pos)
            self.rows_seen.extend((pos, tuple(row)) for pos, row in rows)

    def reset(self) -> None:
        self._row = None


class ToyBlock:
    """Proposes a whole block of what it saw at the same distance before."""

    traits = SpeculatorTraits("toy-block", 6, 0.0, can_arm_after_prefix_reuse=True)

    def __init__(self) -> None:
        self._ids: list[int] = []

    def propose(self, context: DraftContext) -> Proposal:
        known = [*self._ids, context.last_token_id]
        return Proposal(known[-9:-3])

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        del self._ids[start_pos:]
        self._ids.extend(token_ids)

    def reset(self) -> None:
        self._ids.clear()


def toy_registry(plain: Sequence[int]) -> SpeculatorRegistry:
    registry = default_registry()
    registry.register("medusa", lambda _: ToyMedusa([*PROMPT, *plain, *[0] * 8]))
    registry.register("toy-block", lambda _: ToyBlock())
    return registry


def run_toy(algorithm: str, kind: str, plain: Sequence[int], *, governed: bool) -> FakeTarget:
    target = TARGETS[kind]()
    target.clock = FakeClock()
    runtime = SpeculationRuntime(
        toy_registry(plain),
        target.traits,
        None,
        options=SpeculationOptions(algorithm=algorithm, use_governor=governed),
        clock=target.clock,
    )
    execution = runtime.arm(target, max_tokens=40)
    assert not isinstance(execution, Decline)
    row = np.zeros(0)
    for start in range(0, len(PROMPT), 3):
        piece = PROMPT[start : start + 3]
        logits = execution.prefill(piece).logits
        assert logits is not None
        target._is_open = False
        row = logits[-1].copy()
    turn = Turn(PROMPT, max_tokens=40)
    token_id = turn.draw(row, len(PROMPT))
    while not turn.is_over:
        assert token_id is not None
        token_id = execution.step(token_id, turn.num_remaining, turn.draw)[-1]
    assert turn.emitted == plain
    assert execution.dropped is None
    assert execution.stats.verify_steps > 0
    return target


@pytest.mark.parametrize("governed", [False, True])
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("algorithm", ["medusa", "toy-block"])
def test_s07_new_algorithm_is_one_class_and_one_register_call(
    algorithm: str, kind: str, governed: bool
) -> None:
    plain = plain_stream(kind, PROMPT, 40)
    target = run_toy(algorithm, kind, plain, governed=governed)
    assert target.contents() == cold_contents(kind, [*PROMPT, *plain[:-1]])


def test_s07_toy_needing_the_prompts_rows_is_declined_on_a_reused_prefix() -> None:
    runtime = SpeculationRuntime(
        toy_registry([]),
        PLAIN,
        None,
        options=SpeculationOptions(algorithm="medusa"),
        clock=FakeClock(),
    )
    declined = runtime.arm(LinearTarget(), max_tokens=9, committed_ids=[1, 2])
    assert declined == Decline("medusa needs the hidden rows of the whole prompt")


def _conforms() -> tuple[type[Speculator], type[Speculator]]:
    return ToyMedusa, ToyBlock
