"""torch on the CPU: the oracle's numbers, equal bits in any company, an exact cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from backends.base import (
    BackendError,
    BackendUnavailable,
    OutOfDeviceMemory,
    Segment,
    UnsupportedWeight,
)
from backends.program import KvSlot, Scale, Weight
from backends.reference import ReferenceBackend
from backends.torch_backend import backend as torch_module
from backends.torch_backend.backend import TorchBackend, TorchExecutable
from backends.torch_backend.matrix import Matrix, held_bytes
from backends.torch_backend.ops import OPS, attend_masked, device_of
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

TYPES = ("F32", "BF16", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
ROW_COUNTS = (1, 2, 3, 7, 8, 9, 16, 17)


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    """Models of this size lose with two: on a busy machine each meeting of threads costs 8 ms."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model(type_name: str = "Q4_K") -> TorchExecutable:
    return TorchBackend("cpu").compile(everything(type_name))


@cache
def oracle_logits(type_name: str) -> np.ndarray:
    reference = ReferenceBackend().compile(everything(type_name))
    return logits_of(reference, reference.new_cache(), random_ids(40))


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("chunk", [40, 1, 9])
def test_logits_are_the_oracles_for_every_weight_type(type_name: str, chunk: int) -> None:
    chat = model(type_name).new_cache()
    token_ids = random_ids(40)
    rows = [
        logits_of(model(type_name), chat, token_ids[i : i + chunk]) for i in range(0, 40, chunk)
    ]
    np.testing.assert_allclose(np.concatenate(rows), oracle_logits(type_name), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("num_rows", "num_threads"), [*((rows, 1) for rows in ROW_COUNTS), (9, 2)])
def test_s70_a_row_has_the_same_bits_however_many_run_with_it(
    num_rows: int, num_threads: int
) -> None:
    """Across the window's end: 20 rows before, then `num_rows` rows whole or one by one."""
    assert model().caps.is_row_independent
    torch.set_num_threads(num_threads)
    chat = model().new_cache()
    logits_of(model(), chat, random_ids(20))
    one_by_one, rows = chat.clone(), random_ids(num_rows, seed=4)
    together = logits_of(model(), chat, rows)
    alone = np.concatenate([logits_of(model(), one_by_one, [row]) for row in rows])
    np.testing.assert_array_equal(together, alone)
    for key, array in chat.export_state().items():
        np.testing.assert_array_equal(array, one_by_one.export_state()[key])


def test_s70_a_row_has_the_same_bits_in_the_company_of_other_chats() -> None:
    token_ids = [random_ids(n, seed=n) for n in (3, 11, 1)]
    together = [model().new_cache() for _ in token_ids]
    output = model().forward([Segment(i, c) for i, c in zip(token_ids, together, strict=True)])
    alone = np.concatenate([logits_of(model(), model().new_cache(), ids) for ids in token_ids])
    np.testing.assert_array_equal(output.logits, alone)


