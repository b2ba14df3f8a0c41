"""MLX: the oracle's numbers within its rounding, exact packing, the cache's contract.

Runs wherever mlx can be imported; `pip install "mlx[cpu]"` brings it to Linux.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from backends.base import BackendError, OutOfDeviceMemory, Segment, UnsupportedWeight
from backends.program import Embed, Head, Program, Weight
from backends.reference import ReferenceBackend
from backends.reference_ops import dequantize
from backends.weights import matrix_weights
from tests.backends.tiny_programs import (
    VOCAB,
    WINDOW,
    Maker,
    drafted,
    everything,
    logits_of,
    random_ids,
)

mx = pytest.importorskip("mlx.core")
mlx_backend = pytest.importorskip("backends.mlx_backend.backend")
matrix = pytest.importorskip("backends.mlx_backend.matrix")

pytestmark = pytest.mark.mlx

# A float16 cache rounds keys and values; BF16 and Q6_K weights become float16 as well.
TOLERANCES = {"F32": 2e-4, "Q4_1": 0.05, "Q5_0": 0.05, "Q8_0": 0.05, "Q4_K": 0.05, "Q6_K": 0.05}


@cache
def model(type_name: str = "F32"):  # type: ignore[no-untyped-def]  # mlx may be absent
    return mlx_backend.MlxBackend().compile(everything(type_name))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"])
def test_packing_keeps_every_weight_exactly(type_name: str) -> None:
    """A product with unit rows reads the matrix back."""
    weight = Maker(type_name).weight(40, 256)
    packed = matrix.Matrix(weight)
    words, scales, biases = packed._arrays
    read = mx.dequantize(words, scales, biases, group_size=32, bits=packed._bits)
    np.testing.assert_array_equal(np.array(read), dequantize(weight))


@pytest.mark.parametrize("type_name", ["Q6_K", "F16", "BF16", "Q4_K"])
def test_a_heads_products_are_not_rounded_to_half_precision(type_name: str) -> None:
    weight, rng = Maker(type_name).weight(40, 256), np.random.default_rng(3)
    x = rng.standard_normal((5, 256), np.float32)
    head = matrix.Matrix(weight, is_head=True)
    expected = x @ dequantize(weight).T
    found = np.array(head.multiply(mx.array(x)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q4_K", "Q5_0", "Q6_K", "Q8_0"])
def test_weights_take_what_was_counted_before(type_name: str) -> None:
    program = everything(type_name)
    assert mlx_backend.MlxBackend().placed_bytes(program) == model(type_name).weight_bytes


def test_weights_that_do_not_fit_are_refused_before_they_are_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, backend = everything("Q6_K"), mlx_backend.MlxBackend()
    needed = backend.placed_bytes(program)
    assert needed > sum(weight.data.nbytes for weight in matrix_weights(program))
    monkeypatch.setattr(mlx_backend, "free_bytes", lambda: needed - 1)
    with pytest.raises(OutOfDeviceMemory, match=f"of {needed} bytes do not fit: {needed - 1} byt"):
        backend.compile(program)


def test_what_grows_much_in_memory_is_said() -> None:
    (notice,) = model("Q6_K").notices
    assert notice.endswith("there are no kernels for Q6_K, the head is kept exact")
    assert model("Q4_K").notices == []


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q6_K"])
def test_a_head_that_is_kept_exact_is_no_missing_kernel(type_name: str) -> None:
    table = Maker(type_name).weight(VOCAB, 256)
    ops = (Embed(table, 0), Head(0, Maker("F32").norm(256), table))
    (notice,) = mlx_backend.MlxBackend().compile(Program(ops, (256,), (), VOCAB, 256)).notices
    assert notice.endswith("in the file: the head is kept exact")


def test_a_table_nobody_can_read_is_refused_when_the_model_is_placed() -> None:
    table = Weight("token_embd.weight", "I8", (VOCAB, 256), np.zeros((VOCAB, 256), np.uint8))
    program = everything("F32")
    embed = replace(program.ops[0], table=table)  # type: ignore[call-arg]
    with pytest.raises(UnsupportedWeight, match=r"token_embd\.weight has the unknown type I8"):
        mlx_backend.MlxBackend().compile(replace(program, ops=(embed, *program.ops[1:])))


@pytest.mark.parametrize(("type_name", "tolerance"), TOLERANCES.items())
@pytest.mark.parametrize("chunk", [40, 1, 9])
def test_logits_are_the_oracles_for_every_weight_type(
    type_name: str, tolerance: float, chunk: int
) -> None:
    reference, chat = (
        ReferenceBackend().compile(everything(type_name)),
        model(type_name).new_cache(),
    )
    token_ids = random_ids(40)
    expected = logits_of(reference, reference.new_cache(), token_ids)
    rows = [
        logits_of(model(type_name), chat, token_ids[i : i + chunk]) for i in range(0, 40, chunk)
    ]
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("prompt_len", [3, 30])
def test_a_drafter_sees_what_is_before_it_and_leaves_the_caches_alone(prompt_len: int) -> None:
    """Within the window and past it, two chats of different length in one forward."""
    expected = drafted(ReferenceBackend(), "F32", prompt_len)
    found = drafted(mlx_backend.MlxBackend(), "F32", prompt_len)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


def test_no_equal_bits_are_promised() -> None:
    assert not model().caps.is_row_independent
    assert not model().caps.is_chunk_independent


@pytest.mark.slow
def test_s18_a_window_can_take_back_a_whole_forward_at_any_length() -> None:
    rng = np.random.default_rng(0)
    token_ids = random_ids(1500)
    chat, rows = model().new_cache(), []
    while chat.length < len(token_ids) - 180:
        start, kept = chat.length, int(rng.integers(60, 180))
        logits = logits_of(model(), chat, token_ids[start : start + kept] + random_ids(9, seed=2))
        chat.rewind_to(start + kept)
        rows.append(logits[:kept])
    assert chat.slots[0].base > 0, "the window never slid: the test is too short"
    undisturbed = model().new_cache()
    expected = [
        logits_of(model(), undisturbed, token_ids[i : min(i + 500, chat.length)])
        for i in range(0, chat.length, 500)
    ]
    np.testing.assert_allclose(np.concatenate(rows), np.concatenate(expected), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_rewinding_behind_the_window_is_refused_and_changes_nothing() -> None:
    chat = model().new_cache()
    token_ids = random_ids(1600)
    for start in range(0, 1600, 400):
        logits_of(model(), chat, token_ids[start : start + 400])
    with pytest.raises(BackendError, match="cannot rewind a cache of 1600 tokens to 100"):
        chat.rewind_to(100)
    assert chat.length == 1600


def test_an_exported_cache_continues_where_it_was() -> None:
    chat, restored = model().new_cache(), model().new_cache()
    logits_of(model(), chat, random_ids(200))
    state = chat.export_state()
    assert state["positions.0"].tolist() == list(range(200 - WINDOW, 200))
    restored.import_state(state, 200)
    np.testing.assert_allclose(
        logits_of(model(), restored, random_ids(9)),
        logits_of(model(), chat, random_ids(9)),
        rtol=0,
        atol=1e-5,
    )


def test_a_misfit_state_is_refused_and_changes_nothing() -> None:
    chat = model().new_cache()
    logits_of(model(), chat, random_ids(6))
    with pytest.raises(BackendError, match="does not fit slot 0"):
        chat.import_state(chat.export_state(), 7)
    assert chat.length == 6


def test_a_clone_is_not_changed_by_its_original() -> None:
    chat = model().new_cache()
    logits_of(model(), chat, random_ids(6))
    clone = chat.clone()
    expected = clone.export_state()
    chat.rewind_to(0)
    logits_of(model(), chat, random_ids(6, seed=3))
    for key, array in clone.export_state().items():
        np.testing.assert_array_equal(array, expected[key])


def test_a_failing_forward_changes_no_cache() -> None:
    caches = [model().new_cache(), model().new_cache()]
    logits_of(model(), caches[0], random_ids(3))
    with pytest.raises(BackendError, match=f"token {VOCAB} is not in the vocabulary"):
        model().forward([Segment([1], caches[0]), Segment([VOCAB], caches[1])])
    assert [chat.length for chat in caches] == [3, 0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[metal::malloc] Attempting to allocate 9 bytes which is greater than", OutOfDeviceMemory),
        ("[METAL] Command buffer execution failed: Insufficient Memory", OutOfDeviceMemory),
        ("[METAL] Command buffer execution failed: page fault", BackendError),
    ],
)
def test_a_large_forward_that_fails_leaves_no_row_waiting_to_be_computed(
    monkeypatch: pytest.MonkeyPatch, text: str, error: type[BackendError]
) -> None:
    """The second slot fails: of the rows of a forward nobody can afford none stays behind."""
    chat, of_slot_1 = model().new_cache(), []
    logits_of(model(), chat, random_ids(3))
    before = chat.export_state()

    def failing(arrays: list[tuple[object, object]]) -> None:
        of_slot_1.append(len(arrays) == 1 and arrays[0][0] is chat.slots[1].keys)
        if len(of_slot_1) == 3:  # room for the rows, the first slot, the second
            raise RuntimeError(text)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", failing)
        with pytest.raises(error, match="40 rows") as caught:
            logits_of(model(), chat, random_ids(40))
    assert type(caught.value) is error
    assert of_slot_1 == [False, False, True]
    assert chat.length == 3
    assert not np.array(chat.slots[1].keys)[:, 3:].any()
    for key, array in chat.export_state().items():
        np.testing.assert_array_equal(array, before[key])


def test_a_context_too_long_for_the_memory_is_refused() -> None:
    chat = model().new_cache()
    logits_of(model(), chat, random_ids(3))
    with pytest.raises(OutOfDeviceMemory, match="a context of 1099511627776 tokens does not fit"):
        chat.ensure_capacity(1 << 40)
    assert logits_of(model(), chat, [1]).shape == (1, VOCAB)
