"""`foretell ask`, and a bare `foretell` whose stdin is no terminal: one prompt, one answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from app.cli.flags import sampling_from, settings_from
from app.cli.headless import HeadlessEngine
from app.cli.output import USAGE, CommandFailed, is_terminal, note, say, say_json
from app.errors import EARLY_ENDS
from app.settings import THINK, Settings
from app.thinking import SplitAnswer, find_opening, split_thinking
from app.wiring import Wiring
from engine.commands import Message, SubmitTurn
from engine.events import ModelInfo, Notice, TextDelta, TurnFinished, TurnStarted, TurnStats

REQUEST = "ask"


def run_ask(args: argparse.Namespace, wiring: Wiring) -> None:
    """Answer the prompt on stdout. Raises: CommandFailed with the exit code of the failure."""
    settings = settings_from(args, wiring.settings)
    prompt = _prompt(args)
    found = wiring.find_model(settings.model)
    turn = _turn(args, settings, prompt, wiring.library.recommended(found))
    printer = AnswerPrinter(
        is_split=not args.raw,
        shows_thinking=not args.json and is_terminal(sys.stderr),
        shows_answer=not (args.json or args.no_stream),
    )
    with HeadlessEngine(lambda on_event: wiring.start_engine(settings, on_event)) as engine:
        info = engine.load(found.load_command(settings))
        if args.think is not None and not (args.raw or info.has_thinking_switch):
            note(f"foretell: {info.name} has no switch for thinking")
        finished = _answer(engine, turn, printer)
    if args.json:
        say_json(_document(info, finished, printer.split))
    elif args.no_stream:
        say(printer.split.answer)
    if finished.finish_reason in ("context", "repetition"):  # a limit of tokens was asked for
        note(f"foretell: {EARLY_ENDS[finished.finish_reason]}")
    if args.stats:
        note(stats_line(finished.stats))


class AnswerPrinter:
    """Prints an answer as it comes: the answer on stdout, the thinking before it on stderr."""

    def __init__(self, *, is_split: bool, shows_thinking: bool, shows_answer: bool) -> None:
        self._is_split = is_split
        """Whether thinking is told apart; a raw prompt's text is taken as it is."""
        self._shows_thinking = shows_thinking
        self._shows_answer = shows_answer
        self._text = ""
        self._thought = self._answered = ""
        """What was printed."""

    @property
    def split(self) -> SplitAnswer:
        """The answer so far in its two parts."""
        return split_thinking(self._text) if self._is_split else SplitAnswer("", self._text, False)

    def take(self, text: str) -> None:
        """Print what is new. State: text and what was printed of it."""
        self._text += text
        split = self.split
        if self._shows_thinking and not self._answered:
            note(split.thinking[len(self._thought) :], end="")
            self._thought = split.thinking
        if self._thought and not split.is_thinking:
            note("\n")
            self._thought, self._shows_thinking = "", False
        if self._shows_answer:
            if not split.answer.startswith(self._answered):  # it was a thought, and nothing said so
                say()
                self._answered = ""
            say(split.answer[len(self._answered) :], end="")
            self._answered = split.answer

    def end(self) -> None:
        """The answer is whole."""
        if self._thought:
            note("")
        if self._shows_answer:
            say()


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


def _turn(
    args: argparse.Namespace, settings: Settings, prompt: str, recommended: Mapping[str, float]
) -> SubmitTurn:
    system = args.system if args.system is not None else settings.system_prompt
    messages = (Message("system", system), Message("user", prompt))
    return SubmitTurn(
        request_id=REQUEST,
        chat_id=REQUEST,
        prompt=prompt if args.raw else messages if system else messages[1:],
        sampling=sampling_from(args, settings, recommended),
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        stop_on_repetition=True,
        think=THINK[settings.think],
        context_policy="fail",
    )


def _answer(engine: HeadlessEngine, turn: SubmitTurn, printer: AnswerPrinter) -> TurnFinished:
    """Print as it comes; returns the finished turn."""
    num_taken = 0
    for event in engine.answer(turn):
        match event:
            case TurnStarted():
                printer.take(find_opening(event.prompt_tail))
            case TextDelta(text=text):
                printer.take(text)
                num_taken += len(text)
            case Notice(text=text):
                note(text)
            case TurnFinished():
                printer.take(event.text[num_taken:])
                printer.end()
                return event
    raise AssertionError("a turn ends with TurnFinished")


def _document(info: ModelInfo, finished: TurnFinished, split: SplitAnswer) -> dict[str, object]:
    stats = finished.stats
    return {
        "model": info.name,
        "text": split.answer,
        "thinking": split.thinking,
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
