"""`foretell ask`, and a bare `foretell` whose stdin is no terminal: one prompt, one answer."""

from __future__ import annotations

import argparse
import sys

from app.cli.flags import load_command, sampling_from, settings_from
from app.cli.headless import HeadlessEngine
from app.cli.output import USAGE, CommandFailed, is_terminal, note, say, say_json
from app.errors import EARLY_ENDS
from app.settings import Settings
from app.wiring import Wiring
from engine.commands import Message, SubmitTurn
from engine.events import ModelInfo, Notice, TextDelta, TurnFinished, TurnStats

REQUEST = "ask"


def run_ask(args: argparse.Namespace, wiring: Wiring) -> None:
    """Answer the prompt on stdout. Raises: CommandFailed with the exit code of the failure."""
    settings = settings_from(args, wiring.settings)
    prompt = _prompt(args)
    turn = _turn(args, settings, prompt)
    with HeadlessEngine(lambda on_event: wiring.start_engine(settings, on_event)) as engine:
        info = engine.load(load_command(settings, wiring))
        finished = _stream(engine, turn, is_streaming=not (args.json or args.no_stream))
    if args.json:
        say_json(_document(info, finished))
    elif args.no_stream:
        say(finished.text)
    if finished.finish_reason in ("context", "repetition"):  # a limit of tokens was asked for
        note(f"foretell: {EARLY_ENDS[finished.finish_reason]}")
    if args.stats:
        note(stats_line(finished.stats))


def _prompt(args: argparse.Namespace) -> str:
    piped = "" if sys.stdin is None or is_terminal(sys.stdin) else sys.stdin.read()
    prompt = "\n".join(part for part in (piped.rstrip("\n"), args.prompt) if part)
    if not prompt.strip():
        raise CommandFailed(
            "nothing to answer: the prompt is empty",
            hint="give PROMPT or pipe text",
            exit_code=USAGE,
        )
    return prompt


def _turn(args: argparse.Namespace, settings: Settings, prompt: str) -> SubmitTurn:
    system = args.system if args.system is not None else settings.system_prompt
    messages = (Message("system", system), Message("user", prompt))
    return SubmitTurn(
        request_id=REQUEST,
        chat_id=REQUEST,
        prompt=prompt if args.raw else messages if system else messages[1:],
        sampling=sampling_from(args, settings),
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        stop_on_repetition=True,
        context_policy="fail",
    )


def _stream(engine: HeadlessEngine, turn: SubmitTurn, *, is_streaming: bool) -> TurnFinished:
    """Print deltas as they come; returns the finished turn."""
    printed = 0
    for event in engine.answer(turn):
        match event:
            case TextDelta(text=text) if is_streaming:
                say(text, end="")
                printed += len(text)
            case Notice(text=text):
                note(text)
            case TurnFinished():
                if is_streaming:
                    say(event.text[printed:])
                return event
    raise AssertionError("a turn ends with TurnFinished")


def _document(info: ModelInfo, finished: TurnFinished) -> dict[str, object]:
    stats = finished.stats
    return {
        "model": info.name,
        "text": finished.text,
        "token_ids": list(finished.token_ids),
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "finish_reason": finished.finish_reason,
        "stats": stats_dict(stats),
    }


def stats_dict(stats: TurnStats) -> dict[str, object]:
    """The counters every JSON output carries, under their contract names."""
    return {
        "prefill_ms": round(stats.prefill_ms, 3),
        "ttft_ms": round(stats.ttft_ms, 3),
        "decode_ms": round(stats.decode_ms, 3),
        "decode_tok_s": round(stats.decode_tok_s, 2),
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "accepted_per_position": list(stats.accepted_per_position),
        "verify_steps": stats.verify_steps,
        "plain_steps": stats.plain_steps,
        "parked_steps": stats.parked_steps,
        "phase_ms": {name: round(ms, 3) for name, ms in stats.phase_ms.items()},
        "governor": stats.governor,
        "algorithm": stats.algorithm,
    }


def stats_line(stats: TurnStats) -> str:
    """The per-turn line of a person (ledger S40)."""
    parts = [
        f"prompt={stats.prompt_tokens} reused={stats.reused_tokens}",
        f"prefill={stats.prefill_ms:.0f}ms ({stats.prefill_tok_s:.0f} tok/s)",
        f"ttft={stats.ttft_ms:.0f}ms",
        f"tokens={stats.completion_tokens} decode={stats.decode_tok_s:.1f} tok/s",
        f"drafted={stats.draft_n} accepted={stats.draft_n_accepted}",
    ]
    if stats.governor:
        parts.append(f"governor {stats.governor}")
    return " ".join(parts)
