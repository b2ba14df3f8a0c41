"""Sliding windows on real executables: whatever was taken back, a cold cache is equal to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from backends.base import BackendError, Executable
from engine.cache.holder import Holder
from engine.contracts import LoadedModel
from engine.diagnostics import cold_cache_agrees, cold_check
from engine.speculative.drafters import drafter_factory
from engine.speculative.options import SpeculationOptions
from engine.speculative.registry import default_registry
from engine.speculative.target import TargetTraits
from engine.speculative.trunk import Trunk
from models.loader import Loader
from tests.cpu_backend import CPU_BACKEND, needs_native
from tests.engine.fakes_engine import EngineRig
from tests.models.trunk_fixtures import TRUNKS_DIR, available, executable, program

TRUNKS = ("gemma3", "gemma4-dense", "gemma4-ple", "gemma4-moe")
WINDOW, VOCAB = 16, 512
"""Of every windowed layer of the fixtures; entries of their vocabulary."""
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW + 3)
of_every_trunk = pytest.mark.parametrize("trunk", TRUNKS)
at_every_boundary = pytest.mark.parametrize("length", LENGTHS)


def ids(num: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, num).tolist()


def chat_on(model: Executable, token_ids: Sequence[int]) -> Trunk:
    """A chat whose prompt is prefilled."""
    target = Trunk(Holder(model), TargetTraits(), vocab_size=VOCAB, max_context_len=2048)
    for start in range(0, len(token_ids), 100):
        forward(target, token_ids[start : start + 100])
    return target


def forward(target: Trunk, token_ids: Sequence[int]) -> None:
    target.forward_rows(token_ids, want_logits="none")


def verify(target: Trunk, num_drafts: int, num_accepted: int, seed: int) -> None:
    """A verify as the loop does it: rows of the newest token and drafts, the rejected taken back."""
    base = target.cached_len
    forward(target, ids(1 + num_drafts, seed))
    target.on_verify_resolved(1 + num_drafts, num_accepted)
    target.rewind_to(base + 1 + num_accepted)


def assert_cold(target: Trunk, prompt_len: int) -> None:
    assert cold_cache_agrees(target.holder, prompt_len, next_id=7)


@pytest.mark.parametrize("num_drafts", [1, 7, WINDOW, 3 * WINDOW])
@at_every_boundary
@of_every_trunk
def test_s18_verifies_of_any_length_leave_what_plain_decoding_leaves(
    trunk: str, length: int, num_drafts: int
) -> None:
    """Nothing, a part, all but one and everything accepted, a plain step between."""
    target = chat_on(executable(trunk, CPU_BACKEND), ids(length))
    for turn, num_accepted in enumerate((0, num_drafts // 2, num_drafts - 1, num_drafts)):
        verify(target, num_drafts, num_accepted, seed=turn)
        forward(target, ids(1, seed=50 + turn))
    assert_cold(target, length)


@at_every_boundary
@of_every_trunk
def test_s18_a_park_between_verifies_leaves_what_plain_decoding_leaves(
    trunk: str, length: int
) -> None:
    target = chat_on(executable(trunk, CPU_BACKEND), ids(length))
    verify(target, 8, 3, seed=1)
    for token_id in ids(2 * WINDOW, seed=2):
        forward(target, [token_id])
    verify(target, 8, 0, seed=3)
    assert_cold(target, length)


@at_every_boundary
@of_every_trunk
def test_s18_regenerating_and_cutting_give_the_prefix_back_to_the_bit(
    trunk: str, length: int
) -> None:
    """An answer of three windows is taken back, then half of the prompt."""
    target = chat_on(executable(trunk, CPU_BACKEND), ids(length))
    forward(target, ids(3 * WINDOW, seed=1))
    for kept in (length, length // 2):
        assert target.cache.can_rewind_to(kept)
        target.rewind_to(kept)
        forward(target, ids(4, seed=kept))
        assert_cold(target, kept)
        target.rewind_to(kept)


@of_every_trunk
def test_s18_a_prefix_the_ring_has_lost_is_refused_never_guessed(trunk: str) -> None:
    target = chat_on(executable(trunk, CPU_BACKEND), ids(900))
    before = {key: np.array(part) for key, part in target.cache.export_state().items()}
    assert not target.cache.can_rewind_to(40)
    with pytest.raises(BackendError):
        target.cache.rewind_to(40)
    after = target.cache.export_state()
    assert target.cache.length == 900
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert target.cache.can_rewind_to(0)


@at_every_boundary
@of_every_trunk
def test_s18_a_clone_and_its_origin_go_their_own_ways(trunk: str, length: int) -> None:
    model = executable(trunk, CPU_BACKEND)
    origin = chat_on(model, ids(length))
    holder = Holder(model, origin.cache.clone(), origin.holder.token_ids)
    clone = Trunk(holder, TargetTraits(), vocab_size=VOCAB, max_context_len=2048)
    verify(origin, 9, 2, seed=1)
    verify(clone, 9, 9, seed=2)
    for target in (origin, clone):
        forward(target, ids(WINDOW, seed=3))
        assert_cold(target, length)


@cache
def loaded(trunk: str) -> LoadedModel:
    """A fixture as the engine gets it; never closed."""
    return Loader(lambda: available(CPU_BACKEND))(
        TRUNKS_DIR / trunk / "model.gguf",
        name=trunk,
        speculation=SpeculationOptions(),
        progress=lambda stage, share: None,
    )


@pytest.mark.parametrize("drafter", ["oracle:24", "script:0,24,1,9,23"])
@at_every_boundary
@of_every_trunk
def test_s18_turns_that_start_at_any_boundary_and_are_asked_again_are_plain_ones(
    trunk: str, length: int, drafter: str
) -> None:
    """Drafts beyond the window of 16, accepted whole and in part, then the answer anew."""
    model, prompt = loaded(trunk), tuple(ids(length, seed=8))
    plain = EngineRig(model=model).ask(prompt, max_tokens=60)
    registry = default_registry()
    registry.register("forced", drafter_factory(drafter, list(prompt), list(plain.token_ids)))
    forced = SpeculationOptions(algorithm="forced", window=24, use_governor=False)
    rig = EngineRig(model=model, speculation=forced, registry=registry)
    for _ in range(2):
        end = rig.ask(prompt, max_tokens=60)
        assert end.token_ids == plain.token_ids
        assert end.stats.draft_n_accepted > 0
        holder = rig.engine.holder(end.chat_id)
        assert holder is not None
        assert cold_check(model, holder, list(prompt), list(end.token_ids))


@needs_native  # torch keeps all 400 positions
@of_every_trunk
def test_s18_an_edit_behind_the_ring_is_answered_by_forwarding_again(trunk: str) -> None:
    model, long = loaded(trunk), ids(400, seed=4)
    rig = EngineRig(model=model)
    rig.ask(tuple(long), max_tokens=5)
    edited = (*long[:100], *ids(5, seed=9))
    end = rig.ask(edited, max_tokens=20)
    assert end.token_ids == EngineRig(model=model).ask(edited, max_tokens=20).token_ids
    assert end.stats.reused_tokens == 0
    holder = rig.engine.holder(end.chat_id)
    assert holder is not None
    assert cold_check(model, holder, list(edited), list(end.token_ids))


@of_every_trunk
def test_memory_of_a_windowed_layer_is_bounded_by_its_window_and_a_forward(trunk: str) -> None:
    """Only the layers that see everything grow with the text; shared layers have no slot at all."""
    model, slots = executable(trunk, CPU_BACKEND), program(trunk).slots
    target = chat_on(model, ids(1024))
    near = [i for i, slot in enumerate(slots) if slot.window is not None]
    assert near
    state = target.cache.export_state()
    assert all(len(state[f"positions.{i}"]) <= WINDOW for i in near)
    at_1024 = target.cache.num_bytes
    forward(target, ids(128, seed=1))
    for start in range(8):
        forward(target, ids(100, seed=start))
    assert target.cache.num_bytes - at_1024 == 1024 * model.cache_bytes_per_token


@of_every_trunk
def test_shared_layers_are_never_stored_twice(trunk: str) -> None:
    """A slot per layer that owns its keys, and no more."""
    owning = sum(getattr(op, "writes_kv", False) for op in program(trunk).ops)
    assert len(program(trunk).slots) == owning
