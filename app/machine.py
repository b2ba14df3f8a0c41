"""Whether this machine is quiet enough for a measurement, and what it is."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import psutil

BUSY_SHARE = 0.15
"""Share of all cores other programs may use before a figure is called doubtful: on two cores one
background process at 30 % already moved paired ratios by more than their usual spread."""


@dataclass(frozen=True, slots=True)
class Busy:
    """What other programs did while this one waited."""

    share: float
    """Of all cores, 0 to 1."""
    heaviest: str
    """Name of the process that used most, or empty."""

    @property
    def warning(self) -> str | None:
        """One line, or None on a quiet machine (ledger S65)."""
        if self.share < BUSY_SHARE:
            return None
        who = f" ({self.heaviest} most of all)" if self.heaviest else ""
        return (
            f"this machine is busy: other programs use {self.share:.0%} of its cores{who}; "
            "figures will be off"
        )


def measure_busy(interval_s: float = 0.5) -> Busy:
    """Look for `interval_s` at what the other processes use; this one sleeps meanwhile."""
    processes = [p for p in psutil.process_iter(["pid", "name"]) if p.pid != os.getpid()]
    for process in processes:
        _cpu_percent(process)
    total = psutil.cpu_percent(interval_s) / 100
    used = [(_cpu_percent(process), process.info["name"] or "") for process in processes]
    percent, name = max(used, default=(0.0, ""))
    return Busy(share=total, heaviest=name if percent > 0.0 else "")


def machine_name() -> str:
    """Processor, cores and system, for a stored bench run."""
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return f"{_processor()}, {cores} cores, {platform.system()} {platform.machine()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "processor"


def _cpu_percent(process: psutil.Process) -> float:
    try:
        return float(process.cpu_percent(None))
    except psutil.Error:
        return 0.0
