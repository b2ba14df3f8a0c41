"""Draws one token from one row of logits. Knows nothing of chats, caches or drafting.

The token at position p of attempt a is a pure function of the row, the tokens before it and
(seed, a, p): the random number is keyed by them and not taken from a stream, so it does not matter
how many rows were scored, drafted or thrown away in between (ledger S70).

Order: penalties, temperature, top-k, top-p, min-p, then the inverse CDF over the candidates sorted
by (logit descending, id ascending). Each filter keeps a prefix of that order.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from engine.errors import NotANumber
from engine.sampling_params import SamplingParams

_MASK = (1 << 64) - 1
_MAX_GROUP = 64
"""A row is folded into groups of at most this many logits; their maxima bound the top k."""
_FIRST_GUESS = 64
"""Candidates sorted at first when no top-k bounds them; grown eightfold while the draw is beyond
them (a confident model needs a handful, a flat one thousands)."""


class Sampler:
    """One turn's sampler: told every token as it is accepted, asked for the next one."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], *, attempt: int = 0
    ) -> None:
        self._params = params
        self._attempt = attempt
        self._window: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        self._position = len(prompt_ids)
        if params.has_penalties:
            recent = prompt_ids[-params.penalty_window :] if params.penalty_window else prompt_ids
            for token_id in recent:
                self._count(token_id)

    @property
    def position(self) -> int:
        """Absolute position of the next token, in tokens."""
        return self._position

    def draw(self, row: np.ndarray, argmax: int | None = None) -> int:
        """The token at `position`, from its logits; `accept` must be told of it.

        `argmax` is the id of the first largest logit, where it is known already.
        Shapes: row [V] float32, not changed.
        Raises: NotANumber when the row is not finite.
        """
        if self._counts:
            row, argmax = self._penalized(row), None
        if self._params.is_greedy:
            best = int(np.argmax(row)) if argmax is None else argmax
            _check_finite(row[best])
            return best
        u = uniform(self._params.seed, self._attempt, self._position)
        return _draw_from_prefix(row, self._params, u)

    def accept(self, token_id: int) -> None:
        """The token at `position` is decided. State: position and penalty window move on."""
        self._position += 1
        if self._params.has_penalties:
            self._count(token_id)

    def _count(self, token_id: int) -> None:
        self._counts[token_id] += 1
        self._window.append(token_id)
        if 0 < self._params.penalty_window < len(self._window):
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def _penalized(self, row: np.ndarray) -> np.ndarray:
        """A copy of the row with repeat, presence and frequency penalties applied.

        Source: Keskar et al. 2019, section 4.1 (arXiv 1909.05858) for the repeat penalty, extended
        to negative logits as llama.cpp does; OpenAI API reference for the other two.
        """
        params = self._params
        ids = np.fromiter(self._counts.keys(), dtype=np.int64, count=len(self._counts))
        counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
        row = row.copy()
        seen = row[ids]
        seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
        row[ids] = seen - counts * params.frequency_penalty - params.presence_penalty
        return row


def uniform(seed: int, attempt: int, position: int) -> float:
    """A number in [0, 1) that is a function of its three keys only.

    Source: finalizer and increment of SplitMix64 (Steele, Lea, Flood 2014), chained over the keys.
    """
    state = 0
    for key in (seed, attempt, position):
        state = _mix((state ^ key) + 0x9E3779B97F4A7C15 & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def _check_finite(peak: np.float32) -> None:
    """The largest logit decides: NaN is larger than all others here. Raises: NotANumber."""
    if not math.isfinite(peak):
        raise NotANumber(
            "the model's output is not a number", hint="the file may be damaged: check its hash"
        )


def _draw_from_prefix(row: np.ndarray, params: SamplingParams, u: float) -> int:
    """Inverse CDF at u over the prefix the filters keep, sorting no more than it takes."""
    size = min(params.top_k or row.size, row.size)
    num = size if params.top_k else min(_FIRST_GUESS, size)
    ids = _largest(row, num)
    peak = row[ids[0]]
    total = None if params.top_k else float(_mass(row, peak, params.temperature).sum())
    while True:
        mass = _mass(row[ids].astype(np.float64), peak, params.temperature)
        cumulative = np.cumsum(mass)
        whole = cumulative[-1] if total is None else total
        num_kept = _num_kept(mass, cumulative, whole, params)
        if num_kept < num or num == size:
            target = u * cumulative[num_kept - 1]
            break
        target = u * whole
        if not _has_prefix_filter(params) and target < cumulative[-1]:
            break
        num = min(num * 8, size)
        ids = _largest(row, num)
    index = int(np.searchsorted(cumulative[:num_kept], target, side="right"))
    return int(ids[min(index, num_kept - 1)])


def _has_prefix_filter(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.min_p > 0.0


def _num_kept(
    mass: np.ndarray, cumulative: np.ndarray, whole: float, params: SamplingParams
) -> int:
    """How many of the sorted candidates pass top-p and min-p; at least one.

    Source: Holtzman et al. 2019, section 3.1 (arXiv 1904.09751) for top-p; Nguyen et al. 2024
    (arXiv 2407.01082) for min-p, here as a share of the likeliest, whose mass is 1.
    """
    num = len(mass)
    if params.top_p < 1.0:
        num = min(num, int(np.searchsorted(cumulative, params.top_p * whole, side="left")) + 1)
    if params.min_p > 0.0:
        num = min(num, int(np.count_nonzero(mass >= params.min_p)))
    return max(num, 1)


def _mass(logits: np.ndarray, peak: np.float32, temperature: float) -> np.ndarray:
    """Unnormalised probabilities at a temperature; the likeliest has mass 1."""
    mass: np.ndarray = np.exp((logits - peak) / logits.dtype.type(temperature))
    return mass


def _largest(row: np.ndarray, num: int) -> np.ndarray:
    """Ids of the `num` largest logits, sorted by (logit descending, id ascending).

    The num-th largest of group maxima is a lower bound of the num-th largest logit, so only groups
    that reach it are looked into, and few candidates are sorted: 40 of 262k in 0.09 ms, where a
    compare of the whole row takes 0.17 ms.
    Raises: NotANumber when the row is not finite.
    """
    per_group = min(_MAX_GROUP, row.size // (16 * num))
    if per_group < 2:
        _check_finite(row.max())
        return np.argsort(-row, kind="stable")[:num]
    num_groups = row.size // per_group
    end = num_groups * per_group
    groups, rest = row[:end].reshape(per_group, num_groups), row[end:]
    maxima = groups.max(axis=0)
    _check_finite(np.maximum(maxima.max(), rest.max(initial=-np.inf)))
    bound = np.partition(maxima, num_groups - num)[num_groups - num]
    columns = np.flatnonzero(maxima >= bound)
    lines, at = np.divmod(np.flatnonzero(groups.take(columns, axis=1) >= bound), len(columns))
    ids = lines * num_groups + columns.take(at)
    if rest.size:
        ids = np.concatenate([ids, np.arange(end, row.size)])
    return ids.take(np.argsort(-row.take(ids), kind="stable")[:num])
