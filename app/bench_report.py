"""What the benches read and what they found: prompts, time, and reports as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from app.machine import machine_name
from engine.bench import BenchReport, PairedFigure, Scenario
from engine.speculative.options import SpeculationOptions

if TYPE_CHECKING:
    from storage.bench_runs import BenchRun, BenchStore


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """What was measured."""

    name: str
    content_hash: str
    device: str


def keep_run(
    store: BenchStore,
    kind: str,
    model: MeasuredModel,
    options: SpeculationOptions,
    report: Mapping[str, Any],
) -> BenchRun:
    """Store a run with the bytes, options and machine it ran on. Raises: StorageError."""
    return store.save(
        kind,
        model=model.name,
        model_sha256=model.content_hash,
        options=dataclasses.asdict(options),
        machine={"name": machine_name(), "device": model.device},
        report=report,
    )


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


def report_dict(report: BenchReport, figures: Sequence[PairedFigure]) -> dict[str, object]:
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
