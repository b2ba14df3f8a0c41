"""How far a download is, in figures that never run backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

Stage = Literal["downloading", "stalled", "checking"]

_WINDOW_S: Final = 5.0
"""The rate is the mean over so long: short enough to show a stall, long enough to read."""

_INTERVAL_S: Final = 0.1
"""Shortest time between two reports of the same stage."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """One report."""

    num_done: int
    """Bytes on disk, those of earlier tries included; never falls, not even after a restart."""
    num_total: int
    """Bytes of everything that was asked for; 0 while unknown."""
    bytes_per_s: float = 0.0
    """0 while nothing arrives."""
    stage: Stage = "downloading"
    note: str = ""
    """Why it waits, in a few words."""

    @property
    def fraction(self) -> float:
        """Share of the bytes that is here, 0 to 1."""
        return min(1.0, self.num_done / self.num_total) if self.num_total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time left at the present rate, or None while nothing arrives."""
        if self.bytes_per_s <= 0.0:
            return None
        return (self.num_total - self.num_done) / self.bytes_per_s


ReportProgress = Callable[[DownloadProgress], None]


class ProgressMeter:
    """Turns byte counts into reports, at most ten a second."""

    def __init__(self, report: ReportProgress, clock: Callable[[], float]) -> None:
        self.num_total = 0
        self.num_before = 0
        """Bytes of files of the same order that are already whole."""
        self._report = report
        self._clock = clock
        self._high_water = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._last: tuple[float, Stage] | None = None

    def advance(self, num_bytes: int, stage: Stage = "downloading") -> None:
        """Bytes of the present file that are on disk (or checked) now."""
        now = self._clock()
        has_started_over = bool(self._samples) and num_bytes < self._samples[-1][1]
        if has_started_over or (self._last is not None and self._last[1] != stage):
            self._samples.clear()  # an old rate would be negative, or that of hashing
        self._samples.append((now, num_bytes))
        while now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        self._high_water = max(self._high_water, self.num_before + num_bytes)
        is_whole = self._high_water == self.num_total
        is_news = self._last is None or self._last[1] != stage or is_whole
        if is_news or (self._last is not None and now - self._last[0] >= _INTERVAL_S):
            self._send(now, stage)

    def stall(self, note: str) -> None:
        """Nothing arrives; say so at once, with a rate of 0."""
        self._samples.clear()
        self._send(self._clock(), "stalled", note)

    def _send(self, now: float, stage: Stage, note: str = "") -> None:
        self._last = (now, stage)
        rate = 0.0 if stage != "downloading" else self._rate()
        self._report(DownloadProgress(self._high_water, max(self.num_total, 0), rate, stage, note))

    def _rate(self) -> float:
        if not self._samples:
            return 0.0
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0
