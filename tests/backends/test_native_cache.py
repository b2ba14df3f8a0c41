"""The native cache: exact rewinds over wrapped rings, copies, saved states, honest refusals."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from backends.base import BackendError, OutOfDeviceMemory, Segment
from backends.native.backend import NativeBackend
from backends.native.executable import MAX_VERIFY_ROWS, NativeExecutable
from backends.native.kv_cache import BLOCK, CacheLayout, NativeCache, ring_size
from backends.program import KvSlot
from tests.backends.tiny_programs import WINDOW, everything, logits_of, random_ids
from tests.cpu_backend import needs_native

pytestmark = needs_native


@cache
def model() -> NativeExecutable:
    return NativeBackend(threads=2).compile(everything("Q4_K"))


def filled(length: int) -> NativeCache:
    """A cache after `length` tokens, ten at a time."""
    chat, token_ids = model().new_cache(), random_ids(length)
    for start in range(0, length, 10):
        model().forward([Segment(token_ids[start : start + 10], chat)], want_logits="none")
    return chat


@pytest.mark.parametrize(
    "length", [1, WINDOW - 1, WINDOW, WINDOW + 1, BLOCK - 1, BLOCK, 2 * BLOCK + WINDOW]
)
@pytest.mark.parametrize("num_rejected", [1, 7, MAX_VERIFY_ROWS - 1])
def test_s18_rejected_rows_leave_no_trace_at_any_length(length: int, num_rejected: int) -> None:
    chat = filled(length)
    undisturbed = chat.clone()
    logits_of(model(), chat, random_ids(num_rejected + 1, seed=9))
    assert chat.can_rewind_to(length)
    chat.rewind_to(length)
    after = random_ids(20, seed=3)
    np.testing.assert_array_equal(
        logits_of(model(), chat, after), logits_of(model(), undisturbed, after)
    )


def test_rewinding_to_what_a_ring_has_lost_is_refused_and_changes_nothing() -> None:
    chat = filled(400)
    oldest = 400 - ring_size(WINDOW, 128) + WINDOW - 1
    assert chat.can_rewind_to(oldest)
    assert not chat.can_rewind_to(oldest - 1)
    assert not chat.can_rewind_to(401)
    with pytest.raises(BackendError, match=r"400 tokens cannot go back to 50"):
        chat.rewind_to(50)
    assert chat.length == 400


@pytest.mark.parametrize("length", [30, 250, 400])
def test_below_a_length_that_is_lost_everything_but_nothing_is(length: int) -> None:
    chat = filled(length)
    can = [chat.can_rewind_to(n) for n in range(1, length + 1)]
    assert can == sorted(can)
    assert chat.can_rewind_to(0)


def test_a_cache_rewound_to_nothing_is_like_a_new_one() -> None:
    chat, token_ids = filled(400), random_ids(30, seed=8)
    chat.rewind_to(0)
    np.testing.assert_array_equal(
        logits_of(model(), chat, token_ids), logits_of(model(), model().new_cache(), token_ids)
    )
    assert chat.can_rewind_to(5)


def test_s49_a_clone_shares_no_buffer() -> None:
    chat = filled(40)
    copy = chat.clone()
    before = {key: value.copy() for key, value in copy.export_state().items()}
    chat.rewind_to(35)
    logits_of(model(), chat, random_ids(20, seed=7))
    assert copy.length == 40
    for key, value in copy.export_state().items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize("length", [0, 5, WINDOW, 300])
def test_an_exported_cache_continues_to_the_bit(length: int) -> None:
    chat, copy = filled(length), filled(33)
    copy.import_state(chat.export_state(), length)
    after = random_ids(20, seed=3)
    np.testing.assert_array_equal(logits_of(model(), copy, after), logits_of(model(), chat, after))


def test_a_cache_of_other_threads_is_of_the_same_arithmetic_and_continues_to_the_bit() -> None:
    one = NativeBackend(threads=1).compile(everything("Q4_K"))
    assert one.caps.device != model().caps.device
    assert one.caps.arithmetic == model().caps.arithmetic
    copy = one.new_cache()
    copy.import_state(filled(60).export_state(), 60)
    after = random_ids(20, seed=3)
    np.testing.assert_array_equal(
        logits_of(one, copy, after), logits_of(model(), filled(60), after)
    )


def test_an_export_is_in_order_of_positions_and_windows_give_their_last() -> None:
    state = filled(300).export_state()
    np.testing.assert_array_equal(state["positions.0"], np.arange(300 - WINDOW, 300))
    np.testing.assert_array_equal(state["positions.1"], np.arange(300))
    assert state["k.0"].shape == (WINDOW, 2, 64)
    assert state["v.1"].shape == (300, 2, 64)
    assert state["k.1"].dtype == np.float16


@pytest.mark.parametrize("change", ["type", "heads", "count", "missing"])
def test_a_misfit_state_is_refused_and_changes_nothing(change: str) -> None:
    chat = filled(30)
    state = dict(chat.export_state())
    match change:
        case "type":
            state["v.1"] = state["v.1"].astype(np.float32)
        case "heads":
            state["k.1"] = state["k.1"][:, :1]
        case "count":
            state["k.0"], state["v.0"] = state["k.0"][3:], state["v.0"][3:]
        case _:
            del state["k.0"]
    undisturbed = chat.clone()
    with pytest.raises(BackendError):
        chat.import_state(state, 30)
    after = random_ids(4, seed=3)
    np.testing.assert_array_equal(
        logits_of(model(), chat, after), logits_of(model(), undisturbed, after)
    )


def test_after_an_import_only_kept_positions_can_be_rewound_to() -> None:
    chat, copy = filled(300), model().new_cache()
    copy.import_state(chat.export_state(), 300)
    assert copy.can_rewind_to(299)
    assert not copy.can_rewind_to(200)


def test_memory_of_window_slots_is_bounded_and_linear_slots_grow_by_doubling() -> None:
    slots = (KvSlot(1, 64, window=512), KvSlot(1, 64))
    layout = CacheLayout(slots, (ring_size(512, MAX_VERIFY_ROWS), 0), np.dtype(np.float16))
    chat = NativeCache(layout, lambda: 1 << 40)
    sizes = []
    for length in (1, 257, 513, 1025, 5000):
        chat.ensure_capacity(length)
        sizes.append([array.nbytes for array in chat._keys])
    assert [ring // 128 for ring, _ in sizes] == [256, 512, 640, 640, 640]
    assert [linear // 128 for _, linear in sizes] == [256, 512, 1024, 2048, 5120 - 5120 % BLOCK]


def test_growing_keeps_what_is_stored() -> None:
    chat = filled(250)
    before = chat.export_state()
    chat.ensure_capacity(5000)
    for key, value in chat.export_state().items():
        np.testing.assert_array_equal(value, before[key])


def test_growth_beyond_the_free_memory_is_refused_before_it_is_taken() -> None:
    layout = CacheLayout((KvSlot(2, 64),), (0,), np.dtype(np.float16))
    chat = NativeCache(layout, lambda: 300_000)
    chat.ensure_capacity(256)
    held = chat.num_bytes
    with pytest.raises(OutOfDeviceMemory, match=r"5000 tokens needs \d+ more bytes, 300000"):
        chat.ensure_capacity(5000)
    assert chat.num_bytes == held
    assert chat.length == 0


def test_a_forward_that_finds_no_memory_changes_no_cache() -> None:
    native = NativeBackend(threads=1).compile(everything("Q4_K"))
    chats = [native.new_cache(), native.new_cache()]
    native.forward([Segment([1, 2], chats[0])])
    native._available_bytes = lambda: 0
    starved = native.new_cache()
    with pytest.raises(OutOfDeviceMemory):
        native.forward([Segment([3], chats[0]), Segment([4], starved)])
    assert [chat.length for chat in (chats[0], starved)] == [2, 0]


def test_an_f32_program_keeps_an_f32_cache() -> None:
    native = NativeBackend(threads=1).compile(everything("F32"))
    chat = native.new_cache()
    native.forward([Segment([1], chat)])
    assert chat.export_state()["k.0"].dtype == np.float32
    assert native.cache_bytes_per_token == 2 * 2 * 64 * 4
