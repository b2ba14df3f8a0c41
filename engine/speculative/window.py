"""How far to draft: the length with the most expected tokens per millisecond.

A policy beside the governor. It knows what a forward of each row count costs and how often each
draft position was accepted lately; it knows no algorithm, no cache and no clock of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.speculative.options import DEFAULT_WINDOW

_LEAST_MS = 1e-6
"""A clock may not tick during a step; rates divide by its time."""


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """The window's numbers, each with its reason."""

    ceiling: int = 15
    """Most drafts when the trunk prefers nothing: 16 rows fill one tile of the matrix kernels."""
    min_samples: int = 3
    """Steps of a row count before its cost is believed rather than interpolated."""
    row_share: float = 0.25
    """Cost of a further row in plain steps before any was measured: careful on most machines."""
    forget_after: int = 512
    """Steps after which a row count that was not used again counts as unmeasured."""
    explore_every: int = 12
    """Every so many choices an unmeasured length may be tried as if it were as cheap as the next
    shorter one: kernels have steps in their cost that no straight line shows."""
    cost_weight: float = 0.15
    """Weight of the newest cost: about the last dozen steps, contexts grow slowly."""
    probability_weight: float = 0.06
    """Weight of the newest acceptance: about the last thirty windows, text changes by paragraph."""
    prior_weight: float = 4.0
    """Windows' worth of trust in a drafter's own confidence before it is corrected."""
    min_gain: float = 1.03
    """Another length must be this much better than the one in use: no flapping at a pivot."""
    proven_right: int = 3
    """Drafts of a turn that must have come true, verified or not, before it is trusted: an answer
    of one word has no time to earn a rejected window back (0.84x of plain without this rule)."""
    unproven_drafts: int = 2
    """Most drafts until then."""
    unproven_prob: float = 0.5
    """Least probability of the first draft until then, ..."""
    unproven_step: float = 0.1
    """... raised by this with each verify."""
    wake_gain: float = 1.25
    """A parked drafter must promise this much before its park is cut short."""


class Window(Protocol):
    """How far to draft."""

    @property
    def max_drafts(self) -> int:
        """Most drafts worth asking for."""

    @property
    def min_prefix_prob(self) -> float:
        """Probability below which a further draft is not worth making."""

    def choose(
        self,
        prefix_probs: Sequence[float] | None,
        num_drafts: int,
        *,
        num_right: int,
        num_verifies: int,
    ) -> int:
        """How many of the proposed drafts to verify, given the turn's record so far."""


class RowCosts:
    """Milliseconds of a step without its drafting, by the number of rows it forwarded."""

    def __init__(self, policy: WindowPolicy) -> None:
        self.policy = policy
        self._ms: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._seen_at: dict[int, int] = {}
        self._known: list[int] = []
        self._num_steps = 0

    def record(self, num_rows: int, ms: float) -> None:
        """A step of `num_rows` rows took `ms`, drafting apart."""
        ms = max(ms, _LEAST_MS)
        count = self._counts.get(num_rows, 0) + 1
        old = self._ms.get(num_rows, ms)
        # The first forward of a shape allocates and warms up: the second one replaces it.
        weight = 1.0 if count == 2 else max(self.policy.cost_weight, 1.0 / count)
        self._ms[num_rows] = old + weight * (ms - old)
        self._counts[num_rows] = count
        self._num_steps += 1
        self._seen_at[num_rows] = self._num_steps
        self._forget_old()
        self._known = sorted(self._ms)

    @property
    def has_plain(self) -> bool:
        """Whether a plain step was measured."""
        return 1 in self._ms

    @property
    def is_known(self) -> bool:
        """Whether one-row steps and some longer length were measured often enough."""
        settled = [r for r, n in self._counts.items() if n >= self.policy.min_samples]
        return 1 in settled and len(settled) >= 2

    def ms(self, num_rows: int, *, is_hopeful: bool = False) -> float:
        """Expected cost; unmeasured counts are read between their neighbours.

        Costs never fall with the row count, so the lower neighbour bounds an unmeasured one from
        below: `is_hopeful` takes that bound, otherwise it is half way to the straight line.
        """
        if self._counts.get(num_rows, 0) > 1 or [num_rows] == self._known:
            return self._ms[num_rows]
        at = bisect_left(self._known, num_rows)
        if at == 0:
            return self._ms[self._known[0]]
        low = self._known[at - 1]
        if at == len(self._known):
            slope = 0.0 if is_hopeful else self._slope(low)
            return self._ms[low] + slope * (num_rows - low)
        high = self._known[at]
        share = 0.0 if is_hopeful else 0.5 * (num_rows - low) / (high - low)
        return self._ms[low] + share * max(self._ms[high] - self._ms[low], 0.0)

    def _slope(self, low: int) -> float:
        """Milliseconds of a row beyond the longest measured forward."""
        first = self._known[0]
        if low == first:
            return self._ms[low] * self.policy.row_share
        return max((self._ms[low] - self._ms[first]) / (low - first), 0.0)

    def _forget_old(self) -> None:
        """A length that was slow once (a hiccup, another context) gets another chance."""
        horizon = self._num_steps - self.policy.forget_after
        for num_rows in [r for r, at in self._seen_at.items() if at < horizon and r > 1]:
            del self._ms[num_rows], self._counts[num_rows], self._seen_at[num_rows]


