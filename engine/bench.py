"""Paired runs of fixed conversations, plain and speculative, alternating in place.

Speaks commands and events only, so the command line and the bench screen run the same code over
their own `TurnRunner`. A figure is never a single run: each pass runs a conversation in both modes,
the order alternates, and what is reported is the ratio of the pairs with its spread (ledger S65).
Sources of the scenarios: the four turns of ledger S60; S61 for agent turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from engine.commands import Message, SubmitTurn
from engine.events import TurnFinished, TurnStats
from engine.sampling_params import SamplingParams
from engine.speculative.options import SpeculationOptions

GREEDY = SamplingParams(temperature=0.0)
PAYS_FROM = 1.1
"""Median gain when quoting from which drafting is worth having on."""
COSTS_BELOW = 0.97
"""Ratio on prose below which drafting costs what a person would notice."""


class TurnRunner(Protocol):
    """Runs one turn at a time on the loaded model."""

    def run_turn(self, turn: SubmitTurn) -> TurnFinished:
        """Answer a turn, deltas muted. Raises what the front end raises on failure or Esc."""

    def update_speculation(self, options: SpeculationOptions) -> None:
        """Switch the engine's policy in place; returns when it took effect."""

    def forget(self, chat_id: str) -> None:
        """Release a chat's holder."""


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """One message of a scenario."""

    name: str
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A conversation that is played from the start in each mode."""

    name: str
    turns: tuple[BenchTurn, ...]
    system: str = ""


@dataclass(frozen=True, slots=True)
class TurnSample:
    """One turn of one pass in one mode."""

    turn: str
    pass_index: int
    is_speculative: bool
    stats: TurnStats
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PairedFigure:
    """Speculative against plain over the passes of one turn."""

    turn: str
    plain_tok_s: float
    """Median decode rate, tokens per second."""
    spec_tok_s: float
    ratios: tuple[float, ...]
    """Speculative over plain decode rate, one per pass."""
    ttft_ratios: tuple[float, ...]
    """Speculative over plain time to first token, one per pass; below 1 is faster."""
    draft_n: int
    draft_n_accepted: int
    verify_steps: int
    accepted_per_position: tuple[int, ...]
    governor: str
    streams_match: bool

    @property
    def ratio(self) -> float:
        """Median of the pairs' ratios."""
        return median(self.ratios)


@dataclass(slots=True)
class BenchReport:
    """What a run found, also when it was stopped half way."""

    scenario: str
    model: str
    samples: list[TurnSample] = field(default_factory=list)

    def figures(self) -> list[PairedFigure]:
        """One figure per turn with at least one whole pair; an answer of one token has no rate."""
        turns = dict.fromkeys(sample.turn for sample in self.samples)
        return [figure for turn in turns if (figure := self._figure(turn))]

    def _figure(self, turn: str) -> PairedFigure | None:
        by_mode: dict[bool, dict[int, TurnSample]] = {False: {}, True: {}}
        for sample in self.samples:
            if sample.turn == turn:
                by_mode[sample.is_speculative][sample.pass_index] = sample
        pairs = [
            (plain, by_mode[True][i])
            for i, plain in by_mode[False].items()
            if i in by_mode[True] and plain.stats.decode_tok_s > 0.0
        ]
        if not pairs:
            return None
        last = pairs[-1][1].stats
        return PairedFigure(
            turn=turn,
            plain_tok_s=median(plain.stats.decode_tok_s for plain, _ in pairs),
            spec_tok_s=median(spec.stats.decode_tok_s for _, spec in pairs),
            ratios=tuple(s.stats.decode_tok_s / p.stats.decode_tok_s for p, s in pairs),
            ttft_ratios=tuple(s.stats.ttft_ms / p.stats.ttft_ms for p, s in pairs),
            draft_n=last.draft_n,
            draft_n_accepted=last.draft_n_accepted,
            verify_steps=last.verify_steps,
            accepted_per_position=last.accepted_per_position,
            governor=last.governor,
            streams_match=all(p.token_ids == s.token_ids for p, s in pairs),
        )


