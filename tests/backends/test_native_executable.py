"""Native forwards: the oracle's numbers, and equal bits whatever shares the call."""

from __future__ import annotations

import dataclasses
import mmap
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from backends.base import (
    BackendError,
    BackendUnavailable,
    OutOfDeviceMemory,
    Segment,
    UnsupportedWeight,
)
from backends.native import library, weights
from backends.native.backend import NativeBackend
from backends.native.executable import MAX_ROWS, SHARED_RING_ROWS, NativeExecutable
from backends.native.weights import WeightPacker, packed_bytes, release_pages
from backends.program import (
    Attention,
    Embed,
    Head,
    KvSlot,
    Program,
    Project,
    ProjectAdd,
    Scale,
    Weight,
)
from backends.reference import ReferenceBackend
from backends.weights import matrix_weights
from tests.backends.tiny_programs import (
    KV_HEADS,
    VOCAB,
    WIDTH,
    Maker,
    everything,
    logits_of,
    random_ids,
)
from tests.cpu_backend import needs_native

pytestmark = needs_native

ROW_COUNTS = (1, 2, 7, 8, 9, 16, 17)


@cache
def model(
    type_name: str = "Q4_K", kernels: str | None = None, threads: int = 2
) -> NativeExecutable:
    return NativeBackend(kernels=kernels, threads=threads).compile(everything(type_name))


@cache
def oracle_logits(type_name: str) -> np.ndarray:
    reference = ReferenceBackend().compile(everything(type_name))
    return logits_of(reference, reference.new_cache(), random_ids(40))


