"""The thread pool: every piece of work is done exactly once, by whoever shows up."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest

from backends.native.library import (
    ThreadPool,
    load_library,
    physical_cores,
    quota_cores,
    shared_pool,
)
from tests.cpu_backend import needs_native

pytestmark = needs_native

TASKS = Path("/proc/self/task")


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("count", "grain"), [(0, 1), (1, 1), (7, 3), (1000, 1), (5000, 64)])
def test_every_item_is_handed_out_once(threads: int, count: int, grain: int) -> None:
    pool = ThreadPool(threads)
    for _ in range(50):
        assert np.all(pool.visit(count, grain) == 1)
    pool.close()


def test_more_pieces_than_the_claim_word_counts_are_merged() -> None:
    pool = ThreadPool(2)
    assert np.all(pool.visit(3_000_000, 1) == 1)
    pool.close()


def test_work_is_finished_with_more_threads_than_cores() -> None:
    """Most workers are asleep or preempted here; nothing waits for them to show up."""
    pool = ThreadPool(32)
    for _ in range(200):
        assert np.all(pool.visit(64, 1) == 1)
    pool.close()


def test_two_callers_take_turns() -> None:
    pool = ThreadPool(3)
    failures: list[int] = []

    def call() -> None:
        for _ in range(200):
            failures.append(int(np.count_nonzero(pool.visit(97, 2) != 1)))

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(failures) == 400
    assert not any(failures)
    pool.close()


def threads_that_meet(pool: ThreadPool, count: int) -> set[int]:
    """Run `count` items that each wait until all of them run; the threads they ran on."""
    everyone, met = threading.Barrier(count), set()

    def item(arg: object, begin: int, end: int, thread: int) -> None:
        try:
            everyone.wait(timeout=30)
        except threading.BrokenBarrierError:
            return
        met.add(threading.get_ident())

    job = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int] * 3)(item)
    ranges = load_library().ft_pool_ranges
    ranges.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    ranges(pool.handle, count, 1, ctypes.cast(job, ctypes.c_void_p), None)
    return met


@pytest.mark.parametrize("threads", [2, 4])
def test_every_thread_takes_part(threads: int) -> None:
    pool = ThreadPool(threads)
    assert len(threads_that_meet(pool, threads)) == threads
    pool.close()


def is_asleep(task: str) -> bool:
    """Source: proc_pid_stat(5): the state stands behind the name in parentheses."""
    return (TASKS / task / "stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.skipif(not TASKS.is_dir(), reason="only Linux shows what a thread does")
def test_workers_that_went_to_sleep_are_woken() -> None:
    """A worker spins for 50 us, then sleeps: a job that needs it must still get it."""
    for _ in range(5):
        others = {task.name for task in TASKS.iterdir()}
        pool = ThreadPool(2)
        (worker,) = {task.name for task in TASKS.iterdir()} - others
        assert any(is_asleep(worker) for _ in range(1_000_000))
        assert len(threads_that_meet(pool, 2)) == 2
        pool.close()


def test_the_process_has_one_pool_per_size_and_defaults_to_the_physical_cores() -> None:
    assert shared_pool(2) is shared_pool(2)
    assert shared_pool().threads == physical_cores()
    assert shared_pool(3).threads == 3


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_share_of_the_cores_is_read_in_both_layouts(
    tmp_path: Path, files: dict[str, str], cores: int | None
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert quota_cores(tmp_path) == cores
