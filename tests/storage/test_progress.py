"""Figures of a download, with the clock moved by hand."""

from __future__ import annotations

from storage.progress import DownloadProgress, ProgressMeter
from tests.storage.fakes_storage import FakeClock


def test_hashing_a_kept_part_counts_in_no_rate(clock: FakeClock) -> None:
    """A resumed download began with hundreds of MB/s: the speed at which its part was hashed."""
    reports: list[DownloadProgress] = []
    meter = ProgressMeter(reports.append, clock)
    meter.num_total = 1_000_000
    for num_bytes, stage in (
        (400_000, "checking"),
        (800_000, "checking"),
        (800_000, "downloading"),
    ):
        meter.advance(num_bytes, stage)  # type: ignore[arg-type]
        clock.now += 1
    meter.advance(801_000)
    assert [report.bytes_per_s for report in reports] == [0, 0, 0, 1000]
