"""A bench as text, as plain values and as Markdown: one form for screen, command line and file."""

from __future__ import annotations

import dataclasses
from importlib.resources import files
from statistics import median

from app.machine import machine_name
from engine.bench import BenchReport, PairedFigure, Scenario, recommend
from engine.bench_rows import RowCost


def prompts() -> dict[str, str]:
    """The bench texts by name."""
    folder = files("assets") / "bench_prompts"
    return {
        item.name.removesuffix(".txt"): item.read_text("utf-8")
        for item in folder.iterdir()
        if item.name.endswith(".txt")
    }


def budget_s(passes: int, scenario: Scenario) -> float:
    """Seconds a run takes at 100 tokens per second: said before it starts."""
    return 2 * passes * sum(turn.max_tokens for turn in scenario.turns) / 100


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


def rows_table(costs: list[RowCost], floor_ms: float | None) -> list[str]:
    """Aligned text. `floor_ms` is the time one read of all weights takes, where it is known."""
    phases = list(dict.fromkeys(name for cost in costs for name in cost.phase_ms))
    lines = ["rows     ms  vs 1 row  of floor  " + "  ".join(f"{name:>9}" for name in phases)]
    one_ms = costs[0].step_ms
    for cost in costs:
        shares = "  ".join(f"{cost.phase_ms.get(name, 0.0):9.2f}" for name in phases)
        lines.append(
            f"{cost.num_rows:4d} {cost.step_ms:6.2f}  {cost.step_ms / one_ms:7.2f}x"
            f"  {f'{floor_ms / cost.step_ms:.0%}' if floor_ms else '-':>8}  {shares}"
        )
    return lines


def report_markdown(report: BenchReport, figures: list[PairedFigure]) -> str:
    """A report to paste somewhere: table, machine, recommendation."""
    lines = [
        f"# Foretell bench {report.scenario}: {report.model}",
        "",
        f"Machine: {machine_name()}",
        "",
        "| turn | plain tok/s | speculative tok/s | ratio (lowest..highest) | accepted/drafted |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.turn} | {f.plain_tok_s:.1f} | {f.spec_tok_s:.1f} | {f.ratio:.2f}x"
        f" ({min(f.ratios):.2f}..{max(f.ratios):.2f}) | {f.draft_n_accepted}/{f.draft_n} |"
        for f in figures
    ]
    return "\n".join([*lines, "", recommend(figures, window=None), ""])
