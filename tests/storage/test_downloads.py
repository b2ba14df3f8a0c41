"""Downloads that are broken off, continued and checked. The clock is moved by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage.downloads import RetryPolicy
from storage.errors import ChecksumMismatch, DownloadCancelled, DownloadFailed
from storage.model_downloads import DownloadTools, HubAccess, ModelDownloads, WantedSource
from storage.model_files import ModelFiles, read_record
from tests.storage.download_bench import SIZE, Bench
from tests.storage.fakes_storage import FakeClock, finish, start_python
from tests.storage.misbehaving_server import (
    CONTENT,
    SHA256,
    cut_after,
    good,
    hang_up,
    ignore_if_range,
    ignore_range,
    redirect,
    run_server,
    send,
    short_ranges,
    stall_after,
    status,
)


def test_a_file_is_installed_with_its_source_and_hash(bench: Bench) -> None:
    assert bench.fetch() == bench.target
    assert bench.is_installed()
    record = read_record(bench.target)
    assert record is not None
    assert record.sha256 == SHA256
    assert record.source == "https://huggingface.co/owner/repo/resolve/main/tiny.gguf"
    assert bench.server.requests[0][0] == "/owner/repo/resolve/main/tiny.gguf"
    assert bench.reports[-1].num_done == bench.reports[-1].num_total == SIZE


def test_an_installed_file_is_not_fetched_again(bench: Bench) -> None:
    bench.fetch()
    bench.fetch()
    assert len(bench.server.requests) == 1


def test_a_cut_connection_goes_on_from_the_kept_byte(bench: Bench) -> None:
    bench.server.plan = [cut_after(60_000), hang_up, cut_after(30_000)]
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == [None, "bytes=60000-", "bytes=60000-", "bytes=90000-"]
    assert bench.server.requests[1][1]["If-Range"] == '"v1"'


def test_a_part_left_by_an_earlier_run_is_continued(bench: Bench) -> None:
    bench.leave_part(70_000)
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == ["bytes=70000-"]
    assert bench.reports[0].stage == "checking"


def test_a_part_goes_on_from_a_mirror_when_the_hash_is_known(bench: Bench) -> None:
    bench.leave_part(70_000, source="https://elsewhere/tiny.gguf", etag=None)
    bench.fetch()
    assert bench.ranges == ["bytes=70000-"]


@pytest.mark.parametrize(
    "changes",
    [{"sha256": "0" * 64}, {"source": "https://x/y", "sha256": None}, {"bogus": 1}],
)
def test_a_part_of_another_file_is_not_continued(bench: Bench, changes: dict[str, Any]) -> None:
    bench.leave_part(70_000, **changes)
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == [None]


def test_f14_a_whole_part_is_installed_without_a_request(bench: Bench) -> None:
    bench.leave_part(SIZE)
    bench.fetch()
    assert bench.is_installed()
    assert bench.server.requests == []


def test_f14_416_on_a_whole_part_of_unknown_size_finishes(bench: Bench) -> None:
    bench.leave_part(SIZE, size_bytes=None)
    bench.fetch(size_bytes=None)
    assert bench.is_installed()
    assert bench.ranges == [f"bytes={SIZE}-"]


def test_f14_a_part_longer_than_the_file_starts_over(bench: Bench) -> None:
    bench.leave_part(SIZE, size_bytes=None)
    with bench.part.open("ab") as file:
        file.write(b"more")
    bench.fetch(size_bytes=None)
    assert bench.is_installed()
    assert bench.ranges == [f"bytes={SIZE + 4}-", None]


def test_f14_200_to_a_range_starts_over_cleanly(bench: Bench) -> None:
    bench.server.plan = [cut_after(60_000), ignore_range]
    bench.fetch()
    assert bench.is_installed()


@pytest.mark.parametrize("behaviour", [good, ignore_if_range])
def test_f14_a_file_that_changed_meanwhile_starts_over(
    bench: Bench, behaviour: Callable[[Any], None]
) -> None:
    old = b"GGUF" + b"old" * 20_000
    bench.leave_part(0, sha256=None, size_bytes=len(old), etag='"v0"')
    bench.part.write_bytes(old[:50_000])
    bench.server.plan = [behaviour]
    bench.fetch(size_bytes=None, sha256=None)
    assert bench.is_installed()


def test_a_server_that_sends_less_than_the_range_is_asked_again(bench: Bench) -> None:
    bench.server.plan = [cut_after(10_000), *[short_ranges(40_000)] * 3]
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges[1:] == ["bytes=10000-", "bytes=50000-", "bytes=90000-"]


def test_f13_one_flipped_byte_is_not_installed(bench: Bench) -> None:
    bench.server.content = CONTENT[:-1] + b"?"
    with pytest.raises(ChecksumMismatch, match="SHA-256"):
        bench.fetch()
    assert not bench.target.exists()
    assert not bench.part.exists()
    bench.server.content = CONTENT
    bench.fetch()
    assert bench.is_installed()


def test_a_file_without_a_known_hash_is_checked_by_the_hubs_own(bench: Bench) -> None:
    linked = {"X_Linked_ETag": f'"{SHA256}"', "X_Linked_Size": str(SIZE)}
    bench.server.plan = [redirect("/cdn/blob", **linked), send(CONTENT[:-1] + b"?")]
    with pytest.raises(ChecksumMismatch, match="SHA-256"):
        bench.fetch(sha256=None)
    bench.server.plan = [redirect("/cdn/blob", **linked)]
    bench.fetch(sha256=None)
    assert bench.is_installed()


def test_a_hash_stated_by_another_host_is_not_believed(bench: Bench) -> None:
    with run_server() as storage:
        lie = {"X_Linked_ETag": '"' + "0" * 64 + '"'}
        bench.server.plan = [redirect(f"{storage.url}/blob".replace("127.0.0.1", "localhost"))]
        storage.plan = [send(CONTENT, **lie)]
        bench.fetch(sha256=None)
    assert bench.is_installed()


def test_a_hub_that_has_another_file_is_noticed_before_the_first_byte(bench: Bench) -> None:
    bench.server.plan = [redirect("/cdn/blob", X_Linked_ETag='"' + "0" * 64 + '"')]
    with pytest.raises(ChecksumMismatch, match="has SHA-256 0000"):
        bench.fetch()
    assert not bench.part.exists()


def test_a_stall_is_reported_with_rate_zero_and_tried_again(bench: Bench) -> None:
    bench.policy = RetryPolicy(stall_timeout_s=1.0)
    bench.server.plan = [stall_after(40_000)]
    bench.fetch()
    assert bench.is_installed()
    (stall,) = [report for report in bench.reports if report.stage == "stalled"]
    assert (stall.num_done, stall.bytes_per_s) == (40_000, 0.0)
    assert stall.note == "nothing arrives; next try in 1 s"
    assert bench.ranges == [None, "bytes=40000-"]


def test_connections_that_are_cut_early_get_on_as_long_as_each_brings_something(
    bench: Bench,
) -> None:
    """Each had to bring what a whole window of half a minute must: six short ones ended it."""
    bench.server.plan = [cut_after(5_000)] * 12
    bench.fetch()
    assert bench.is_installed()
    assert bench.clock.slept == 12


def test_a_trickle_ends(bench: Bench) -> None:
    """A byte now and then was progress for ever."""
    bench.server.plan = [stall_after(9)] * 7
    with pytest.raises(DownloadFailed, match=r"only a trickle arrives \(6 tries\)"):
        bench.fetch(on_look=lambda: bench.clock.sleep(30.0))
    assert bench.part.stat().st_size == 9 * 6


def test_a_few_bytes_per_connection_end(bench: Bench) -> None:
    bench.server.plan = [cut_after(9)] * 7
    with pytest.raises(DownloadFailed, match="6 tries"):
        bench.fetch()
    assert bench.part.stat().st_size == 9 * 6


def test_a_slow_end_is_the_end(bench: Bench) -> None:
    bench.leave_part(SIZE - 9)
    bench.fetch(on_look=lambda: bench.clock.sleep(30.0))
    assert bench.is_installed()
    assert len(bench.server.requests) == 1


def test_the_reported_bytes_never_fall(bench: Bench) -> None:
    bench.server.plan = [cut_after(60_000), ignore_range, good]
    bench.fetch()
    done = [report.num_done for report in bench.reports]
    assert done == sorted(done)
    assert done[-1] == SIZE


def test_cancel_keeps_the_part_which_can_go_on(bench: Bench) -> None:
    bench.server.plan = [stall_after(40_000)]
    bench.is_cancelled = lambda: bench.part.exists() and bench.part.stat().st_size == 40_000
    with pytest.raises(DownloadCancelled, match="part is kept"):
        bench.fetch()
    assert bench.part.read_bytes() == CONTENT[:40_000]
    (part,) = ModelFiles(bench.folder).parts()
    assert (part.name, part.size_bytes, part.total_bytes) == ("tiny", 40_000, SIZE)
    assert ModelFiles(bench.folder).installed() == []
    bench.is_cancelled = lambda: False
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == [None, "bytes=40000-"]


def test_cancel_is_felt_while_a_file_that_is_here_is_checked(bench: Bench) -> None:
    """Hashing 40 GB kept the program from ending."""
    bench.folder.mkdir()
    bench.target.write_bytes(CONTENT)
    bench.is_cancelled = lambda: True
    with pytest.raises(DownloadCancelled):
        bench.fetch()
    bench.is_cancelled = lambda: False
    assert bench.fetch() == bench.target
    assert bench.reports[-1].stage == "checking"


def test_cancel_is_felt_while_waiting_for_the_next_try(bench: Bench) -> None:
    bench.server.plan = [status(503)] * 6
    bench.is_cancelled = lambda: bench.clock.slept >= 4
    with pytest.raises(DownloadCancelled):
        bench.fetch()
    assert len(bench.server.requests) == 3


FETCH = """
import sys
from pathlib import Path
from storage.errors import DownloadBusy
from storage.downloads import RetryPolicy
from storage.model_downloads import DownloadTools, HubAccess, ModelDownloads, WantedSource
tools = DownloadTools(policy=RetryPolicy(stall_timeout_s=600.0))
downloads = ModelDownloads(Path(sys.argv[1]), hub=HubAccess(sys.argv[2]), tools=tools)
wanted = WantedSource("tiny.gguf", ("hf:owner/repo/tiny.gguf",))
def report(progress):
    print(progress.num_done, flush=True)
