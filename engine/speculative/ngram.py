"""Drafts by looking up where the last few tokens stood before and proposing what followed (S10).

It mines the chat's own tokens, so it works on every model: strong where an answer quotes, edits or
repeats, silent where it does not. Needs no hidden row and survives any gap in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from engine.speculative.options import MAX_WINDOW
from engine.speculative.speculator import (
    NO_PROPOSAL,
    DraftContext,
    Proposal,
    Speculator,
    SpeculatorTraits,
)

_BASE = 0x9E3779B97F4A7C15
"""Odd multiplier of the polynomial hash (the golden ratio's 64 bits); a collision costs a draft."""
_MASK = (1 << 64) - 1
_BULK = 64
"""Tokens from which indexing goes through numpy."""


@dataclass(frozen=True, slots=True)
class NgramPolicy:
    """The drafter's numbers, each with its reason."""

    orders: tuple[int, ...] = (16, 8, 5, 3, 2, 1)
    """Suffix lengths that are indexed, longest first: the longest one that occurred before wins,
    at its latest place. On recorded turns order 1 is worth 17 % on JSON and 6 % on a summary, and
    (8, 5, 3) loses a fifth there; the first place or the most frequent continuation instead of the
    latest place moves nothing by more than 4 %."""
    max_match: int = 16
    """Longer matches are not told apart: their drafts are accepted alike."""
    min_prefix_prob: float = 0.2
    """Drafts less likely than this are not proposed. With a fixed window of 8 it takes recorded
    prose from 0.70x of plain to 0.99x and costs quoting nothing."""
    min_follow: int = 4
    """Tokens that must have come as expected before a place is followed over a break."""
    resync_reach: int = 8
    """How far around a broken match the text may go on (a changed, added or dropped word)."""
    max_corpus: int = 1 << 17
    """Tokens kept for look-up, answers that were regenerated away included."""
    prior: tuple[float, ...] = (0.1, 0.2, 0.4, 0.55, 0.65, 0.75, 0.8, 0.85, 0.9)
    """Expected acceptance by match length, before anything was seen; longer ones as the last."""
    followed_prior: tuple[float, ...] = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
    """The same where the last guess's own text goes on: the place itself is evidence."""
    prior_weight: float = 6.0
    """Tokens' worth of trust in `prior`."""
    memory: float = 0.98
    """What is kept of old observations with each new one of the same match length."""


class NgramIndex:
    """Where each n-gram of a growing token list was last followed by something."""

    def __init__(self, orders: Sequence[int]) -> None:
        self.ids: list[int] = []
        self._tables = tuple(_Table(order) for order in sorted(orders))
        self._hashes: list[int] = [0]
        """Element i: polynomial hash of ids[:i]; an n-gram's hash is a difference of two."""
        self._num_indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; indexing them waits for the next look-up. State: ids grow."""
        self.ids.extend(token_ids)

    def find(self, min_order: int) -> int | None:
        """Where the longest indexed suffix of at least `min_order` tokens went on, or None.

        State: every n-gram that ends before the last token is indexed.
        """
        self._index()
        ids, hashes, end = self.ids, self._hashes, len(self.ids)
        found = []
        for table in self._tables:
            order = table.order
            if order >= end:
                break
            place = table.places.get((hashes[end] - hashes[end - order] * table.power) & _MASK)
            if place is None:  # then no longer suffix occurred either
                break
            found.append((order, place))
        for order, place in reversed(found):
            if order >= min_order and ids[place - order : place] == ids[end - order :]:
                return place
        return None

    def _index(self) -> None:
        """Add the n-grams that end before the last token: what follows them is known.

        Long pieces go through numpy: 5,000 tokens take 5 ms, against 13 ms token by token.
        """
        start, end = self._num_indexed, len(self.ids) - 1
        self._extend_hashes()
        if end - start > _BULK:
            self._index_bulk(start, end)
        else:
            for place in range(start + 1, end + 1):
                self._index_one(place)
        self._num_indexed = max(start, end)

    def _index_one(self, place: int) -> None:
        hashes = self._hashes
        for table in self._tables:
            if table.order > place:
                break
            key = (hashes[place] - hashes[place - table.order] * table.power) & _MASK
            table.places[key] = place

    def _index_bulk(self, start: int, end: int) -> None:
        low = max(start - self._tables[-1].order, 0)
        hashes = np.array(self._hashes[low : end + 1], dtype=np.uint64)
        for table in self._tables:
            first = max(start + 1, table.order)
            if first > end:
                break
            before = hashes[first - table.order - low : end + 1 - table.order - low]
            keys = hashes[first - low :] - before * np.uint64(table.power)
            table.places.update(zip(keys.tolist(), range(first, end + 1), strict=True))

    def _extend_hashes(self) -> None:
        hashes = self._hashes
        value = hashes[-1]
        for token_id in self.ids[len(hashes) - 1 :]:
            value = (value * _BASE + token_id + 1) & _MASK
            hashes.append(value)


class _Table:
    """The n-grams of one order: hash to the place of the token that last followed."""

    __slots__ = ("order", "places", "power")

    def __init__(self, order: int) -> None:
        self.order = order
        self.power = pow(_BASE, order, 1 << 64)
        self.places: dict[int, int] = {}


@dataclass(frozen=True, slots=True)
class _Guess:
    """A proposal that waits for its outcome."""

    pos: int
    """Where its first draft would stand."""
    token_ids: Sequence[int]
    place: int
    """Where in the corpus it was read."""
    match_len: int
    """How many tokens matched before it."""
    is_followed: bool
    """Whether it only goes on where the last guess was read, without an indexed match."""


class NgramSpeculator:
    """Suffix look-up over one chat's tokens; keep it with the chat, later turns draft from it."""

    def __init__(self, max_drafts: int = MAX_WINDOW, *, policy: NgramPolicy | None = None) -> None:
        self.policy = policy or NgramPolicy()
        self._traits = SpeculatorTraits(
            name="ngram",
            max_drafts=max_drafts,
            default_min_draft_prob=0.0,
            can_arm_after_prefix_reuse=True,
            is_free=True,
        )
        self._hit_rates = {
            False: HitRates(self.policy, self.policy.prior),
            True: HitRates(self.policy, self.policy.followed_prior),
        }
        """By match length; guesses that only follow the last one are another kind."""
        self.reset()

    @property
    def traits(self) -> SpeculatorTraits:
        """Free, needs no hidden rows, arms anywhere."""
        return self._traits

    def reset(self) -> None:
        """Forget the sequence and everything to draft from."""
        self._index = NgramIndex(self.policy.orders)
        self._live: list[int] = []
        self._live_start = 0
        self._guess: _Guess | None = None
        self._follow: int | None = None
        """Where the text goes on if the last guess was right, or wrong in one token only."""
        self._run_len = 0
        """Tokens that came as they stand where `_follow` points, breaks not counted."""

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        """Learn what the cache holds from `start_pos` on.

        State: tokens that were there before and differ stay as material to draft from.
        """
        del hidden
        at = start_pos - self._live_start
        if not 0 <= at <= len(self._live):
            self._start_over(start_pos)
            at = 0
        if at == len(self._live):
            self._append(token_ids)
            return
        known = self._live[at : at + len(token_ids)]
        num_same = _num_common(known, token_ids)
        if at + num_same < len(self._live):
            self._branch_off(at + num_same)
        self._append(token_ids[num_same:])

    def propose(self, context: DraftContext) -> Proposal:
        """Look the newest tokens up; the gate scales how long a match has to be (S14)."""
        self.commit((context.last_token_id,), None, context.pos)
        self._learn()
        self._guess = guess = self._look_up(context)
        if guess is None:
            return NO_PROPOSAL
        probs = self._prefix_probs(guess)
        least = self.policy.min_prefix_prob
        num = next((n for n, prob in enumerate(probs) if prob < least), len(probs))
        return Proposal(guess.token_ids[:num], probs[:num])

    # -- the sequence

    def _append(self, token_ids: Sequence[int]) -> None:
        self._live.extend(token_ids)
        self._index.extend(token_ids)

    def _branch_off(self, live_len: int) -> None:
        """The text goes on differently from here: repeat some context, so that matches span it."""
        del self._live[live_len:]
        self._guess = self._follow = None
        if len(self._index.ids) > self.policy.max_corpus:
            self._index = NgramIndex(self.policy.orders)
            self._index.extend(self._live)
        else:
            self._index.extend(self._live[-self.policy.max_match :])

    def _start_over(self, start_pos: int) -> None:
        """Positions were skipped: what came before no longer stands next to what follows."""
        self._live, self._live_start = [], start_pos
        self._guess = self._follow = None

    # -- look-up

    def _look_up(self, context: DraftContext) -> _Guess | None:
        """The likelier of two places: the last guess's own text, and the longest match indexed."""
        shortest, longest = self.policy.orders[-1], self.policy.orders[0]
        min_order = shortest + round(context.min_draft_prob * (longest - shortest))
        found = [(self._index.find(min_order), False)]
        if min_order == shortest:
            found.insert(0, (self._picked_up(), True))
        guesses = [
            self._guess_at(place, context, is_followed=is_followed)
            for place, is_followed in found
            if place is not None
        ]
        return max(guesses, key=self._hit_rate_of, default=None)

    def _guess_at(self, place: int, context: DraftContext, *, is_followed: bool) -> _Guess:
        drafts = self._index.ids[place : place + context.max_drafts]
        return _Guess(context.pos + 1, drafts, place, self._match_len(place), is_followed)

    def _hit_rate_of(self, guess: _Guess) -> float:
        return self._hit_rates[guess.is_followed].at(guess.match_len)

    def _match_len(self, place: int) -> int:
        ids, most = self._index.ids, self.policy.max_match
        here, there = ids[: -most - 1 : -1], ids[max(place - most, 0) : place][::-1]
        return _num_common(here, there)

    def _picked_up(self) -> int | None:
        """Where a broken match goes on: behind the nearest token equal to the last, else a swap."""
        follow, ids = self._follow, self._index.ids
        if follow is None:
            return None
        last, num = ids[-1], len(ids) - 1
        for offset in _offsets(self.policy.resync_reach):
            place = follow + offset
            if 0 < place < num and ids[place - 1] == last:
                return place
        return follow if follow < num else None

    # -- what to believe

    def _learn(self) -> None:
        """Compare the last guess with what came, drafted or not: it costs nothing to look on."""
        guess, self._guess = self._guess, None
        if guess is None:
            return
        came = self._live[guess.pos - self._live_start :]
        num_judged = min(len(came), len(guess.token_ids))
        num_right = _num_common(guess.token_ids, came)
        rates = self._hit_rates[guess.is_followed]
        for offset in range(min(num_right + 1, num_judged)):
            rates.observe(guess.match_len + offset, is_hit=offset < num_right)
        self._run_len = (
            self._run_len + num_right if guess.is_followed else guess.match_len + num_right
        )
        is_lost = guess.is_followed and guess.match_len == num_right == 0
        is_worth_it = self._run_len >= self.policy.min_follow and not is_lost
        self._follow = guess.place + len(came) if is_worth_it else None

    def _prefix_probs(self, guess: _Guess) -> list[float]:
        rates = self._hit_rates[guess.is_followed]
        return list(accumulate(rates.run(guess.match_len, len(guess.token_ids)), mul))


class HitRates:
    """How often the token after a match of each length was right, lately."""

    def __init__(self, policy: NgramPolicy, prior: Sequence[float]) -> None:
        most = policy.max_match
        self._rates = [prior[min(length, len(prior) - 1)] for length in range(most + 1)]
        self._num_seen = [policy.prior_weight] * (most + 1)
        self._memory = policy.memory
        self._most = most

    def at(self, match_len: int) -> float:
        """Share of hits, 0 to 1."""
        return self._rates[min(match_len, self._most)]

    def run(self, match_len: int, num: int) -> list[float]:
        """Rates of `num` tokens in a row, each one making the match longer."""
        rates = self._rates[min(match_len, self._most) :][:num]
        return rates + self._rates[-1:] * (num - len(rates))

    def observe(self, match_len: int, *, is_hit: bool) -> None:
        """One more token whose outcome is known."""
        at = min(match_len, self._most)
        self._num_seen[at] = self._num_seen[at] * self._memory + 1.0
        self._rates[at] += (is_hit - self._rates[at]) / self._num_seen[at]


@cache
def _offsets(reach: int) -> tuple[int, ...]:
    """0, 1, -1, 2, -2, ...: a dropped word is as likely as an added one."""
    return tuple(sorted(range(-reach, reach + 1), key=lambda n: (abs(n), -n)))


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading elements two sequences share."""
    num = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        num += 1
    return num


if TYPE_CHECKING:
    _: type[Speculator] = NgramSpeculator
