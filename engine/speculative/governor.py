"""Whether drafting pays, measured: park while it loses, try again with backoff (ledger S33-S41).

A measurement policy beside the loop. It is told what steps cost and says whether the next one may
draft; it knows no algorithm, no cache and no clock of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class GovernorPolicy:
    """The governor's numbers, each with its reason."""

    probe_steps: int = 8
    """Speculative steps before a verdict: fewer let one lucky window decide."""
    reprobe_steps: int = 3
    """After a loss. Eight dear steps every park kept prose 30-50 % slower (reference text)."""
    zero_steps_to_lose: int = 4
    """Steps in a row that accept nothing end a probe: the rest would cost a verify each."""
    park_steps: tuple[int, ...] = (32, 64, 128, 256)
    """Backoff. From 16 on, four re-probes fitted a 160-token losing turn; from 32 on, two do."""
    hold_steps: int = 64
    """A win is believed this long before the baseline is measured again."""
    held_samples: int = 8
    """Last speculative steps that are compared while a win holds: a wrong win costs these."""
    baseline_steps: int = 3
    """Plain steps of a (re-)measured baseline; the first pays the switch and is dropped."""
    baseline_samples: int = 32
    """Plain steps the baseline averages over; older contexts were shorter and cheaper."""
    min_gain: float = 1.05
    """A probe must win by this much; a hold ends at 1.0, so noise at the pivot cannot flap."""


class GovernorState(Enum):
    """What the governor is doing."""

    PROBING = "probing"
    HOLDING = "holding"
    PARKED = "parked"


@dataclass(frozen=True, slots=True)
class StepSample:
    """One speculative step: its cost and what it brought."""

    ms: float
    num_tokens: int
    num_accepted: int