try:
    downloads.fetch([wanted], on_progress=report, is_cancelled=lambda: False)
except DownloadBusy as error:
    print("busy", error)
"""


def test_one_process_downloads_a_file_at_a_time(bench: Bench) -> None:
    bench.server.plan = [stall_after(50_000)]
    first = start_python(FETCH, str(bench.folder), bench.server.url)
    assert first.stdout is not None
    assert first.stdout.readline() == "0\n"
    second = start_python(FETCH, str(bench.folder), bench.server.url)
    assert "busy tiny.gguf is being downloaded by another process" in finish(second)
    first.kill()
    first.communicate()
    num_kept = bench.part.stat().st_size
    bench.fetch()
    assert bench.is_installed()
    assert bench.ranges == [None, f"bytes={num_kept}-" if num_kept else None]


def test_shards_are_one_download_with_one_progress(bench: Bench, clock: FakeClock) -> None:
    downloads = ModelDownloads(
        bench.folder,
        hub=HubAccess(bench.server.url),
        tools=DownloadTools(clock=clock, sleep=clock.sleep),
    )
    files = [
        WantedSource(f"big/big-0000{n}-of-00002.gguf", (f"hf:o/r/{n}.gguf",), SIZE, SHA256)
        for n in (1, 2)
    ]
    path = downloads.fetch(files, on_progress=bench.reports.append, is_cancelled=lambda: False)
    assert path == bench.folder / "big" / "big-00001-of-00002.gguf"
    assert bench.reports[-1].num_done == bench.reports[-1].num_total == 2 * SIZE
    done = [report.num_done for report in bench.reports]
    assert done == sorted(done)
    (model,) = ModelFiles(bench.folder).installed()
    assert (model.name, model.is_complete, model.size_bytes) == ("big", True, 2 * SIZE)
