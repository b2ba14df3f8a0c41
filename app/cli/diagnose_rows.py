"""`foretell diagnose rows`: every way of computing a row against decoding one row at a time (S62)."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.bench_report import prompts
from app.cli.diagnose import check_tokens, load
from app.cli.output import USAGE, CommandFailed, say, say_json
from app.wiring import Wiring
from engine.contracts import LoadedModel

if TYPE_CHECKING:
    from engine.diagnostics import RowClass

NUM_TOKENS = 96
"""Of the text that is forwarded when no tokens are given."""


def run_rows(args: argparse.Namespace, wiring: Wiring) -> None:
    """Print the largest error and every flipped argmax of each row class, under teacher forcing.

    Raises: CommandFailed (failure) when rows differ by more than the backend promises.
    """
    from engine.diagnostics import check_rollbacks, check_rows, plain_rows, row_tolerance

    model = load(args, wiring)
    token_ids = list(args.tokens) or model.tokenizer.encode(prompts()["quote_file"])[:NUM_TOKENS]
    _check_range(args.rows, token_ids, model)
    plain = plain_rows(model, token_ids)
    classes = [
        *check_rows(model, token_ids, args.rows, plain),
        *check_rollbacks(model, token_ids, args.rows - 1, plain),
    ]
    tolerance = row_tolerance(model.executable.caps)
    largest = max(row_class.max_error for row_class in classes)
    if args.json:
        say_json(_report(model, token_ids, tolerance, classes))
    else:
        _print(model, token_ids, classes)
    if not largest <= tolerance:
        raise CommandFailed(
            f"rows differ from one-row decoding by up to {largest:.1e}, {tolerance:.0e} is allowed",
            hint="answers with drafting may differ here: use --no-spec, and report this machine",
        )


def _check_range(num_rows: int, token_ids: Sequence[int], model: LoadedModel) -> None:
    """Raises: CommandFailed (usage) naming the number that is out of range."""
    check_tokens(token_ids, model.vocab_size)
    most = min(model.executable.caps.max_rows, len(token_ids) - 1)
    if not 2 <= num_rows <= most:
        raise CommandFailed(
            f"rows {num_rows} is out of range for {len(token_ids)} tokens",
            hint=f"use 2 to {most}" if most >= 2 else "give at least 3 tokens",
            exit_code=USAGE,
        )


def _report(
    model: LoadedModel, token_ids: Sequence[int], tolerance: float, classes: Sequence[RowClass]
) -> dict[str, object]:
    caps = model.executable.caps
    return {
        "model": model.name,
        "backend": caps.name,
        "device": caps.device,
        "tokens": len(token_ids),
        "tolerance": tolerance,
        "classes": [
            {
                "name": row_class.name,
                "compared": len(row_class.errors),
                "max_error": row_class.max_error,
                "flips": [dataclasses.asdict(flip) for flip in row_class.flips],
            }
            for row_class in classes
        ],
    }


def _print(model: LoadedModel, token_ids: Sequence[int], classes: Sequence[RowClass]) -> None:
    caps = model.executable.caps
    say(f"{model.name} on {caps.name} ({caps.device}), {len(token_ids)} tokens")
    say(f"{'row class':24}{'compared':>10}{'largest error':>16}{'flips':>8}")
    for row_class in classes:
        say(
            f"{row_class.name:24}{len(row_class.errors):10d}{row_class.max_error:16.1e}"
            f"{len(row_class.flips):8d}"
        )
    for row_class in classes:
        for flip in row_class.flips:
            say(
                f"{row_class.name}, position {flip.position}: token {flip.other_id} instead of "
                f"{flip.plain_id}, margin {flip.margin:.1e}"
            )
