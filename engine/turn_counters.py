"""Counters of one turn, over however many drafters served it. Counts only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.events import TurnStats

if TYPE_CHECKING:
    from engine.speculative.execution import SpeculativeExecution
    from engine.speculative.stats import SpeculationStats


@dataclass(slots=True)
class TurnCounters:
    """Times in seconds; turned into the milliseconds of `TurnStats` at the end."""

    reused_tokens: int = 0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    """From the submit to the first emitted token."""
    last_token_s: float = 0.0
    plain_steps: int = 0
    """Decode steps that no drafter saw: batched, or with speculation off."""
    plain_s: float = 0.0
    has_token: bool = False
    dropped: list[SpeculationStats] = field(default_factory=list)
    """What drafters did that served an earlier part of the turn."""
    governor: str = ""
    """The governor's line when the last drafter was dropped."""

    def note_token(self, elapsed_s: float) -> None:
        """A token was emitted this long after the submit."""
        if not self.has_token:
            self.first_token_s, self.has_token = elapsed_s, True
        self.last_token_s = elapsed_s

    def absorb(self, execution: SpeculativeExecution) -> None:
        """Keep the counters of a drafter that is dropped."""
        self.dropped.append(execution.stats)
        self.governor = execution.governor_line

    def to_stats(self, base: TurnStats, armed: SpeculativeExecution | None) -> TurnStats:
        """`base` with everything counted here and by the armed drafter filled in."""
        served = [*self.dropped, *([armed.stats] if armed else [])]
        latest = served[-1] if served else None
        return replace(
            base,
            reused_tokens=self.reused_tokens,
            prefill_ms=self.prefill_s * 1e3,
            ttft_ms=self.first_token_s * 1e3,
            decode_ms=(self.last_token_s - self.first_token_s) * 1e3,
            draft_n=sum(stats.draft_n for stats in served),
            draft_n_accepted=sum(stats.draft_n_accepted for stats in served),
            accepted_per_position=_sum_columns([s.accepted_per_position for s in served]),
            verify_steps=sum(stats.verify_steps for stats in served),
            plain_steps=self.plain_steps + sum(stats.plain_steps for stats in served),
            parked_steps=sum(stats.parked_steps for stats in served),
            phase_ms=self._phase_ms(served),
            governor=(armed.governor_line if armed else "") or self.governor,
            governor_state=armed.governor_state if armed else "off",
            algorithm=latest.algorithm if latest else None,
        )

    def _phase_ms(self, served: list[SpeculationStats]) -> dict[str, float]:
        total = {"plain": self.plain_s * 1e3} if self.plain_steps else {}
        for stats in served:
            for phase, elapsed_ms in stats.phase_ms.items():
                total[phase] = total.get(phase, 0.0) + elapsed_ms
        return total


def _sum_columns(rows: list[list[int]]) -> tuple[int, ...]:
    width = max((len(row) for row in rows), default=0)
    return tuple(sum(row[i] for row in rows if i < len(row)) for i in range(width))
