"""The thread pool: every piece of work is done exactly once, by whoever shows up."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from backends.native.library import ThreadPool, physical_cores, quota_cores, shared_pool


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


def test_workers_that_went_to_sleep_are_woken() -> None:
    """Longer than a worker spins: the next job must still find them or do without."""
    pool = ThreadPool(4)
    pause = threading.Event()
    for _ in range(5):
        pause.wait(0.002)
        assert np.all(pool.visit(256, 1) == 1)
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
