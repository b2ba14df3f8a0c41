"""What the benches read and what they found: prompts, time, and reports as plain values."""

from __future__ import annotations

import dataclasses
from importlib.resources import files

from app.machine import machine_name
from engine.bench import BenchReport, PairedFigure, Scenario


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
