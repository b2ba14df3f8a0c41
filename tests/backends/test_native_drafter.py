"""A drafter program on the native backend looks at its target's caches, and only looks."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from backends.base import BackendError, Segment, UnsupportedWeight
from backends.native.backend import NativeBackend
from backends.native.executable import NativeExecutable
from backends.reference import ReferenceBackend
from tests.backends.tiny_programs import (
    VOCAB,
    WIDTH,
    WINDOW,
    drafted,
    drafter,
    everything,
    random_ids,
)
from tests.cpu_backend import needs_native

pytestmark = needs_native

PROMPT_LENS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 140, 300)


@cache
def pair(
    type_name: str, kernels: str | None = None, threads: int = 2
) -> tuple[NativeExecutable, NativeExecutable]:
    """A target and its drafter."""
    backend = NativeBackend(kernels=kernels, threads=threads)
    target = backend.compile(everything(type_name))
    return target, backend.compile(drafter(type_name), reads=target)


def rows_of(num: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((num, WIDTH), np.float32)


def draft(type_name: str, prompt_len: int, num_rows: int = 1, **settings: Any) -> np.ndarray:
    """Logits and hidden rows of drafts behind a prompt, side by side."""
    target, head = pair(type_name, **settings)
    held = target.new_cache()
    for start in range(0, prompt_len, 100):
        target.forward([Segment(random_ids(300)[start : min(start + 100, prompt_len)], held)])
    output = head.forward(
        [Segment(random_ids(num_rows, seed=9), held)], want_hidden=True, hidden=rows_of(num_rows)
    )
    assert held.length == prompt_len
    return np.concatenate([output.logits, output.hidden], axis=1)


@pytest.mark.parametrize("prompt_len", [5, 30])
def test_drafts_are_the_oracles(prompt_len: int) -> None:
    """Two chats of different length in one forward."""
    expected = drafted(ReferenceBackend(), "F32", prompt_len)
    found = drafted(NativeBackend(threads=2), "F32", prompt_len)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("prompt_len", PROMPT_LENS)
@pytest.mark.parametrize("type_name", ["F32", "Q4_K", "Q8_0"])
def test_a_draft_has_the_same_bits_however_many_are_made_at_once(
    type_name: str, prompt_len: int
) -> None:
    """All rows of a drafter stand at one position, so rows of one chat do not see each other."""
    together = draft(type_name, prompt_len, num_rows=5)
    assert np.isfinite(together).all()
    np.testing.assert_array_equal(together[:1], draft(type_name, prompt_len))


@pytest.mark.parametrize("prompt_len", [WINDOW + 1, 300])
def test_instruction_sets_and_thread_counts_change_no_bit(prompt_len: int) -> None:
    best = draft("Q4_K", prompt_len)
    for settings in ({"kernels": "portable"}, {"threads": 1}, {"threads": 4}):
        np.testing.assert_array_equal(draft("Q4_K", prompt_len, **settings), best)


def test_rejected_rows_are_not_seen() -> None:
    target, head = pair("Q8_0")
    clean = draft("Q8_0", 40)
    held = target.new_cache()
    target.forward([Segment(random_ids(300)[:40], held)])
    target.forward([Segment(random_ids(9, seed=4), held)])
    held.rewind_to(40)
    output = head.forward(
        [Segment(random_ids(1, seed=9), held)], want_hidden=True, hidden=rows_of(1)
    )
    again = np.concatenate([output.logits, output.hidden], axis=1)
    np.testing.assert_array_equal(again, clean)


def test_a_draft_without_its_rows_or_without_anything_to_look_at_is_refused() -> None:
    target, head = pair("F32")
    held = target.new_cache()
    with pytest.raises(BackendError, match="empty cache"):
        head.forward([Segment([1], held)], hidden=rows_of(1))
    target.forward([Segment([1, 2, 3], held)])
    for hidden in (None, rows_of(2), rows_of(1)[:, 1:]):
        with pytest.raises(BackendError, match="needs hidden rows"):
            head.forward([Segment([1], held)], hidden=hidden)
    with pytest.raises(BackendError, match=f"vocabulary of {VOCAB}"):
        head.forward([Segment([VOCAB], held)], hidden=rows_of(1))
    assert held.length == 3


def test_a_drafter_over_other_slots_is_refused() -> None:
    backend, program = NativeBackend(threads=1), drafter("F32")
    target = backend.compile(everything("F32"))
    with pytest.raises(UnsupportedWeight, match="other slots"):
        backend.compile(dataclasses.replace(program, slots=program.slots[:1]), reads=target)


def test_a_drafter_packs_no_table_and_shares_its_targets_caches() -> None:
    target, head = pair("Q8_0")
    assert 0 < head.weight_bytes < target.weight_bytes
    with pytest.raises(BackendError, match="cache of another model"):
        head.forward([Segment([1], pair("F32")[0].new_cache())], hidden=rows_of(1))