class Acceptance:
    """How likely each draft of a window is accepted, given that the ones before it were.

    Only drafts that were really judged count: those behind the first rejection were not seen, and
    a window accepted whole says nothing of the draft it did not have.
    """

    NUM_BINS = 10

    def __init__(self, policy: WindowPolicy) -> None:
        self._policy = policy
        self._by_position: list[float] = []
        self._num_judged: list[int] = []
        self._hits = [0.0] * (self.NUM_BINS + 1)
        self._trials = [0.0] * (self.NUM_BINS + 1)

    def record(
        self, prefix_probs: Sequence[float] | None, num_drafts: int, num_accepted: int
    ) -> None:
        """A window (or one that was only looked at) of `num_drafts` had `num_accepted` right."""
        for position in range(min(num_accepted + 1, num_drafts)):
            hit = float(position < num_accepted)
            self._record_position(position, hit)
            if prefix_probs is not None:
                self._record_bin(_conditional(prefix_probs, position), hit)

    def prefix_probs(self, prefix_probs: Sequence[float] | None, num_drafts: int) -> list[float]:
        """Element i: estimated probability that drafts 0..i are all accepted."""
        result: list[float] = []
        running = 1.0
        for position in range(num_drafts):
            if prefix_probs is None:
                running *= self._at(position)
            else:
                running *= self._corrected(_conditional(prefix_probs, position))
            result.append(running)
        return result

    def _record_position(self, position: int, hit: float) -> None:
        if position >= len(self._by_position):
            self._by_position.append(self._at(position))
            self._num_judged.append(0)
        old = self._by_position[position]
        self._num_judged[position] += 1
        weight = max(self._policy.probability_weight, 1.0 / (self._num_judged[position] + 2))
        self._by_position[position] = old + weight * (hit - old)

    def _at(self, position: int) -> float:
        if position < len(self._by_position):
            return self._by_position[position]
        return self._by_position[-1] if self._by_position else 0.5

    def _record_bin(self, confidence: float, hit: float) -> None:
        index = int(confidence * self.NUM_BINS)
        keep = 1.0 - self._policy.probability_weight
        self._hits[index] = self._hits[index] * keep + hit
        self._trials[index] = self._trials[index] * keep + 1.0

    def _corrected(self, confidence: float) -> float:
        index = int(confidence * self.NUM_BINS)
        prior = self._policy.prior_weight
        return (self._hits[index] + prior * confidence) / (self._trials[index] + prior)


