"""Every trunk on every backend gives llama.cpp's logits and greedy answers."""

from __future__ import annotations

import numpy as np
import pytest

import backends.reference_ops as reference_ops
from backends.base import Executable, Segment
from backends.reference import ReferenceBackend
from tests.models.trunk_fixtures import (
    BACKENDS,
    TRUNKS,
    executable,
    expected,
    forward_in_chunks,
    program,
)

GEMMAS = tuple(trunk for trunk in TRUNKS if trunk.startswith("gemma"))
CLEAR_GAP = 0.02

on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
of_every_trunk = pytest.mark.parametrize("trunk", TRUNKS)


def assert_logits_match(trunk: str, logits: np.ndarray, stored: np.ndarray) -> None:
    """llama.cpp looks gelu up in a float16 table, which moves Gemma's logits (see the last test).

    So Gemma is held to 5e-3 of the largest logit and 2e-3 of the deviation in the mean, and to
    the same best token wherever that is clear; the others to 2e-4 of the deviation everywhere.
    """
    error, deviation = np.abs(logits - stored), stored.std()
    if trunk not in GEMMAS:
        assert error.max() < 2e-4 * deviation
        return
    assert error.max() < 5e-3 * np.abs(stored).max()
    assert np.sqrt(np.square(error).mean()) < 2e-3 * deviation
    best_two = np.sort(stored, axis=1)[:, -2:]
    is_clear = best_two[:, 1] - best_two[:, 0] > CLEAR_GAP
    assert (logits.argmax(1) == stored.argmax(1))[is_clear].all()


@of_every_trunk
@on_every_backend
@pytest.mark.parametrize("chunk", [48, 1, 7, 9, 16])
def test_s58_logits_match_llama_cpp_whatever_the_chunks(
    trunk: str, backend: str, chunk: int
) -> None:
    model, stored = executable(trunk, backend), expected(trunk)
    logits = forward_in_chunks(model, model.new_cache(), stored.token_ids, chunk)
    assert_logits_match(trunk, logits, stored.logits)


def greedy_answer(model: Executable, token_ids: list[int], answer: list[int]) -> list[int]:
    """The tokens chosen while `answer` is fed back, one at a time."""
    cache = model.new_cache()
    logits = forward_in_chunks(model, cache, token_ids, 16)[-1:]
    chosen = [int(logits[0].argmax())]
    for token_id in answer[:-1]:
        chosen.append(int(forward_in_chunks(model, cache, [token_id], 1)[0].argmax()))
    return chosen


@of_every_trunk
@on_every_backend
def test_s58_greedy_answer_is_llama_cpps_wherever_the_best_token_is_clear(
    trunk: str, backend: str
) -> None:
    stored = expected(trunk)
    chosen = greedy_answer(executable(trunk, backend), stored.token_ids, stored.greedy)
    is_clear = stored.greedy_gap > CLEAR_GAP
    assert is_clear.sum() > 24
    assert (np.array(chosen) == np.array(stored.greedy))[is_clear].all()


@of_every_trunk
@on_every_backend
def test_s18_rejected_rows_leave_no_trace_before_or_after_the_window_wraps(
    trunk: str, backend: str
) -> None:
    """96 tokens in verifies of 5 rows, of which 0 to 4 are rejected and taken back."""
    model, stored = executable(trunk, backend), expected(trunk)
    rng = np.random.default_rng(3)
    token_ids = stored.token_ids + stored.greedy
    cache, logits, last_kept = model.new_cache(), [], 0
    while cache.length + 5 <= len(token_ids):
        start, num_kept = cache.length, int(rng.integers(1, 6))
        rejected = rng.integers(0, stored.logits.shape[1], 5 - num_kept).tolist()
        rows = token_ids[start : start + num_kept] + rejected
        logits.append(forward_in_chunks(model, cache, rows, 5)[:num_kept])
        assert cache.can_rewind_to(start + num_kept)
        cache.rewind_to(start + num_kept)
        last_kept = start + num_kept
    undisturbed = forward_in_chunks(model, model.new_cache(), token_ids[:last_kept], 16)
    np.testing.assert_allclose(
        np.concatenate(logits), undisturbed, rtol=0, atol=1e-4 * stored.logits.std()
    )
    assert_logits_match(trunk, np.concatenate(logits)[:48], stored.logits)


@of_every_trunk
@on_every_backend
def test_several_chats_in_one_forward_get_what_each_gets_alone(trunk: str, backend: str) -> None:
    model, stored = executable(trunk, backend), expected(trunk)
    pieces = [stored.token_ids[:20], stored.token_ids[20:23], stored.token_ids[23:40]]
    together = [model.new_cache() for _ in pieces]
    output = model.forward([Segment(ids, c) for ids, c in zip(pieces, together, strict=True)])
    assert output.logits is not None
    logits = output.logits.copy()  # the executable's own array, valid until its next forward
    alone = [forward_in_chunks(model, model.new_cache(), ids, 48) for ids in pieces]
    np.testing.assert_allclose(
        logits, np.concatenate(alone), rtol=0, atol=1e-4 * stored.logits.std()
    )
    assert [cache.length for cache in together] == [20, 3, 17]


@pytest.mark.parametrize("trunk", GEMMAS)
def test_gemma_differs_from_llama_cpp_only_by_its_float16_gelu(
    trunk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ggml's table (input and output rounded to float16) a quarter of the error is left."""
    exact = reference_ops.gelu_tanh

    def by_table(x: np.ndarray) -> np.ndarray:
        y = exact(x.astype(np.float16).astype(np.float64)).astype(np.float16)
        return np.where(x <= -10, 0.0, np.where(x >= 10, x, y.astype(np.float64)))

    model, stored = ReferenceBackend().compile(program(trunk)), expected(trunk)
    errors = []
    for gelu in (exact, by_table):
        monkeypatch.setitem(reference_ops.ACTIVATIONS, "gelu_tanh", gelu)
        logits = forward_in_chunks(model, model.new_cache(), stored.token_ids, 48)
        errors.append(float(np.sqrt(np.square(logits - stored.logits).mean())))
    assert errors[1] < 3e-4 * stored.logits.std()
    assert errors[1] < errors[0] / 3
