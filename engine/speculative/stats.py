"""Counters and phase times of one turn (ledger S64). Counts only; it decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from engine.contracts import Clock

Phase = Literal["draft", "snapshot", "verify", "sample", "rollback", "catch_up", "plain"]


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did in one turn. completion = first token + accepted + all steps."""

    clock: Clock
    draft_n: int = 0
    """Drafts that were verified."""
    draft_n_accepted: int = 0
    """Verified drafts that were emitted, each followed by another token of the same step."""
    accepted_per_position: list[int] = field(default_factory=list)
    """Element i: how often draft i of a window was accepted."""
    num_right: int = 0
    """Drafts that came true, verified or only looked at."""
    verify_steps: int = 0
    plain_steps: int = 0
    """Steps without a draft, parked ones included."""
    parked_steps: int = 0
    phase_ms: dict[str, float] = field(default_factory=dict)
    algorithm: str | None = None

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the time of a block to its phase, whether or not it raises."""
        start = self.clock()
        try:
            yield
        finally:
            elapsed_ms = (self.clock() - start) * 1e3
            self.phase_ms[name] = self.phase_ms.get(name, 0.0) + elapsed_ms

    def count_verify(self, num_drafts: int, num_accepted: int) -> None:
        """One verify step with what it brought."""
        self.verify_steps += 1
        self.draft_n += num_drafts
        self.draft_n_accepted += num_accepted
        missing = num_accepted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def count_plain(self, *, is_parked: bool) -> None:
        """One step without a draft."""
        self.plain_steps += 1
        self.parked_steps += is_parked
