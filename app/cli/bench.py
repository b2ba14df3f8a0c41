"""`foretell bench`: paired measurements on this machine, printed as they come and as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import time
from importlib.resources import files
from statistics import median

from app.cli.flags import load_command, settings_from
from app.cli.headless import HeadlessEngine
from app.cli.output import USAGE, CommandFailed, note, say, say_json
from app.machine import machine_name, measure_busy
from app.settings import Settings
from app.wiring import Wiring
from engine.bench import (
    BenchReport,
    PairedFigure,
    Scenario,
    TurnSample,
    agent_scenario,
    recommend,
    run_paired,
    spec_scenario,
)
from engine.bench_rows import RowCost, measure_rows

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
ROWS_CONTEXT = 256
ROWS_ROUNDS = 15


def run_bench(args: argparse.Namespace, wiring: Wiring) -> None:
    """Dispatch. A busy machine is said before anything is measured (ledger S65)."""
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


def prompts() -> dict[str, str]:
    """The bench texts by name."""
    folder = files("assets") / "bench_prompts"
    return {
        item.name.removesuffix(".txt"): item.read_text("utf-8")
        for item in folder.iterdir()
        if item.name.endswith(".txt")
    }


def run_scenario(
    args: argparse.Namespace, wiring: Wiring, settings: Settings, scenario: Scenario
) -> None:
    """Play a conversation in both modes and report the pairs. Ctrl-C keeps what is done."""
    with HeadlessEngine(lambda on_event: wiring.start_engine(settings, on_event)) as engine:
        info = engine.load(load_command(settings, wiring))
        report = BenchReport(scenario=scenario.name, model=info.name)
        seconds = _budget_s(args.passes, scenario)
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
    figures = report.figures()
    if args.json:
        say_json(report_dict(report, figures))
        return
    for line in table(figures):
        say(line)
    if scenario.name == "spec":
        say(recommend(figures, window=settings.speculation.window))


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
    bandwidth = wiring.read_bandwidth_gb_s(settings)
    floor_ms = model.executable.weight_bytes / bandwidth / 1e6
    if args.json:
        say_json(
            {
                "model": model.name,
                "machine": machine_name(),
                "bandwidth_gb_s": bandwidth,
                "floor_ms": floor_ms,
                "rows": [dataclasses.asdict(cost) for cost in costs],
            }
        )
        return
    say(f"{model.name}, {machine_name()}; {bandwidth:.1f} GB/s read, floor {floor_ms:.2f} ms")
    for line in rows_table(costs, floor_ms):
        say(line)


def rows_table(costs: list[RowCost], floor_ms: float) -> list[str]:
    """Aligned text."""
    phases = list(dict.fromkeys(name for cost in costs for name in cost.phase_ms))
    lines = ["rows     ms  vs 1 row  of floor  " + "  ".join(f"{name:>9}" for name in phases)]
    one_ms = costs[0].step_ms
    for cost in costs:
        shares = "  ".join(f"{cost.phase_ms.get(name, 0.0):9.2f}" for name in phases)
        lines.append(
            f"{cost.num_rows:4d} {cost.step_ms:6.2f}  {cost.step_ms / one_ms:7.2f}x"
            f"  {floor_ms / cost.step_ms:8.0%}  {shares}"
        )
    return lines


def table(figures: list[PairedFigure]) -> list[str]:
    """Aligned text: a row per turn."""
    lines = [
        "turn           plain     spec    ratio  (lowest..highest)  first token  accepted/drafted"
        "  streams"
    ]
    for figure in figures:
        spread = f"({min(figure.ratios):.2f}..{max(figure.ratios):.2f})"
        lines.append(
            f"{figure.turn:12} {figure.plain_tok_s:6.1f}/s {figure.spec_tok_s:6.1f}/s"
            f" {figure.ratio:7.2f}x {spread:>18} {median(figure.ttft_ratios):11.2f}x"
            f"  {figure.draft_n_accepted:8d}/{figure.draft_n:<7d}"
            f"  {'equal' if figure.streams_match else 'DIFFERENT'}"
        )
    return lines


def report_dict(report: BenchReport, figures: list[PairedFigure]) -> dict[str, object]:
    """The report as plain values, for JSON and for storing."""
    return {
        "scenario": report.scenario,
        "model": report.model,
        "machine": machine_name(),
        "figures": [{**dataclasses.asdict(figure), "ratio": figure.ratio} for figure in figures],
        "samples": [
            {
                "turn": sample.turn,
                "pass": sample.pass_index,
                "is_speculative": sample.is_speculative,
                "decode_tok_s": sample.stats.decode_tok_s,
                "prefill_tok_s": sample.stats.prefill_tok_s,
                "ttft_ms": sample.stats.ttft_ms,
                "num_tokens": len(sample.token_ids),
            }
            for sample in report.samples
        ],
    }


def _budget_s(passes: int, scenario: Scenario) -> float:
    return 2 * passes * sum(turn.max_tokens for turn in scenario.turns) / 100


def _note_sample(sample: TurnSample) -> None:
    mode = "spec " if sample.is_speculative else "plain"
    note(
        f"pass {sample.pass_index + 1} {mode} {sample.turn:12} {len(sample.token_ids):4d} tokens"
        f" {sample.stats.decode_tok_s:7.1f} tok/s  first {sample.stats.ttft_ms:6.0f} ms"
        f"  {sample.stats.governor}"
    )
