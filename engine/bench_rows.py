"""Milliseconds per forward at 1..N rows: what a verify costs beside a plain step (ledger S64).

Speaks to an executable directly. Row counts alternate round by round, so that a slow second of the
machine hits all of them; the figure is the median over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from backends.base import Executable, Segment


@dataclass(frozen=True, slots=True)
class RowCost:
    """One row count."""

    num_rows: int
    step_ms: float
    """Median over the rounds."""
    fastest_ms: float
    phase_ms: dict[str, float]
    """Share of each phase of the median step, where the executable counts phases."""


def measure_rows(
    executable: Executable,
    token_ids: Sequence[int],
    *,
    row_counts: Sequence[int],
    rounds: int,
    clock: Callable[[], float],
) -> list[RowCost]:
    """Time forwards of each row count on top of `token_ids` as context.

    State: none kept; the cache is rewound after every forward and released at the end.
    """
    cache = executable.new_cache()
    executable_rows = executable.caps.max_rows
    for start in range(0, len(token_ids), executable_rows):
        chunk = token_ids[start : start + executable_rows]
        executable.forward([Segment(chunk, cache)], want_logits="none")
    length = cache.length
    times: dict[int, list[float]] = {count: [] for count in row_counts}
    phases: dict[int, list[dict[str, float]]] = {count: [] for count in row_counts}
    profile: Callable[[], dict[str, float]] = getattr(executable, "phase_ms", dict)
    for _ in range(rounds):
        for count in row_counts:
            rows = [token_ids[i % len(token_ids)] for i in range(count)]
            start_s = clock()
            executable.forward([Segment(rows, cache)])
            times[count].append((clock() - start_s) * 1e3)
            phases[count].append(profile())
            cache.rewind_to(length)
    return [
        RowCost(
            num_rows=count,
            step_ms=median(times[count]),
            fastest_ms=min(times[count]),
            phase_ms=_median_phases(phases[count]),
        )
        for count in row_counts
    ]


def _median_phases(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: median(sample.get(name, 0.0) for sample in samples) for name in names}
