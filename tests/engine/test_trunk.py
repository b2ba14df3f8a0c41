"""The target on a chat's holder: ids and cache move together, alone or beside other chats."""

from __future__ import annotations

import numpy as np
import pytest

from backends.base import BackendError
from engine.cache.holder import Holder, forward_holders
from engine.speculative.drafters import drafter_factory
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.registry import SpeculatorRequest
from engine.speculative.speculator import Decline, Speculator
from engine.speculative.target import SpeculativeTarget, TargetTraits
from engine.speculative.trunk import Trunk
from engine.speculative.window import FixedWindow
from tests.engine.fakes_engine import (
    VOCAB,
    FakeExecutable,
    LinearCache,
    RecurrentCache,
    RingCache,
)
from tests.engine.fakes_speculative import FakeClock, Turn

PROMPT = [5, 6, 7, 8, 9]
CACHES = [LinearCache, RingCache, RecurrentCache]


def trunk_on(executable: FakeExecutable, *, persists: bool = True) -> Trunk:
    return Trunk(
        Holder(executable),
        TargetTraits(verify_persists_accepted_kv=persists),
        vocab_size=VOCAB,
        max_context_len=512,
    )


def plain(make_cache: type[LinearCache], prompt: list[int], num: int) -> list[int]:
    trunk = trunk_on(FakeExecutable(make_cache))
    turn = Turn(prompt, max_tokens=num)
    logits = trunk.forward_rows(prompt).logits
    assert logits is not None
    token_id = turn.draw(logits[-1], len(prompt))
    while not turn.is_over:
        assert token_id is not None
        logits = trunk.forward_rows([token_id]).logits
        assert logits is not None
        token_id = turn.draw(logits[0], trunk.cached_len)
    return turn.emitted


def forced(spec: str, prompt: list[int], emitted: list[int], trunk: Trunk) -> Speculator:
    request = SpeculatorRequest(trunk, None)
    made = drafter_factory(spec, prompt, emitted)(request)
    assert not isinstance(made, Decline)
    return made


def test_s01_every_row_is_scored_as_if_decoded_alone() -> None:
    many, one = trunk_on(FakeExecutable()), trunk_on(FakeExecutable())
    logits = many.forward_rows(PROMPT).logits
    assert logits is not None
    for row, token_id in zip(logits, PROMPT, strict=True):
        alone = one.forward_rows([token_id]).logits
        assert alone is not None
        np.testing.assert_array_equal(row, alone[0])


def test_s01_hidden_rows_and_logits_come_only_when_asked_for() -> None:
    trunk = trunk_on(FakeExecutable())
    assert trunk.forward_rows(PROMPT).hidden is None
    output = trunk.forward_rows(PROMPT, want_hidden=True, want_logits="none")
    assert output.logits is None
    assert output.hidden is not None
    assert len(output.hidden) == len(PROMPT)


def test_s01_rewind_drops_ids_and_cache_together() -> None:
    trunk = trunk_on(FakeExecutable())
    trunk.forward_rows(PROMPT)
    trunk.rewind_to(3)
    assert (trunk.cached_len, trunk.holder.cache.length) == (3, 3)
    assert trunk.holder.token_ids == PROMPT[:3]


def test_s01_snapshot_is_taken_only_where_rows_do_not_stay_usable() -> None:
    assert trunk_on(FakeExecutable()).snapshot_state() is None
    trunk = trunk_on(FakeExecutable(RecurrentCache), persists=False)
    trunk.forward_rows(PROMPT)
    snapshot = trunk.snapshot_state()
    trunk.forward_rows([1, 2, 3])
    trunk.restore_state(snapshot)
    assert trunk.holder.token_ids == PROMPT
    trunk.holder.check_integrity()


def test_failed_forward_changes_nothing() -> None:
    executable = FakeExecutable()
    trunk = trunk_on(executable)
    trunk.forward_rows(PROMPT)
    executable.fail_at = 2
    with pytest.raises(BackendError):
        trunk.forward_rows([1, 2])
    assert trunk.holder.token_ids == PROMPT
    trunk.holder.check_integrity()


@pytest.mark.parametrize("persists", [True, False])
@pytest.mark.parametrize("make_cache", CACHES)
@pytest.mark.parametrize("spec", ["oracle:6", "script:3,0,2,5", "garbage:2"])
def test_s02_one_loop_serves_a_chat_alone(
    spec: str, make_cache: type[LinearCache], persists: bool
) -> None:
    expected = plain(make_cache, PROMPT, 60)
    trunk = trunk_on(FakeExecutable(make_cache), persists=persists)
    execution = SpeculativeExecution(
        trunk, forced(spec, PROMPT, expected, trunk), FixedWindow(6), clock=FakeClock()
    )
    turn = Turn(PROMPT, max_tokens=60)
    logits = trunk.forward_rows(PROMPT).logits
    assert logits is not None
    token_id = turn.draw(logits[-1], len(PROMPT))
    execution.seed_committed(PROMPT)
    while not turn.is_over:
        assert token_id is not None
        token_id = execution.step(token_id, turn.num_remaining, turn.draw)[-1]
        assert trunk.holder.token_ids == [*PROMPT, *turn.emitted[:-1]]
        trunk.holder.check_integrity()
    assert turn.emitted == expected


@pytest.mark.parametrize("make_cache", CACHES)
def test_s02_the_same_holder_takes_part_in_batched_steps(make_cache: type[LinearCache]) -> None:
    """Alone it verifies windows, beside a neighbour it takes one row of a common forward."""
    executable = FakeExecutable(make_cache)
    neighbour = Holder(executable)
    neighbour.forward([1, 2, 3])
    expected = plain(make_cache, PROMPT, 40)
    trunk = trunk_on(executable)
    execution = SpeculativeExecution(
        trunk, forced("script:2,4", PROMPT, expected, trunk), FixedWindow(4), clock=FakeClock()
    )
    turn = Turn(PROMPT, max_tokens=40)
    logits = trunk.forward_rows(PROMPT).logits
    assert logits is not None
    token_id = turn.draw(logits[-1], len(PROMPT))
    execution.seed_committed(PROMPT)
    while not turn.is_over:
        assert token_id is not None
        token_id = execution.step(token_id, turn.num_remaining, turn.draw)[-1]
        if turn.is_over:
            break
        logits = forward_holders([neighbour, trunk.holder], [[4], [token_id]]).logits
        assert logits is not None
        drawn, token_id = token_id, turn.draw(logits[1], trunk.cached_len)
        execution.catch_up([drawn])
    assert turn.emitted == expected
    assert execution.dropped is None


def _conforms() -> type[SpeculativeTarget]:
    return Trunk