def run_paired(
    runner: TurnRunner,
    scenario: Scenario,
    report: BenchReport,
    *,
    passes: int,
    options: SpeculationOptions,
    on_sample: Callable[[TurnSample], None] = lambda _: None,
) -> None:
    """Play the scenario `passes` times in each mode, the first mode alternating.

    State: samples are appended to `report` as they come, so a stopped run keeps what is done; the
    engine's policy is `options` again at the end.
    """
    try:
        for index in range(passes):
            for is_speculative in (False, True) if index % 2 == 0 else (True, False):
                runner.update_speculation(dataclasses.replace(options, is_enabled=is_speculative))
                for sample in _play(runner, scenario, index, is_speculative):
                    report.samples.append(sample)
                    on_sample(sample)
    finally:
        runner.update_speculation(options)


def _play(
    runner: TurnRunner, scenario: Scenario, index: int, is_speculative: bool
) -> Iterable[TurnSample]:
    chat_id = f"bench-{scenario.name}-{index}-{int(is_speculative)}"
    messages = [Message("system", scenario.system)] if scenario.system else []
    try:
        for number, turn in enumerate(scenario.turns):
            messages.append(Message("user", turn.prompt))
            finished = runner.run_turn(
                SubmitTurn(
                    request_id=f"{chat_id}-{number}",
                    chat_id=chat_id,
                    prompt=tuple(messages),
                    sampling=GREEDY,
                    max_tokens=turn.max_tokens,
                )
            )
            messages.append(Message("assistant", finished.text))
            yield TurnSample(turn.name, index, is_speculative, finished.stats, finished.token_ids)
    finally:
        runner.forget(chat_id)


def spec_scenario(prompts: dict[str, str]) -> Scenario:
    """The four turns of S60. `prompts` by name: one_word, prose, quote_file, quote_answer."""
    lengths = {"one_word": 16, "prose": 160, "quote_file": 200, "quote_answer": 200}
    return Scenario(
        name="spec",
        turns=tuple(BenchTurn(name, prompts[name].strip(), n) for name, n in lengths.items()),
    )


def agent_scenario(prompts: dict[str, str]) -> Scenario:
    """Turns as a tool-using program makes them: long shared prompt, JSON in, JSON out (S61)."""
    turns = [part.strip() for part in prompts["agent_turns"].split("\n---\n")]
    return Scenario(
        name="agent",
        system=prompts["agent_system"].strip(),
        turns=tuple(BenchTurn(f"turn_{i + 1}", text, 96) for i, text in enumerate(turns)),
    )


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What the figures of the four turns advise."""

    is_enabled: bool | None
    """Whether to draft; None when too little was measured."""
    window: int | None
    """Drafts per step that were measured; None when the window was chosen per step."""
    text: str
    """The same in a sentence a person can act on."""


def recommend(figures: Sequence[PairedFigure], *, window: int | None) -> Recommendation:
    """What to set after a run with this window (None: chosen per step)."""
    ratios = {figure.turn: figure.ratio for figure in figures}
    quoting = [ratio for turn, ratio in ratios.items() if turn.startswith("quote")]
    prose = ratios.get("prose")
    if not quoting or prose is None:
        too_little = "Stopped before there was enough to recommend anything."
        return Recommendation(None, window, too_little)
    gain = median(quoting)
    is_worth_it = gain >= PAYS_FROM
    if not is_worth_it:
        advice = f"gains nothing ({gain:.2f}x when quoting): switch it off"
    elif prose < COSTS_BELOW:
        advice = (
            f"gains {gain:.1f}x when quoting and costs {1 - prose:.0%} on prose: "
            "on for editing and quoting, off for free writing"
        )
    else:
        advice = f"gains {gain:.1f}x when quoting and costs nothing on prose: leave it on"
        advice += f", window {window}" if window else ""
    return Recommendation(is_worth_it, window, f"On this machine speculation {advice}.")