def replaced(program: Program, index: int, **changes: object) -> Program:
    """The program with fields of one operation changed."""
    ops = list(program.ops)
    ops[index] = dataclasses.replace(ops[index], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(program, ops=tuple(ops))


def test_f32_logits_are_the_oracles_for_every_operation() -> None:
    logits = logits_of(model("F32"), model("F32").new_cache(), random_ids(40))
    np.testing.assert_allclose(logits, oracle_logits("F32"), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("type_name", "typical"), [("F16", 2e-3), ("BF16", 2e-3), ("Q4_K", 6e-3), ("Q8_0", 0.1)]
)
def test_other_types_differ_from_the_oracle_by_cache_and_activation_rounding(
    type_name: str, typical: float
) -> None:
    """Of the typical row: rounding may send a row to another expert, which moves its logits."""
    logits = logits_of(model(type_name), model(type_name).new_cache(), random_ids(40))
    kept = [i for i in range(VOCAB) if i not in (3, 90)]
    errors = np.abs(logits[:, kept] - oracle_logits(type_name)[:, kept]).max(axis=1)
    assert np.median(errors) < typical
    assert np.all(np.isneginf(logits[:, [3, 90]]))


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize("type_name", ["Q4_K", "F32"])
def test_s70_a_row_has_the_same_bits_however_many_run_with_it(
    type_name: str, num_rows: int
) -> None:
    """Across the window's end: 20 rows before, then `num_rows` rows whole or one by one."""
    native = model(type_name)
    assert native.caps.is_row_independent
    chat = native.new_cache()
    logits_of(native, chat, random_ids(20))
    one_by_one, rows = chat.clone(), random_ids(num_rows, seed=4)
    together = logits_of(native, chat, rows)
    alone = np.concatenate([logits_of(native, one_by_one, [row]) for row in rows])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_s70_chunk_boundaries_change_no_bit(chunk: int) -> None:
    """300 tokens: past the ring's size, over several key blocks."""
    assert model().caps.is_chunk_independent
    token_ids, chat, whole = random_ids(300), model().new_cache(), model().new_cache()
    expected = [
        logits_of(model(), whole, token_ids[i : i + SHARED_RING_ROWS])
        for i in range(0, 300, SHARED_RING_ROWS)
    ]
    rows = [logits_of(model(), chat, token_ids[i : i + chunk]) for i in range(0, 300, chunk)]
    np.testing.assert_array_equal(np.concatenate(rows), np.concatenate(expected))


def test_s70_two_chats_in_one_forward_get_what_each_gets_alone() -> None:
    chats = [model().new_cache(), model().new_cache()]
    logits_of(model(), chats[0], random_ids(120))
    logits_of(model(), chats[1], random_ids(9, seed=2))
    copies = [chat.clone() for chat in chats]
    texts = [random_ids(3, seed=5), random_ids(11, seed=6)]
    output = model().forward([Segment(t, c) for t, c in zip(texts, chats, strict=True)])
    assert output.logits is not None
    together = output.logits.copy()
    alone = [logits_of(model(), c, t) for t, c in zip(texts, copies, strict=True)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("type_name", ["Q4_K", "F32"])
def test_s70_instruction_sets_and_thread_counts_change_no_bit(type_name: str) -> None:
    token_ids = random_ids(150)[:SHARED_RING_ROWS]
    expected = logits_of(model(type_name), model(type_name).new_cache(), token_ids)
    for kernels, threads in ((None, 1), (None, 5), ("portable", 2)):
        other = model(type_name, kernels, threads)
        np.testing.assert_array_equal(logits_of(other, other.new_cache(), token_ids), expected)


def test_a_long_prefill_attends_in_parts_of_the_rings_slack() -> None:
    """400 rows at once through a window of 12: keys a part needs are gone for the next one."""
    program = everything("Q4_K")
    ops = [op for op in program.ops if getattr(op, "writes_kv", True)]
    native = NativeBackend(threads=2).compile(dataclasses.replace(program, ops=tuple(ops)))
    assert native.caps.max_rows == MAX_ROWS
    token_ids, by_rows = random_ids(400), native.new_cache()
    whole = logits_of(native, native.new_cache(), token_ids)
    rows = [logits_of(native, by_rows, token_ids[i : i + 5]) for i in range(0, 400, 5)]
    np.testing.assert_array_equal(whole, np.concatenate(rows))


def test_values_taken_from_the_keys_of_very_many_heads_stay_in_their_scratch() -> None:
    """8192 heads of 16 once went 72 KB past the end of it."""
    heads, dim, width = 8192, 16, 32
    make, wide = Maker("F32"), heads * dim
    ops = (
        Embed(make.weight(VOCAB, width), 0),
        Project(0, 1, (make.weight(2 * wide, width),)),
        Attention(1, 2, heads, 0, 0.25, None, v_from_k=True),
        ProjectAdd(2, 0, make.weight(width, wide)),
        Head(0, make.norm(width), make.weight(VOCAB, width)),
    )
    program = Program(ops, (width, 2 * wide, wide), (KvSlot(heads, dim),), VOCAB, width)
    native = NativeBackend(threads=1).compile(program)
    oracle = ReferenceBackend().compile(program)
    expected = logits_of(oracle, oracle.new_cache(), [3, 4])
    np.testing.assert_allclose(logits_of(native, native.new_cache(), [3, 4]), expected, atol=1e-3)


def test_only_wanted_rows_get_logits_and_argmax_is_the_first_largest() -> None:
    chat, token_ids = model().new_cache(), random_ids(6)
    everywhere = model().forward([Segment(token_ids, chat.clone())])
    assert everywhere.logits is not None
    assert everywhere.argmax is not None
    logits = everywhere.logits.copy()
    assert everywhere.argmax.tolist() == logits.argmax(axis=1).tolist()
    last = model().forward([Segment(token_ids, chat.clone())], want_logits="last")
    assert last.logits is not None
    np.testing.assert_array_equal(last.logits, logits[-1:])
    nothing = model().forward([Segment(token_ids, chat)], want_logits="none", want_hidden=True)
    assert nothing.logits is None
    assert nothing.argmax is None
    assert nothing.hidden is not None
    assert nothing.hidden.shape == (6, WIDTH)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("broken", [0, 37, 95])
def test_a_logit_that_is_no_number_is_the_argmax(threads: int, broken: int) -> None:
    """The largest of the others would be answered in silence."""
    make = Maker("F32")
    head = make.weight(VOCAB, 32)
    rows = head.data.copy()
    rows[broken, :4] = np.frombuffer(np.float32("nan").tobytes(), np.uint8)
    head = dataclasses.replace(head, data=rows)
    ops = (Embed(make.weight(VOCAB, 32), 0), Head(0, make.norm(32), head))
    native = NativeBackend(threads=threads).compile(Program(ops, (32,), (), VOCAB, 32))
    output = native.forward([Segment([3, 4], native.new_cache())])
    assert output.argmax is not None
    assert output.argmax.tolist() == [broken, broken]


def test_a_looked_up_table_wider_than_the_kernels_unpack_is_refused() -> None:
    """Its first look-up once wrote over all of memory."""
    cols = (1 << 17) + 256
    weight = Weight("wide", "Q8_0", (2, cols), np.zeros((2, cols // 32 * 34), np.uint8))
    with pytest.raises(UnsupportedWeight, match=f"wide: {cols} inputs per row do not fit"):
        WeightPacker(library.shared_pool(1)).table(weight)


def test_hidden_rows_are_the_heads_input() -> None:
    token_ids = random_ids(5)
    output = model("F32").forward([Segment(token_ids, model("F32").new_cache())], want_hidden=True)
    reference = ReferenceBackend().compile(everything("F32"))
    oracle = reference.forward([Segment(token_ids, reference.new_cache())], want_hidden=True)
    assert output.hidden is not None
    assert oracle.hidden is not None
    np.testing.assert_allclose(output.hidden, oracle.hidden, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [
        ([], "at least one token"),
        ([VOCAB], "vocabulary"),
        ([-1], "vocabulary"),
        ([1] * (SHARED_RING_ROWS + 1), "rows in one forward"),
    ],
)
def test_a_refused_forward_changes_no_cache(token_ids: list[int], reason: str) -> None:
    good, bad = model().new_cache(), model().new_cache()
    with pytest.raises(BackendError, match=reason):
        model().forward([Segment([1, 2], good), Segment(token_ids, bad)])
    assert (good.length, bad.length) == (0, 0)


def test_caches_of_other_models_and_the_same_cache_twice_are_refused() -> None:
    chat, foreign = model().new_cache(), model("F32").new_cache()
    with pytest.raises(BackendError, match="another model"):
        model().forward([Segment([1], foreign)])
    with pytest.raises(BackendError, match="twice"):
        model().forward([Segment([1], chat), Segment([2], chat)])
    assert chat.length == 0


def test_a_closed_model_refuses_to_run() -> None:
    native = NativeBackend(threads=1).compile(everything("F32"))
    chat = native.new_cache()
    native.close()
    with pytest.raises(BackendError, match="closed"):
        native.forward([Segment([1], chat)])


def test_weights_that_do_not_fit_their_registers_are_refused() -> None:
    program, make = everything("F32"), Maker("F32")
    first = next(i for i, op in enumerate(program.ops) if isinstance(op, Project))
    head = len(program.ops) - 1
    misfits = [
        replaced(program, first, weights=(make.weight(8, WIDTH),)),
        replaced(program, first, norm=make.norm(WIDTH - 1)),
        replaced(program, first, dst=99),
        replaced(program, head, suppressed_ids=(VOCAB,)),
        dataclasses.replace(program, ops=program.ops[:-1]),
        dataclasses.replace(program, slots=(KvSlot(KV_HEADS, 32), program.slots[1])),
        dataclasses.replace(program, ops=(*program.ops[:-1], Scale(7, 1.0), program.ops[-1])),
    ]
    assert isinstance(program.ops[head], Head)
    for misfit in misfits:
        with pytest.raises(UnsupportedWeight):
            NativeBackend(threads=1).compile(misfit)


def test_bytes_that_do_not_go_with_type_and_shape_are_refused_by_name() -> None:
    weight = Maker("Q4_K").weight(32, WIDTH)
    short = dataclasses.replace(weight, name="blk.0.cut", data=weight.data[:, :-1])
    packer = WeightPacker(library.shared_pool(1))
    with pytest.raises(UnsupportedWeight, match=r"blk\.0\.cut.*Q4_K"):
        packer.matrix(short)


def ternary(rows: int, shape: tuple[int, ...]) -> tuple[Weight, np.ndarray]:
    """A weight of a type without kernels, and its values."""
    from gguf import GGMLQuantizationType, quants

    values = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], (rows, 256)).astype(np.float32)
    data = quants.quantize(values, GGMLQuantizationType.TQ2_0).view(np.uint8)
    return Weight("blk.0.ternary", "TQ2_0", shape, data), values


@pytest.mark.parametrize("rows_at_once", [16, 4096])
def test_a_type_without_kernels_is_kept_as_f16_expert_by_expert(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(weights, "DEQUANTIZE_ROWS", rows_at_once)
    weight, values = ternary(2 * 40, (2, 40, 256))
    packer = WeightPacker(library.shared_pool(1))
    found = [np.zeros(256, np.float32) for _ in values]
    for expert, matrix in enumerate(packer.experts(weight)):
        for i in range(40):
            into = found[40 * expert + i]
            library.load_library().ft_unpack_row(matrix, i, into.ctypes.data)
    np.testing.assert_array_equal(found, values)
    assert packer.num_bytes == packed_bytes(weight)


def test_what_a_type_without_kernels_grows_to_is_counted_before_it_is_placed_and_said() -> None:
    """Eight times the file: such a load ended the program instead of being refused."""
    table, _ = ternary(VOCAB, (VOCAB, WIDTH))
    untied, _ = ternary(VOCAB, (VOCAB, WIDTH))
    ops = (Embed(table, 0), Head(0, Maker("F32").norm(WIDTH), untied))
    program = Program(ops, (WIDTH,), (), VOCAB, WIDTH)
    backend = NativeBackend(threads=1)
    native = backend.compile(program)
    needed = backend.placed_bytes(program)
    assert needed == native.weight_bytes == 2 * 2 * VOCAB * WIDTH
    assert "0.0 GB in the file: there are no kernels for TQ2_0" in native.notices[0]
    with pytest.raises(OutOfDeviceMemory, match=f"need {needed} bytes, {needed - 1} are free"):
        NativeExecutable(program, backend._kernels, library.shared_pool(1), lambda: needed - 1)


def test_weights_with_kernels_take_what_was_counted_and_need_no_word() -> None:
    backend = NativeBackend(threads=1)
    native = backend.compile(everything("Q4_K"))
    assert native.weight_bytes == backend.placed_bytes(everything("Q4_K"))
    assert native.notices == []


def test_an_unknown_type_is_refused_naming_tensor_and_type() -> None:
    weight = Weight("blk.0.odd", "I8", (4, 32), np.zeros((4, 32), np.uint8))
    with pytest.raises(UnsupportedWeight, match=r"blk\.0\.odd.*I8"):
        WeightPacker(library.shared_pool(1)).matrix(weight)


def test_weights_are_packed_once_and_tables_that_are_only_looked_up_stay_in_the_file() -> None:
    shares: list[float] = []
    program = everything("Q4_K")
    native = NativeBackend(threads=1).compile(program, progress=shares.append)
    multiplied = sum(weight.data.nbytes for weight in matrix_weights(program))
    assert multiplied <= native.weight_bytes < 1.02 * multiplied
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("type_name", ["F32", "BF16", "Q4_1", "Q6_K"])
def test_a_row_looked_up_in_the_file_equals_the_packed_one(type_name: str) -> None:
    """The same model with its token table once tied to the head, once only looked up."""
    program = everything(type_name)
    tied = program.ops[0]
    assert isinstance(tied, Embed)
    untied = replaced(program, 0, table=dataclasses.replace(tied.table))
    logits = [
        logits_of(native, native.new_cache(), random_ids(9))
        for native in (NativeBackend(threads=1).compile(p) for p in (program, untied))
    ]
    np.testing.assert_array_equal(*logits)


def test_weights_larger_than_the_free_memory_are_refused_with_both_numbers() -> None:
    backend = NativeBackend(threads=1)
    with pytest.raises(OutOfDeviceMemory, match=r"weights need \d+ bytes, 1000 are free"):
        NativeExecutable(everything("Q4_K"), backend._kernels, library.shared_pool(1), lambda: 1000)


def test_releasing_pages_touches_mapped_files_only(tmp_path: Path) -> None:
    """The same advice on ordinary memory would erase it."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view, own = np.frombuffer(mapped, np.uint8).reshape(64, 256)[1:], np.full(1 << 16, 7, np.uint8)
    release_pages(view)
    release_pages(own)
    assert view[5, 17] == 17
    assert np.all(own == 7)


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(BackendUnavailable, match="tetris"):
        NativeBackend(kernels="tetris")


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(library.Matrix):
        _fields_ = (("more", library.ctypes.c_int64),)

    monkeypatch.setitem(library._STRUCTS, "matrix", Longer)
    library.load_library.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="another version"):
            library.load_library()
    finally:
        library.load_library.cache_clear()