def test_s70_chunk_boundaries_change_no_bit() -> None:
    assert model().caps.is_chunk_independent
    token_ids = random_ids(100)
    whole = logits_of(model(), model().new_cache(), token_ids)
    chat = model().new_cache()
    rows = [logits_of(model(), chat, token_ids[i : i + 13]) for i in range(0, 100, 13)]
    np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_s70_a_stored_cache_goes_with_the_torch_and_the_instructions_it_was_made_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another release, or another processor with the same folder, sums in another order."""
    found = {model().caps.arithmetic}
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "9.9")
        found.add(model().caps.arithmetic)
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "VECTORS")
        found.add(model().caps.arithmetic)
    assert len(found) == 3


def test_masked_attention_agrees_with_attention_row_by_row() -> None:
    """The way of a GPU, on the CPU: every row against a rounded-up stretch of keys and a mask."""
    masked = TorchBackend("cpu").compile(everything("Q4_K"))
    masked._device.attend = attend_masked
    token_ids = random_ids(90)
    chat, other = masked.new_cache(), model().new_cache()
    for start in range(0, 90, 9):
        ids = token_ids[start : start + 9]
        np.testing.assert_allclose(
            logits_of(masked, chat, ids), logits_of(model(), other, ids), rtol=0, atol=1e-4
        )


def test_a_gpu_reads_its_weights_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def counted(x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x @ dense.t()

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    x, dense = torch.ones(64, 8), torch.ones(4, 8)
    for name, expected in (("cuda", [64]), ("cpu", [8] * 8)):
        sizes.clear()
        assert device_of(torch.device(name), {}).multiply(x, dense).shape == (64, 4)
        assert sizes == expected


@pytest.mark.parametrize("prompt_len", [3, 30])
def test_a_drafter_sees_what_is_before_it_and_leaves_the_caches_alone(prompt_len: int) -> None:
    """Within the window and past it, two chats of different length in one forward."""
    expected = drafted(ReferenceBackend(), "F32", prompt_len)
    found = drafted(TorchBackend("cpu"), "F32", prompt_len)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


def test_weights_that_do_not_fit_unpacked_stay_packed_and_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_module, "_DENSE_SHARE", 0.0)
    packed = TorchBackend("cpu").compile(everything("Q4_K"))
    assert packed.weight_bytes < model().weight_bytes / 5
    np.testing.assert_array_equal(
        logits_of(packed, packed.new_cache(), random_ids(11)),
        logits_of(model(), model().new_cache(), random_ids(11)),
    )


def test_tables_that_are_only_looked_up_stay_in_the_file() -> None:
    program = everything("Q8_0")
    tables = [op.table for op in program.ops if hasattr(op, "table")]
    placed = {id(weight) for weight in matrix_weights(program)}
    assert [id(table) in placed for table in tables] == [True, False]  # the first is the head too


def test_s18_a_window_can_take_back_a_whole_forward_at_any_length() -> None:
    """Nine rows rejected again and again, before and after the window slid; to the bit."""
    rng = np.random.default_rng(0)
    token_ids = random_ids(1000)
    chat, rows = model().new_cache(), []
    while chat.length < len(token_ids) - 60:
        start, kept = chat.length, int(rng.integers(1, 60))
        logits = logits_of(model(), chat, token_ids[start : start + kept] + random_ids(9, seed=2))
        chat.rewind_to(start + kept)
        rows.append(logits[:kept])
    assert chat.slots[0].base > 0, "the window never slid: the test is too short"
    undisturbed = model().new_cache()
    expected = [
        logits_of(model(), undisturbed, token_ids[i : min(i + 200, chat.length)])
        for i in range(0, chat.length, 200)
    ]
    np.testing.assert_array_equal(np.concatenate(rows), np.concatenate(expected))


def test_rewinding_behind_the_window_is_refused_and_changes_nothing() -> None:
    chat = model().new_cache()
    token_ids = random_ids(1000)
    for start in range(0, 1000, 200):
        logits_of(model(), chat, token_ids[start : start + 200])
    assert not chat.can_rewind_to(100)
    can = [chat.can_rewind_to(n) for n in range(1, 1001)]
    assert can == sorted(can), "below a length that is lost everything but 0 is"
    with pytest.raises(BackendError, match="cannot rewind a cache of 1000 tokens to 100"):
        chat.rewind_to(100)
    assert chat.length == 1000
    chat.rewind_to(0)
    fresh = logits_of(model(), model().new_cache(), token_ids[:30])
    np.testing.assert_array_equal(logits_of(model(), chat, token_ids[:30]), fresh)


def test_an_exported_cache_continues_to_the_bit() -> None:
    chat, restored = model().new_cache(), model().new_cache()
    logits_of(model(), chat, random_ids(200))
    state = chat.export_state()
    assert state["positions.0"].tolist() == list(range(200 - WINDOW, 200))
    restored.import_state(state, 200)
    np.testing.assert_array_equal(
        logits_of(model(), restored, random_ids(9)), logits_of(model(), chat, random_ids(9))
    )


def test_a_misfit_state_is_refused_and_changes_nothing() -> None:
    chat = model().new_cache()
    logits_of(model(), chat, random_ids(6))
    state = {k: a.astype(np.float16) for k, a in chat.export_state().items()}
    with pytest.raises(BackendError, match="does not fit slot 0"):
        chat.import_state(state, 6)
    with pytest.raises(BackendError, match="does not fit slot 0"):
        chat.import_state({}, 6)
    assert chat.length == 6


def test_a_clone_shares_no_buffer() -> None:
    chat = model().new_cache()
    logits_of(model(), chat, random_ids(6))
    clone = chat.clone()
    expected = clone.export_state()
    logits_of(model(), chat, random_ids(20, seed=3))
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


def test_more_rows_than_promised_are_refused() -> None:
    chat = model().new_cache()
    with pytest.raises(BackendError, match="takes 1 to 256 rows, not 257"):
        logits_of(model(), chat, random_ids(257))
    assert chat.length == 0


def test_a_context_too_long_for_the_memory_is_refused_with_both_numbers() -> None:
    chat = model().new_cache()
    logits_of(model(), chat, random_ids(3))
    with pytest.raises(
        OutOfDeviceMemory, match="1099511627776 tokens needs 1125899906842624 bytes"
    ):
        chat.ensure_capacity(1 << 40)
    assert logits_of(model(), chat, [1]).shape == (1, VOCAB)


def test_a_device_too_full_for_a_copy_says_so_as_every_backend_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    chat, other = model().new_cache(), model().new_cache()
    logits_of(model(), chat, random_ids(6))
    state = chat.export_state()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", full)
        with pytest.raises(OutOfDeviceMemory, match="a context of 6 tokens"):
            chat.clone()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "cpu", full)
        with pytest.raises(OutOfDeviceMemory, match="a context of 6 tokens"):
            chat.export_state()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "from_numpy", full)
        with pytest.raises(OutOfDeviceMemory, match="a context of 6 tokens"):
            other.import_state(state, 6)
    assert other.length == 0


def test_windows_too_large_for_the_memory_are_refused_with_both_numbers() -> None:
    program = everything("F32")
    huge = replace(program, slots=(KvSlot(2, 64, 1 << 40), program.slots[1]))
    with pytest.raises(OutOfDeviceMemory, match=r"windows of a new chat do not fit .* \d+ bytes"):
        TorchBackend("cpu").compile(huge).new_cache()


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_running_out_of_memory_in_a_forward_changes_no_cache(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def out_of_memory(*args: object) -> None:
        raise error

    chat = model().new_cache()
    logits_of(model(), chat, random_ids(3))
    before = chat.export_state()
    with monkeypatch.context() as patch:
        patch.setitem(OPS, Scale, out_of_memory)
        with pytest.raises(OutOfDeviceMemory, match="the activations of 2 rows do not fit"):
            logits_of(model(), chat, [1, 2])
    assert chat.length == 3
    for key, array in chat.export_state().items():
        np.testing.assert_array_equal(array, before[key])


def test_other_errors_of_torch_are_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    chat = model().new_cache()
    logits_of(model(), chat, random_ids(3))
    monkeypatch.setattr(torch.Tensor, "clone", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        chat.clone()


def test_a_device_without_kernels_in_this_build_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE...")

    monkeypatch.setattr(torch.Tensor, "add_", broken)
    with pytest.raises(BackendUnavailable, match="cannot compute on cpu: CUDA error: no kernel im"):
        TorchBackend("cpu")


def test_weights_that_do_not_fit_are_refused_before_they_are_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = everything("Q4_K")
    packed = sum(weight.data.nbytes for weight in matrix_weights(program))
    monkeypatch.setattr(torch_module, "free_bytes", lambda device: packed - 1)
    with pytest.raises(OutOfDeviceMemory, match=f"of {packed} bytes do not fit: {packed - 1} byt"):
        TorchBackend("cpu").compile(program)


def test_weights_that_may_not_stay_packed_are_refused_where_they_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_module, "_DENSE_SHARE", 0.0)
    with pytest.raises(OutOfDeviceMemory, match=r"the unpacked weights of \d+ bytes"):
        TorchBackend("cpu", may_stay_packed=False).compile(everything("Q4_K"))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_weights_take_what_was_counted_before(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(torch_module, "_DENSE_SHARE", share)
    program = everything("Q6_K")
    placed = TorchBackend("cpu").compile(program)
    assert TorchBackend("cpu").placed_bytes(program) == placed.weight_bytes
    assert bool(placed.notices) == (share == 0.0)


def test_a_type_that_must_be_unpacked_is_unpacked_beside_packed_ones() -> None:
    weight = Weight("blk.0.odd", "IQ2_XS", (1, 256), np.zeros((1, 74), np.uint8))
    placed = Matrix(weight, torch.device("cpu"), is_dense=False)
    assert placed.is_dense
    assert placed.num_bytes == held_bytes(weight, torch.device("cpu"), is_dense=False)


def test_a_table_nobody_can_read_is_refused_when_the_model_is_placed() -> None:
    program = everything("F32")
    table = Weight("token_embd.weight", "I8", (VOCAB, 256), np.zeros((VOCAB, 256), np.uint8))
    embed = replace(program.ops[0], table=table)  # type: ignore[call-arg]
    with pytest.raises(UnsupportedWeight, match=r"token_embd\.weight has the unknown type I8"):
        TorchBackend("cpu").compile(replace(program, ops=(embed, *program.ops[1:])))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_said() -> None:
    with pytest.raises(BackendUnavailable, match="finds no CUDA device"):
        TorchBackend("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("type_name", TYPES)
def test_a_gpu_gives_the_oracles_logits_within_its_rounding(type_name: str) -> None:
    gpu = TorchBackend("cuda").compile(everything(type_name))
    chat, rows = gpu.new_cache(), []
    for start in range(0, 40, 5):
        rows.append(logits_of(gpu, chat, random_ids(40)[start : start + 5]))
    tolerance = 2e-4 if type_name == "F32" else 5e-2
    np.testing.assert_allclose(
        np.concatenate(rows), oracle_logits(type_name), rtol=0, atol=tolerance
    )


def test_weights_of_one_seed_are_the_same_weights() -> None:
    """The oracle and the backend under test draw their programs independently."""
    first, second = Maker("Q4_K").weight(4, 256), Maker("Q4_K").weight(4, 256)
    np.testing.assert_array_equal(first.data, second.data)
