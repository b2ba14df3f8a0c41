"""The oracle itself: operations against hand-made numbers, the cache against its contract."""

from __future__ import annotations

import numpy as np
import pytest

from backends.base import BackendError, Segment, UnsupportedWeight
from backends.program import Norm, Rope, Weight
from backends.reference import ReferenceBackend, ReferenceExecutable
from backends.reference_ops import dequantize, gelu_tanh, normed, rotated, silu
from tests.backends.tiny_programs import VOCAB, WINDOW, everything, logits_of, random_ids


@pytest.fixture(scope="module")
def model() -> ReferenceExecutable:
    return ReferenceBackend().compile(everything("Q8_0"))


def test_activations_have_their_known_values() -> None:
    np.testing.assert_allclose(silu(np.array([0.0, 1.0])), [0, 0.7310585786], rtol=1e-9)
    np.testing.assert_allclose(gelu_tanh(np.array([0.0, 1.0])), [0, 0.8411919906], rtol=1e-9)


def test_norm_brings_a_row_to_unit_mean_square_and_multiplies() -> None:
    row = normed(Norm(np.array([1.0, 2.0]), 0.0), np.array([3.0, 4.0]))
    np.testing.assert_allclose(row, np.array([3.0, 8.0]) / np.sqrt(12.5))


@pytest.mark.parametrize(
    ("interleaved", "expected"), [(True, [-2, 1, 3, 4, 9]), (False, [-3, 2, 1, 4, 9])]
)
def test_rope_turns_its_pairs_and_leaves_the_rest(interleaved: bool, expected: list[int]) -> None:
    """A quarter turn of the first pair; the second stands still; the fifth dim has no pair."""
    rope = Rope(np.array([np.pi / 2, 0.0]), interleaved)
    turned = rotated(rope, np.array([[1.0, 2.0, 3.0, 4.0, 9.0]]), 1)
    np.testing.assert_allclose(turned[0], expected, atol=1e-12)


def test_unknown_weight_type_is_refused_by_name() -> None:
    weight = Weight("blk.0.odd", "Q9_Z", (1, 32), np.zeros((1, 20), np.uint8))
    with pytest.raises(UnsupportedWeight, match=r"blk\.0\.odd has the unknown type Q9_Z"):
        dequantize(weight)


def test_a_row_sees_its_window_and_nothing_older(model: ReferenceExecutable) -> None:
    """Rewriting a key behind the window of the windowed slot changes nothing, in it everything."""
    cache = model.new_cache()
    logits_of(model, cache, random_ids(30))
    undisturbed = logits_of(model, cache.clone(), [5])
    behind, within = cache.clone(), cache.clone()
    behind.slots[0].keys[30 - WINDOW] += 1.0
    within.slots[0].keys[30 - WINDOW + 1] += 1.0
    np.testing.assert_array_equal(logits_of(model, behind, [5]), undisturbed)
    assert np.abs(logits_of(model, within, [5])[0, 5:9] - undisturbed[0, 5:9]).max() > 1e-4


def test_suppressed_ids_and_softcap_bound_the_logits(model: ReferenceExecutable) -> None:
    logits = logits_of(model, model.new_cache(), random_ids(4))
    assert np.isneginf(logits[:, [3, 90]]).all()
    assert np.abs(np.delete(logits, [3, 90], axis=1)).max() < 20.0


def test_rows_have_the_same_bits_in_any_chunks(model: ReferenceExecutable) -> None:
    token_ids = random_ids(20)
    whole = logits_of(model, model.new_cache(), token_ids)
    cache = model.new_cache()
    by_row = np.concatenate([logits_of(model, cache, [token_id]) for token_id in token_ids])
    np.testing.assert_array_equal(by_row, whole)


def test_only_wanted_rows_get_logits(model: ReferenceExecutable) -> None:
    token_ids = random_ids(5)
    whole = logits_of(model, model.new_cache(), token_ids)
    segment = Segment(token_ids, model.new_cache())
    last = model.forward([segment], want_logits="last", want_hidden=True)
    np.testing.assert_array_equal(last.logits, whole[-1:])
    assert last.hidden is not None
    assert last.hidden.shape == (5, 256)
    none = model.forward([Segment(token_ids, model.new_cache())], want_logits="none")
    assert none.logits is None
    assert none.hidden is None


def test_a_failing_forward_changes_no_cache(model: ReferenceExecutable) -> None:
    caches = [model.new_cache(), model.new_cache()]
    logits_of(model, caches[0], random_ids(3))
    before = caches[0].export_state()
    with pytest.raises(BackendError, match=f"token {VOCAB} is not in the vocabulary"):
        model.forward([Segment([1, 2], caches[0]), Segment([1, VOCAB], caches[1])])
    assert [cache.length for cache in caches] == [3, 0]
    for key, array in caches[0].export_state().items():
        np.testing.assert_array_equal(array, before[key])


def test_an_exported_cache_continues_where_it_was(model: ReferenceExecutable) -> None:
    cache = model.new_cache()
    logits_of(model, cache, random_ids(30))
    state = cache.export_state()
    assert state["k.0"].shape[0] == WINDOW
    assert state["positions.1"].tolist() == list(range(30))
    restored = model.new_cache()
    restored.import_state(state, 30)
    np.testing.assert_array_equal(logits_of(model, restored, [7]), logits_of(model, cache, [7]))


def test_a_misfit_state_is_refused_and_changes_nothing(model: ReferenceExecutable) -> None:
    cache = model.new_cache()
    logits_of(model, cache, random_ids(4))
    with pytest.raises(BackendError, match="does not fit slot 0"):
        cache.import_state(cache.export_state(), 5)
    assert cache.length == 4


def test_rewinding_gives_the_cache_as_it_was(model: ReferenceExecutable) -> None:
    cache = model.new_cache()
    logits_of(model, cache, random_ids(25))
    expected = logits_of(model, cache.clone(), [9])
    logits_of(model, cache, random_ids(6, seed=8))
    cache.rewind_to(25)
    np.testing.assert_array_equal(logits_of(model, cache, [9]), expected)