class AdaptiveWindow:
    """Picks the draft length of each step; shared like the governor, and for the same reason."""

    def __init__(self, *, preferred: int | None = None, policy: WindowPolicy | None = None) -> None:
        self.policy = policy or WindowPolicy()
        self.ceiling = preferred if preferred is not None else self.policy.ceiling
        self.fixed = min(DEFAULT_WINDOW, self.ceiling)
        self.costs = RowCosts(self.policy)
        self.acceptance = Acceptance(self.policy)
        self._current: int | None = None
        self._num_choices = 0
        self._draft_ms = 0.0

    @property
    def max_drafts(self) -> int:
        """Most drafts worth asking for."""
        return self.ceiling if self.costs.is_known else self.fixed

    @property
    def min_prefix_prob(self) -> float:
        """Probability a further draft needs: what it costs to make and verify, in plain steps."""
        if not self.costs.is_known:
            return 0.0
        plain_ms = self.costs.ms(1)
        row_ms = (self.costs.ms(self.fixed + 1) - plain_ms) / self.fixed
        return min((row_ms + self._draft_ms) / plain_ms, 1.0)

    def record_draft(self, num_drafts: int, ms: float) -> None:
        """Proposing `num_drafts` drafts took `ms`."""
        if num_drafts:
            self._draft_ms += self.policy.cost_weight * (ms / num_drafts - self._draft_ms)

    def choose(
        self,
        prefix_probs: Sequence[float] | None,
        num_drafts: int,
        *,
        num_right: int = 0,
        num_verifies: int = 0,
    ) -> int:
        """How many of `num_drafts` drafts to verify, 0 when not even one pays.

        This turn's record so far: `num_right` drafts came true, verified or only looked at, and
        `num_verifies` verifies were run.
        """
        num_drafts = self._trusted(prefix_probs, num_drafts, num_right, num_verifies)
        is_told = prefix_probs is not None and self.costs.has_plain
        if num_drafts == 0 or not (self.costs.is_known or is_told):
            return min(num_drafts, self.fixed)
        rates = self._rates(prefix_probs, num_drafts)
        best = max(range(len(rates)), key=rates.__getitem__)
        self._num_choices += 1
        if self._num_choices % self.policy.explore_every == 0:
            hopeful = self._rates(prefix_probs, num_drafts, is_hopeful=True)
            trial = max(range(len(hopeful)), key=hopeful.__getitem__)
            if hopeful[trial] > rates[best] * self.policy.min_gain:
                return trial
        return best if prefix_probs is not None else self._steady(best, rates)

    def _steady(self, best: int, rates: Sequence[float]) -> int:
        """The length in use unless another is clearly better: no flapping at a pivot.

        Not for a drafter that states its confidence: there the best length changes with each text.
        """
        current = self._current
        if (
            current is not None
            and current < len(rates)
            and rates[best] < rates[current] * self.policy.min_gain
        ):
            best = current
        self._current = best
        return best

    def promises_to_pay(
        self,
        prefix_probs: Sequence[float] | None,
        num_drafts: int,
        *,
        num_right: int = 0,
        num_verifies: int = 0,
    ) -> bool:
        """Whether verifying these drafts is expected to beat plain decoding clearly."""
        num_drafts = self._trusted(prefix_probs, num_drafts, num_right, num_verifies)
        if not num_drafts or not self.costs.has_plain:
            return False
        rates = self._rates(prefix_probs, num_drafts)
        return max(rates) >= rates[0] * self.policy.wake_gain

    def _trusted(
        self,
        prefix_probs: Sequence[float] | None,
        num_drafts: int,
        num_right: int,
        num_verifies: int,
    ) -> int:
        """How many drafts a turn may risk: few likely ones until some of its own came true."""
        policy = self.policy
        if num_right >= policy.proven_right:
            return num_drafts
        least = min(policy.unproven_prob + policy.unproven_step * num_verifies, 0.95)
        if not num_drafts or (prefix_probs is not None and prefix_probs[0] < least):
            return 0
        return min(num_drafts, policy.unproven_drafts)

    def _rates(
        self, prefix_probs: Sequence[float] | None, num_drafts: int, *, is_hopeful: bool = False
    ) -> list[float]:
        """Expected tokens per millisecond of verifying 0, 1, ... `num_drafts` drafts.

        The best ratio of each step, not the marginal rule (Dinkelbach) for the best ratio of all:
        that one was within 6 % either way on recorded turns and needs the rate of late besides.
        """
        num_tokens = 1.0
        rates = [num_tokens / self.costs.ms(1)]
        estimates = self.acceptance.prefix_probs(prefix_probs, num_drafts)
        for num_rows, probability in enumerate(estimates, start=2):
            num_tokens += probability
            rates.append(num_tokens / self.costs.ms(num_rows, is_hopeful=is_hopeful))
        return rates


class FixedWindow:
    """The window a person typed, or the default: never changed, never left out."""

    min_prefix_prob = 0.0

    def __init__(self, window: int) -> None:
        self.max_drafts = window

    def choose(
        self,
        prefix_probs: Sequence[float] | None,
        num_drafts: int,
        *,
        num_right: int = 0,
        num_verifies: int = 0,
    ) -> int:
        """All of them."""
        del prefix_probs, num_right, num_verifies
        return num_drafts


def _conditional(prefix_probs: Sequence[float], position: int) -> float:
    """Probability of one draft given the ones before it, from cumulative ones."""
    if position == 0:
        return min(max(prefix_probs[0], 0.0), 1.0)
    before = prefix_probs[position - 1]
    return min(max(prefix_probs[position] / before, 0.0), 1.0) if before > 0.0 else 0.0
