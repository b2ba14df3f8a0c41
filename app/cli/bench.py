"""`foretell bench`: paired measurements on this machine, printed as they come and as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import time

from app.bench_report import MeasuredModel, budget_s, prompts, report_dict
from app.cli.flags import load_command, settings_from
from app.cli.headless import HeadlessEngine
from app.cli.kept_runs import keep_run, run_list, run_show, say_tables
from app.cli.output import USAGE, CommandFailed, note, say, say_json
from app.machine import machine_name, measure_busy
from app.settings import Settings
from app.wiring import Wiring
from engine.bench import (
    BenchReport,
    Scenario,
    TurnSample,
    agent_scenario,
    recommend,
    run_paired,
    spec_scenario,
)
from engine.bench_rows import measure_rows
from engine.contracts import LoadedModel

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
ROWS_CONTEXT = 256
ROWS_ROUNDS = 15


def run_bench(args: argparse.Namespace, wiring: Wiring) -> None:
    """Dispatch. A busy machine is said before anything is measured (ledger S65)."""
    if args.what in ("list", "show"):
        (run_list if args.what == "list" else run_show)(args, wiring)
        return
    if args.passes < 1:
        raise CommandFailed(
            f"passes {args.passes} is out of range", hint="use 1 or more", exit_code=USAGE
        )
    settings = settings_from(args, wiring.settings)
    if warning := measure_busy().warning:
        note(f"warning: {warning}")
    if args.what == "peers":
        from app.cli.peers import run_peers

        run_peers(args, wiring, settings)
    elif args.what == "concurrent":
        from app.cli.concurrent import run_concurrent

        run_concurrent(args, wiring, settings)
    elif args.what == "rows":
        run_rows(args, wiring, settings)
    else:
        scenario = spec_scenario(prompts()) if args.what == "spec" else agent_scenario(prompts())
        run_scenario(args, wiring, settings, scenario)


def run_scenario(
    args: argparse.Namespace, wiring: Wiring, settings: Settings, scenario: Scenario
) -> None:
    """Play a conversation in both modes and report the pairs.

    Raises: KeyboardInterrupt after Ctrl-C, when what was done is printed and kept.
    """
    is_stopped = False
    with HeadlessEngine(lambda on_event: wiring.start_engine(settings, on_event)) as engine:
        info = engine.load(load_command(settings, wiring))
        report = BenchReport(scenario=scenario.name, model=info.name)
        seconds = budget_s(args.passes, scenario)
        note(f"{info.name} on {info.device}; about {seconds:.0f} s at 100 tok/s; Ctrl-C stops")
        try:
            run_paired(
                engine,
                scenario,
                report,
                passes=args.passes,
                options=settings.speculation,
                on_sample=_note_sample,
            )
        except KeyboardInterrupt:
            note("stopped; what follows is what was done")
            is_stopped = True
    figures = report.figures()
    document = report_dict(report, figures)
    if figures:
        measured = MeasuredModel(info.name, info.content_hash, info.device)
        keep_run(wiring, settings, scenario.name, measured, document)
    if args.json:
        say_json(document)
    else:
        say_tables(scenario.name, document)
        if scenario.name == "spec":
            say(recommend(figures, window=settings.speculation.window).text)
    if is_stopped:
        raise KeyboardInterrupt


def run_rows(args: argparse.Namespace, wiring: Wiring, settings: Settings) -> None:
    """Milliseconds per step at 1..16 rows, per phase, and the share of the read bandwidth."""
    command = load_command(settings, wiring)
    model = wiring.loader(settings)(
        command.path, name=command.name, speculation=command.speculation, progress=lambda *_: None
    )
    token_ids = model.tokenizer.encode(prompts()["quote_file"] * 4)[:ROWS_CONTEXT]
    costs = measure_rows(
        model.executable,
        token_ids,
        row_counts=ROW_COUNTS,
        rounds=ROWS_ROUNDS,
        clock=time.perf_counter,
    )
    bandwidth, floor_ms = _read_floor(model, wiring, settings)
    report = {
        "model": model.name,
        "machine": machine_name(),
        "bandwidth_gb_s": bandwidth,
        "floor_ms": floor_ms,
        "rows": [dataclasses.asdict(cost) for cost in costs],
    }
    measured = MeasuredModel(model.name, model.content_hash, model.executable.caps.device)
    keep_run(wiring, settings, "rows", measured, report)
    if args.json:
        say_json(report)
        return
    floor = f"; {bandwidth:.1f} GB/s read, floor {floor_ms:.2f} ms" if floor_ms else ""
    say(f"{model.name} on {model.executable.caps.device}, {machine_name()}{floor}")
    say_tables("rows", report)


def _read_floor(
    model: LoadedModel, wiring: Wiring, settings: Settings
) -> tuple[float, float] | tuple[None, None]:
    """(GB/s, ms for one read of all weights); only the memory the CPU reads can be measured here."""
    if model.executable.caps.name != "native":
        return None, None
    bandwidth = wiring.read_bandwidth_gb_s(settings)
    return bandwidth, model.executable.weight_bytes / bandwidth / 1e6


def _note_sample(sample: TurnSample) -> None:
    mode = "spec " if sample.is_speculative else "plain"
    note(
        f"pass {sample.pass_index + 1} {mode} {sample.turn:12} {len(sample.token_ids):4d} tokens"
        f" {sample.stats.decode_tok_s:7.1f} tok/s  first {sample.stats.ttft_ms:6.0f} ms"
        f"  {sample.stats.governor}"
    )
