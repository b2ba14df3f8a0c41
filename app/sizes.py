"""Bytes and times as a person reads them."""

from __future__ import annotations

from storage.progress import DownloadProgress


def format_bytes(count: float) -> str:
    """Bytes in the largest fitting unit of 1000: `98 MB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def format_seconds(seconds: float) -> str:
    """A time left: `8 s`, `3 min`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_progress(progress: DownloadProgress | None) -> str:
    """`42 MB of 98 MB · 43% · 5 MB/s · 11 s left`, or why nothing arrives."""
    if progress is None:
        return "connecting"
    parts = [f"{format_bytes(progress.num_done)} of {format_bytes(progress.num_total)}"]
    parts.append(f"{progress.fraction:.0%}")
    if progress.stage != "downloading":
        parts.append(f"{progress.stage}: {progress.note}" if progress.note else progress.stage)
    elif progress.seconds_left is not None:
        parts.append(f"{format_bytes(progress.bytes_per_s)}/s")
        parts.append(f"{format_seconds(progress.seconds_left)} left")
    return " · ".join(parts)
