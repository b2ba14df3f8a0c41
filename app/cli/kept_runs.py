"""Bench runs on the command line: kept with the bytes, options and machine they ran on, and shown."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from app import bench_report
from app.bench_report import MeasuredModel
from app.bench_tables import summary_of, tables_of
from app.cli.output import note, say, say_json
from app.settings import Settings
from app.wiring import Wiring
from storage.bench_runs import BenchRun


def keep_run(
    wiring: Wiring,
    settings: Settings,
    kind: str,
    model: MeasuredModel,
    report: Mapping[str, Any],
) -> None:
    """Store a run and say how to see it again. Raises: StorageError."""
    with wiring.open_bench() as store:
        run = bench_report.keep_run(store, kind, model, settings.speculation, report)
    note(f"kept: foretell bench show {run.id}")


def run_list(args: argparse.Namespace, wiring: Wiring) -> None:
    """Every kept run, newest first. Raises: StorageError."""
    with wiring.open_bench() as store:
        runs = store.list_runs()
    if args.json:
        say_json([dataclasses.asdict(run) for run in runs])
        return
    for run in runs:
        summary = summary_of(run.kind, run.report)
        say(f"{run.id:4d}  {_when(run)}  {run.kind:10}  {run.model}: {summary}")


def run_show(args: argparse.Namespace, wiring: Wiring) -> None:
    """One run with its model, options and machine. Raises: StorageError when there is none."""
    with wiring.open_bench() as store:
        run = store.get(args.id)
    if args.json:
        say_json(dataclasses.asdict(run))
        return
    title = f"bench {run.kind}: {run.model}"
    say(f"# Foretell {title}\n" if args.markdown else title)
    for name, value in _facts(run).items():
        say(f"- {name}: {value}" if args.markdown else f"{name:8} {value}")
    say()
    say_tables(run.kind, run.report, as_markdown=args.markdown)


def say_tables(kind: str, report: Mapping[str, Any], *, as_markdown: bool = False) -> None:
    """Print a report, an empty line between its tables."""
    blocks = [t.markdown() if as_markdown else t.text() for t in tables_of(kind, report)]
    say("\n\n".join("\n".join(lines) for lines in blocks))


def _facts(run: BenchRun) -> dict[str, str]:
    return {
        "run": f"{run.id}, {_when(run)}",
        "machine": ", ".join(str(value) for value in run.machine.values()),
        "bytes": run.model_sha256 or "unknown",
        "options": ", ".join(f"{name} {value}" for name, value in run.options.items()),
    }


def _when(run: BenchRun) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at))