class CostGovernor:
    """One verdict on a (model, drafter, backend), shared by every request."""

    def __init__(self, policy: GovernorPolicy | None = None) -> None:
        self.policy = policy or GovernorPolicy()
        self.state = GovernorState.PROBING
        self.num_wins = 0
        self.num_losses = 0
        self.num_parked_steps = 0
        self._plain_ms: deque[float] = deque(maxlen=self.policy.baseline_samples)
        self._baseline_left = self.policy.baseline_steps
        self._samples: list[StepSample] = []
        self._held: deque[StepSample] = deque(maxlen=self.policy.held_samples)
        self._steps_left = 0
        self._num_backoff = 0
        self._has_lost = False
        self._is_first_plain = True
        self._spec_ms_per_token: float | None = None

    @property
    def may_draft(self) -> bool:
        """Whether the next step may be speculative; otherwise it is the model's own decode."""
        return self.state is not GovernorState.PARKED and self._baseline_left == 0

    @property
    def plain_ms_per_token(self) -> float | None:
        """The baseline, the worst of several samples left out; None before it is measured."""
        if not self._plain_ms:
            return None
        samples = sorted(self._plain_ms)
        kept = samples[:-1] if len(samples) > 2 else samples
        return sum(kept) / len(kept)

    def begin_request(self) -> None:
        """A new request: another text, so a park earned on the last one is cut short (S35)."""
        self._num_backoff = 0
        self.num_wins = self.num_losses = self.num_parked_steps = 0
        if self.state is GovernorState.PARKED:
            self._steps_left = min(self._steps_left, self.policy.park_steps[0])

    def wake(self) -> None:
        """End a park early: a drafter that looked on for free has reason to believe it pays."""
        if self.state is GovernorState.PARKED:
            self._probe()

    def record_plain(self, ms: float) -> None:
        """One step of the model's own decode took `ms`."""
        # The first plain step of a run pays the switch from the verify kernels (S39).
        if not self._is_first_plain:
            self._plain_ms.append(ms)
        self._is_first_plain = False
        if self.state is GovernorState.PARKED:
            self.num_parked_steps += 1
            self._count_down(1)
        elif self._baseline_left:
            self._baseline_left -= 1
            if self._baseline_left == 0 and len(self._held) == self.policy.held_samples:
                self._decide(self._held)

    def record_speculative(self, sample: StepSample) -> None:
        """One step whose drafter ran, whether or not it proposed anything (S38)."""
        self._is_first_plain = True
        match self.state:
            case GovernorState.PROBING:
                self._probe_sample(sample)
            case GovernorState.HOLDING:
                self._hold_sample(sample)
            case GovernorState.PARKED:
                raise AssertionError("a speculative step ran while drafting was parked")

    def count_interlude(self, num_steps: int) -> None:
        """Steps the request took elsewhere count against a park or a hold (S47)."""
        if self.state is not GovernorState.PROBING:
            self._count_down(num_steps)

    def describe(self) -> str:
        """The per-turn line (S40)."""
        plain, spec = self.plain_ms_per_token, self._spec_ms_per_token
        plain_text = "-" if plain is None else f"{plain:.1f}ms/tok"
        spec_text = "-" if spec is None else f"{spec:.1f}ms/tok"
        return (
            f"plain={plain_text} spec={spec_text} wins={self.num_wins} "
            f"losses={self.num_losses} parked={self.num_parked_steps}"
        )

    def _probe_sample(self, sample: StepSample) -> None:
        self._samples.append(sample)
        policy = self.policy
        last = self._samples[-policy.zero_steps_to_lose :]
        is_hopeless = len(last) == policy.zero_steps_to_lose and not any(
            s.num_accepted for s in last
        )
        if is_hopeless:
            self._spec_ms_per_token = _ms_per_token(last)
            self._lose()
        elif len(self._samples) >= (policy.reprobe_steps if self._has_lost else policy.probe_steps):
            self._decide(_settled(self._samples))

    def _hold_sample(self, sample: StepSample) -> None:
        self._held.append(sample)
        if len(self._held) == self.policy.held_samples:
            self._spec_ms_per_token = _ms_per_token(self._held)
            if self._spec_ms_per_token > self._baseline():
                self._lose()
                return
        self._count_down(1)

    def _count_down(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left > 0:
            return
        if self.state is GovernorState.PARKED:
            self._probe()
        else:
            self._refresh_baseline()

    def _probe(self) -> None:
        self.state = GovernorState.PROBING
        self._samples.clear()
        self._held.clear()
        self._baseline_left = 0 if self._plain_ms else self.policy.baseline_steps

    def _refresh_baseline(self) -> None:
        # The held samples stay: they are the speculative side of the coming verdict (S37).
        # Fewer than eight (the hold ran out elsewhere) are no evidence: then a probe follows.
        self.state = GovernorState.PROBING
        self._samples.clear()
        self._plain_ms.clear()
        self._baseline_left = self.policy.baseline_steps

    def _decide(self, samples: Sequence[StepSample]) -> None:
        self._spec_ms_per_token = _ms_per_token(samples)
        if self._spec_ms_per_token * self.policy.min_gain <= self._baseline():
            self._win()
        else:
            self._lose()

    def _win(self) -> None:
        self.num_wins += 1
        self._num_backoff = 0
        self._has_lost = False
        self.state = GovernorState.HOLDING
        self._steps_left = self.policy.hold_steps
        self._held.clear()

    def _lose(self) -> None:
        self.num_losses += 1
        self._has_lost = True
        self.state = GovernorState.PARKED
        parks = self.policy.park_steps
        self._steps_left = parks[min(self._num_backoff, len(parks) - 1)]
        self._num_backoff += 1
        self._held.clear()

    def _baseline(self) -> float:
        baseline = self.plain_ms_per_token
        assert baseline is not None, "a verdict was asked for before the baseline was measured"
        return baseline


def _ms_per_token(samples: Sequence[StepSample] | deque[StepSample]) -> float:
    return sum(s.ms for s in samples) / sum(s.num_tokens for s in samples)


def _settled(samples: list[StepSample]) -> list[StepSample]:
    """A full probe without its first step (it warms kernels up) and without its dearest one."""
    if len(samples) < 5:
        return samples
    kept = samples[1:]
    kept.remove(max(kept, key=lambda s: s.ms))
    return kept
