"""A prefilled target with an armed drafter and a turn, ready to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculative.drafters import drafter_factory
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.governor import CostGovernor
from engine.speculative.registry import SpeculatorRequest
from engine.speculative.speculator import Decline, Speculator
from engine.speculative.step import DrawRow
from engine.speculative.window import FixedWindow
from tests.engine.fakes_speculative import (
    TARGETS,
    FakeClock,
    FakeTarget,
    LinearTarget,
    Turn,
    cold_contents,
    prefill,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KINDS = list(TARGETS)


@dataclass(frozen=True)
class Stepped:
    """What one step brought, read from the turn's counters."""

    token_ids: list[int]
    num_drafts: int
    num_accepted: int
    kind: str
    """verify, plain or parked."""


def take_step(
    execution: SpeculativeExecution, last_id: int, max_tokens: int, draw: DrawRow
) -> Stepped:
    stats = execution.stats
    before = stats.draft_n, stats.draft_n_accepted, stats.verify_steps, stats.parked_steps
    drawn = execution.step(last_id, max_tokens, draw)
    after = stats.draft_n, stats.draft_n_accepted, stats.verify_steps, stats.parked_steps
    drafts, accepted, verifies, parked = (b - a for a, b in zip(before, after, strict=True))
    kind = "verify" if verifies else "parked" if parked else "plain"
    return Stepped(drawn, drafts, accepted, kind)


class Bench:
    """A prefilled target with an armed speculator and a turn, ready to step."""

    def __init__(
        self,
        speculator: Speculator,
        *,
        kind: str = "linear",
        window: int = 8,
        governor: CostGovernor | None = None,
        turn: Turn | None = None,
        **target_args: object,
    ) -> None:
        self.kind = kind
        self.target: FakeTarget = TARGETS[kind](**target_args)
        self.clock = self.target.clock = FakeClock()
        self.execution = SpeculativeExecution(
            self.target, speculator, FixedWindow(window), governor=governor, clock=self.clock
        )
        self.turn = turn or Turn(PROMPT)
        self.last_id = self.turn.draw(prefill(self.target, PROMPT), len(PROMPT))
        self.execution.seed_committed(PROMPT)

    def step(self) -> Stepped:
        assert self.last_id is not None
        result = take_step(self.execution, self.last_id, self.turn.num_remaining, self.turn.draw)
        self.last_id = result.token_ids[-1]
        return result

    def finish(self) -> list[int]:
        while not self.turn.is_over:
            self.step()
        return self.turn.emitted

    def assert_cold(self) -> None:
        """The cache holds exactly the prompt and the emitted tokens but the last."""
        cached = [*PROMPT, *self.turn.emitted[:-1]]
        assert self.target.contents() == cold_contents(self.kind, cached)


def forced(spec: str, plain: Sequence[int], target: FakeTarget | None = None) -> Speculator:
    request = SpeculatorRequest(target or LinearTarget(), None)
    made = drafter_factory(spec, PROMPT, plain)(request)
    assert not isinstance(made, Decline)
    return made
