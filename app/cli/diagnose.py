"""`foretell diagnose`: logits of every row, a decoded stream with its cache checked, drafts, rows.

Runs the engine on this thread, without a screen and without a host, on token ids as they are given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.ask import REQUEST, stats_dict
from app.cli.flags import load_command, settings_from
from app.cli.output import BAD_MODEL, MISSING, USAGE, CommandFailed, failed, note, say_json
from app.wiring import Wiring
from backends.base import Segment
from engine.commands import SubmitTurn
from engine.contracts import LoadedModel
from engine.errors import EngineError
from engine.events import EngineEvent, ModelFailed, TurnFailed, TurnFinished
from engine.speculative.options import MAX_WINDOW

if TYPE_CHECKING:
    from engine.engine import InferenceEngine

FORCED_DRAFTER = "forced"
"""The name `--drafter` is registered under."""


def run_diagnose(args: argparse.Namespace, wiring: Wiring) -> None:
    """Dispatch the verb."""
    from app.cli.diagnose_rows import run_rows

    verbs = {"logits": run_logits, "stream": run_stream, "draft": run_draft, "rows": run_rows}
    verbs[args.verb](args, wiring)


def run_logits(args: argparse.Namespace, wiring: Wiring) -> None:
    """Write `logits [T, V]` float32, row i after tokens[:i+1]."""
    import numpy as np

    model = load(args, wiring)
    rows = model.executable.caps.max_rows if args.rows is None else args.rows
    if not 1 <= rows <= model.executable.caps.max_rows:
        raise CommandFailed(
            f"rows {rows} is out of range",
            hint=f"use 1 to {model.executable.caps.max_rows}",
            exit_code=USAGE,
        )
    cache = model.executable.new_cache()
    parts = []
    for start in range(0, len(args.tokens), rows):
        chunk = args.tokens[start : start + rows]
        output = model.executable.forward([Segment(chunk, cache)])
        assert output.logits is not None, "all logits were asked for"
        parts.append(output.logits.copy())
    _write_npz(args.out, logits=np.concatenate(parts))


def run_stream(args: argparse.Namespace, wiring: Wiring) -> None:
    """Print one JSON object: token_ids, finish_reason, stats, cache_len, cache_ok."""
    from engine.diagnostics import cold_check

    settings = settings_from(args, wiring.settings)
    events: list[EngineEvent] = []
    engine = _engine(args, replace(wiring, settings=settings), events)
    turn = SubmitTurn(
        request_id=REQUEST,
        chat_id=REQUEST,
        prompt=args.tokens,
        sampling=settings.sampling.over({}),
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        stop_ids=tuple(args.stop_ids),
        context_policy="fail",
    )
    finished = _run(engine, turn, events)
    holder, model = engine.holder(REQUEST), engine.model
    assert holder is not None, "a finished turn leaves its holder"
    assert model is not None, "a turn ran on it"
    ids = list(finished.token_ids)
    say_json(
        {
            "token_ids": ids,
            "finish_reason": finished.finish_reason,
            "stats": stats_dict(finished.stats),
            "cache_len": holder.length,
            "cache_ok": cold_check(model, holder, list(args.tokens), ids),
        }
    )


def run_draft(args: argparse.Namespace, wiring: Wiring) -> None:
    """Write what a trained drafter proposes after the tokens."""
    from engine.diagnostics import draft_after

    if not Path(args.draft_model).is_file():
        raise CommandFailed(
            f"there is no file {args.draft_model}", hint="check --draft-model", exit_code=MISSING
        )
    model = load(args, wiring)
    if model.draft_head is None:
        reason = model.draft_head_refusal or "the file holds no drafter"
        raise CommandFailed(f"{args.draft_model}: {reason}", exit_code=BAD_MODEL)
    ids, logits, confidences = draft_after(model, list(args.tokens))
    _write_npz(args.out, draft_ids=ids, draft_logits=logits, confidences=confidences)


def load(args: argparse.Namespace, wiring: Wiring) -> LoadedModel:
    """The named model. Raises: CommandFailed (usage) for a token outside its vocabulary."""
    settings = settings_from(args, wiring.settings)
    command = load_command(settings, wiring)
    model = wiring.loader(settings)(
        command.path,
        name=command.name,
        speculation=command.speculation,
        progress=lambda _stage, _fraction: None,
    )
    check_tokens(args.tokens, model.vocab_size)
    return model


def check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises: CommandFailed (usage) naming the id that is outside the vocabulary."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise CommandFailed(
                f"token {token_id} is outside the vocabulary",
                hint=f"use 0 to {vocab_size - 1}",
                exit_code=USAGE,
            )


def _engine(args: argparse.Namespace, wiring: Wiring, events: list[EngineEvent]) -> InferenceEngine:
    """A synchronous engine with the model loaded and, if asked, a forced drafter."""
    from engine.engine import InferenceEngine
    from engine.speculative.drafters import drafter_factory
    from engine.speculative.registry import default_registry

    registry = default_registry()
    command = load_command(wiring.settings, wiring)
    if args.drafter is not None:
        plain = _plain_ids(args, wiring) if not args.drafter.startswith("garbage") else []
        try:
            factory = drafter_factory(args.drafter, list(args.tokens), plain)
        except EngineError as error:
            raise CommandFailed(str(error), hint=error.hint, exit_code=USAGE) from error
        registry.register(FORCED_DRAFTER, factory)
        # A forced pattern is not up to the governor.
        forced = replace(command.speculation, algorithm=FORCED_DRAFTER, use_governor=False)
        command = replace(command, speculation=forced)
    engine = InferenceEngine(wiring.loader(wiring.settings), events.append, registry=registry)
    engine.apply(command)
    for event in events:
        if isinstance(event, ModelFailed):
            raise failed(event.error)
    assert engine.model is not None, "the load neither failed nor succeeded"
    check_tokens(args.tokens, engine.model.vocab_size)
    return engine


def _plain_ids(args: argparse.Namespace, wiring: Wiring) -> list[int]:
    """The stream without drafting and past every stop: what oracle and script drafters propose.

    A drafter that knew of the stops could not put one inside an accepted window.
    """
    settings = wiring.settings
    plain = replace(settings, speculation=replace(settings.speculation, is_enabled=False))
    plain_args = argparse.Namespace(**{**vars(args), "drafter": None})
    events: list[EngineEvent] = []
    engine = _engine(plain_args, replace(wiring, settings=plain), events)
    turn = SubmitTurn(
        REQUEST,
        REQUEST,
        args.tokens,
        settings.sampling.over({}),
        max_tokens=None if args.max_tokens is None else args.max_tokens + MAX_WINDOW,
    )
    return list(_run(engine, turn, events).token_ids)


def _run(engine: InferenceEngine, turn: SubmitTurn, events: list[EngineEvent]) -> TurnFinished:
    events.clear()
    engine.apply(turn)
    while engine.step():
        pass
    for event in events:
        match event:
            case TurnFailed(error=error):
                raise failed(error)
            case TurnFinished():
                return event
    raise AssertionError("a turn ends with TurnFinished or TurnFailed")


def _write_npz(out: str, **arrays: object) -> None:
    """Write the file whole or not at all. Raises: OSError naming the path."""
    import numpy as np

    target = Path(out)
    draft = target.with_name(target.name + ".new")
    try:
        with draft.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot be written: {error.strerror or error}", out) from error
    note(f"wrote {target}")
