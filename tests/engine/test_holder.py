"""Cache and ids of one chat change together or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from backends.base import BackendError, OutOfDeviceMemory
from engine.cache.holder import Holder, common_prefix_len, forward_holders
from engine.cache.holder_store import MIN_SHARED_LEN, HolderStore
from engine.errors import HolderBroken
from tests.engine.fakes_engine import FakeExecutable, LinearCache, RecurrentCache, RingCache

CACHES = [LinearCache, RingCache, RecurrentCache]


@pytest.mark.parametrize("cache", CACHES)
def test_a_forward_appends_ids_and_rows_and_scores_them(cache: type[LinearCache]) -> None:
    executable = FakeExecutable(make_cache=cache)
    whole, pieces = Holder(executable), Holder(executable)
    all_rows = whole.forward([1, 2, 3, 4]).logits
    assert all_rows is not None
    all_rows = all_rows.copy()
    for n, token_id in enumerate([1, 2, 3, 4]):
        row = pieces.forward([token_id], want_logits="last").logits
        assert row is not None
        assert (row[0] == all_rows[n]).all()
    assert whole.token_ids == pieces.token_ids == [1, 2, 3, 4]
    assert whole.length == whole.cache.length == 4


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("half_way", [False, True])
def test_a_failed_forward_changes_neither_cache_nor_ids(
    cache: type[LinearCache], *, half_way: bool
) -> None:
    executable = FakeExecutable(make_cache=cache, fail_at=2, fails_half_way=half_way)
    holder = Holder(executable)
    holder.forward([1, 2, 3])
    with pytest.raises(BackendError, match="gone"):
        holder.forward([4, 5])
    assert holder.token_ids == [1, 2, 3]
    fresh = Holder(executable)
    fresh.forward([1, 2, 3])
    assert holder.cache.state() == fresh.cache.state()  # type: ignore[attr-defined]


def test_rows_that_cannot_be_taken_back_break_the_holder_for_good() -> None:
    class Stubborn(LinearCache):
        def can_rewind_to(self, length: int) -> bool:
            return length == self.length

    holder = Holder(FakeExecutable(make_cache=Stubborn, fail_at=2, fails_half_way=True))
    holder.forward([1, 2, 3])
    with pytest.raises(BackendError, match="gone"):
        holder.forward([4, 5])
    assert not holder.is_intact
    with pytest.raises(HolderBroken):
        holder.forward([4])


def test_a_refused_rewind_changes_nothing() -> None:
    holder = Holder(FakeExecutable(make_cache=RecurrentCache))
    holder.forward([1, 2, 3])
    holder.forward([4])
    with pytest.raises(BackendError):
        holder.rewind_to(1)
    assert holder.token_ids == [1, 2, 3, 4]
    assert holder.is_intact


@pytest.mark.parametrize("cache", CACHES)
def test_a_clone_and_its_original_go_their_own_ways(cache: type[LinearCache]) -> None:
    executable = FakeExecutable(make_cache=cache)
    original = Holder(executable)
    original.forward(list(range(50)))
    state = original.cache.state()  # type: ignore[attr-defined]
    clone = original.clone()
    clone.forward([7, 8, 9])
    assert original.cache.state() == state  # type: ignore[attr-defined]
    assert original.length == 50
    original.forward([1])
    assert clone.token_ids[50:] == [7, 8, 9]


@pytest.mark.parametrize("cache", CACHES)
def test_a_snapshot_brings_back_cache_and_ids(cache: type[LinearCache]) -> None:
    holder = Holder(FakeExecutable(make_cache=cache))
    holder.forward(list(range(60)))
    state = holder.cache.state()  # type: ignore[attr-defined]
    snapshot = holder.snapshot()
    holder.forward([1, 2])
    holder.forward([3])
    holder.restore(snapshot)
    assert holder.cache.state() == state  # type: ignore[attr-defined]
    assert holder.token_ids == list(range(60))


def test_what_a_cache_can_give_back_decides_what_is_reused() -> None:
    prompt = [*range(50), 99]
    lengths = {}
    for cache in CACHES:
        holder = Holder(FakeExecutable(make_cache=cache))
        holder.forward(list(range(40)))
        holder.forward(list(range(40, 60)))
        lengths[cache] = (holder.reusable_len(prompt), holder.reusable_len([*range(10), 99]))
    assert lengths == {LinearCache: (50, 10), RingCache: (50, 0), RecurrentCache: (50, 0)}


def test_what_a_ring_gives_back_is_asked_once_however_long_the_common_start() -> None:
    asked: list[int] = []

    class Counting(RingCache):
        def can_rewind_to(self, length: int) -> bool:
            asked.append(length)
            return super().can_rewind_to(length)

    holder = Holder(FakeExecutable(make_cache=Counting))
    for start in range(0, 200, 50):
        holder.forward(list(range(start, start + 50)))
    asked.clear()
    assert holder.reusable_len([*range(100), 300]) == 0
    assert asked == [100]


def test_several_chats_forward_together_and_fail_together() -> None:
    executable = FakeExecutable(fail_at=3)
    a, b = Holder(executable), Holder(executable)
    a.forward([1])
    together = forward_holders([a, b], [[2], [7, 8]], want_logits="last").logits
    assert together is not None
    assert together.shape[0] == 2
    alone = Holder(FakeExecutable())
    logits = alone.forward([7, 8], want_logits="last").logits
    assert logits is not None
    assert np.array_equal(together[1], logits[0])
    with pytest.raises(BackendError):
        forward_holders([a, b], [[3], [9]])
    assert (a.token_ids, b.token_ids) == ([1, 2], [7, 8])


@pytest.mark.parametrize(
    ("a", "b", "num"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 5], [1, 6], 1)]
)
def test_the_common_prefix_is_counted(a: list[int], b: list[int], num: int) -> None:
    assert common_prefix_len(a, b) == common_prefix_len(tuple(b), a) == num


def _store(budget: int = 10_000, **fields: int) -> HolderStore:
    return HolderStore(FakeExecutable(), budget_bytes=budget, **fields)


def _use(store: HolderStore, chat_id: str, ids: list[int]) -> Holder:
    holder = store.acquire(chat_id, ids)
    for start in range(holder.length, len(ids), 64):
        holder.forward(ids[start : start + 64])
    store.release(chat_id)
    return holder


def test_a_short_common_start_is_not_worth_a_copy() -> None:
    store = _store()
    _use(store, "a", list(range(60)))
    short = [*range(MIN_SHARED_LEN - 1), 200, 201]
    assert store.acquire("b", short).length == 0
    longer = [*range(MIN_SHARED_LEN + 5), 200, 201]
    assert store.acquire("c", longer).length == MIN_SHARED_LEN + 5


def test_a_long_cache_is_not_copied_for_a_short_start() -> None:
    store = _store()
    _use(store, "a", list(range(60)) * 10)
    assert store.acquire("b", [*range(60), 200]).length == 0
    assert store.copy_prefix(list(range(60))) is None
    assert store.acquire("c", [*list(range(60)) * 2, 200]).length == 120


def test_another_chats_cache_is_copied_and_left_alone() -> None:
    store = _store()
    source = _use(store, "a", list(range(60)))
    copy = store.acquire("b", [*range(50), 200])
    assert copy is not source
    assert copy.token_ids == list(range(50))
    assert source.length == 60


def test_the_budget_evicts_the_least_recently_used_and_then_checkpoints() -> None:
    store = _store(budget=8 * 130)
    checkpoint = Holder(FakeExecutable())
    checkpoint.forward(list(range(30)))
    store.add_checkpoint(checkpoint)
    for chat_id, first in (("a", 60), ("b", 120), ("c", 180)):
        _use(store, chat_id, list(range(first, first + 45)))
    assert store.get("a") is None
    assert store.get("b") is not None
    assert store.checkpoints
    store.make_room(8 * 120)
    assert store.get("b") is store.get("c") is None
    assert not store.checkpoints


def test_one_eviction_takes_the_least_recently_used_thing_alone() -> None:
    store = _store()
    _use(store, "a", list(range(40)))
    _use(store, "b", list(range(60, 100)))
    store.set_resume_point("a", Holder(FakeExecutable()))
    held = []
    while store.evict_one():
        held.append([chat_id for chat_id in "ab" if store.get(chat_id)])
    assert held == [["a", "b"], ["b"], []]


def test_a_new_chat_gets_the_room_of_the_least_recently_used_ones_on_a_full_device() -> None:
    store = _store()
    for chat_id in ("a", "b"):
        _use(store, chat_id, [ord(chat_id)] * 40)

    def make_cache() -> LinearCache:
        if store.get("a"):
            raise OutOfDeviceMemory("no memory for the windows of a new chat")
        return LinearCache()

    store._executable.make_cache = make_cache  # type: ignore[attr-defined]
    assert store.acquire("c", [1, 2, 3]).length == 0
    assert store.get("a") is None
    assert store.get("b") is not None


def test_a_running_chat_is_never_evicted() -> None:
    store = _store(budget=80)
    holder = store.acquire("a", list(range(60)))
    holder.forward(list(range(60)))
    store.make_room(80)
    assert store.evict_one() is False
    assert store.get("a") is holder


@pytest.mark.parametrize("error", [OutOfDeviceMemory("the device is full"), MemoryError()])
def test_a_copy_that_finds_no_memory_is_given_up_even_after_others_were_evicted(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def clone(self: LinearCache) -> LinearCache:
        raise error

    store = _store(budget=8 * 130)
    for chat_id in ("a", "b"):
        _use(store, chat_id, [*range(50), ord(chat_id)])
    monkeypatch.setattr(LinearCache, "clone", clone)
    assert store.copy_prefix(list(range(50))) is None
    assert store.acquire("c", [*range(50), 200]).length == 0
