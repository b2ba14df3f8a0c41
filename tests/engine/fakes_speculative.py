"""Targets, heads and drafters with the real contract: they refuse the wrong call.

The targets are tiny deterministic models. Their next-token logits depend strongly on the last two
tokens (so that streams repeat and drafts can hit) and a little on everything the cache really
holds (so that one wrong cache entry changes every later row). Not a mock: a stale, missing or
doubled entry gives another stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from backends.base import BackendError, RowOutput, WantLogits
from engine.sampling import Sampler
from engine.sampling_params import SamplingParams
from engine.speculative.target import TargetTraits

VOCAB = 48
FEATURES = 8
MASK = (1 << 61) - 1


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_ms(self, ms: float) -> None:
        self.now += ms / 1e3


START = 0x1234567


def fold(value: int, key: int) -> int:
    """Stir one more key into a 61-bit number."""
    value = (value ^ (key + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return value ^ value >> 29


def mix(*keys: int) -> int:
    """A well-mixed 61-bit number of the keys."""
    return reduce(fold, keys, START)


_TABLE = np.random.default_rng(7).standard_normal((64, VOCAB)).astype(np.float32)
_NOISE = np.random.default_rng(8).standard_normal((1024, VOCAB)).astype(np.float32)


def logits_of(last_two: tuple[int, int], everything: int) -> np.ndarray:
    """float32 [V]: sharp in the last two tokens, nudged by all there is."""
    return _TABLE[mix(*last_two) % 64] * 4 + _NOISE[everything % 1024] * np.float32(0.25)


def hidden_of(token_ids: Sequence[int]) -> np.ndarray:
    """float32 [F] of a prefix: what a draft head would read; exact numbers, easy to compare."""
    return hidden_from(mix(*token_ids))


def hidden_from(value: int) -> np.ndarray:
    return np.array([(value >> (7 * i)) & 127 for i in range(FEATURES)], dtype=np.float32)


@dataclass
class Forwarded:
    """One recorded forward."""

    token_ids: tuple[int, ...]
    want_hidden: bool
    want_logits: WantLogits


@dataclass
class FakeTarget:
    """Shared parts: buffers that are reused (and poisoned), costs on a fake clock, injected faults."""

    traits: TargetTraits = field(default_factory=TargetTraits)
    vocab_size: int = VOCAB
    max_context_len: int = 4096
    clock: FakeClock | None = None
    row_ms: Callable[[int], float] = lambda rows: 10.0 + rows
    fail_at: set[int] = field(default_factory=set)
    """Numbers of the forwards (from 0) that raise before anything changes."""
    calls: list[Forwarded] = field(default_factory=list)
    resolved: list[tuple[int, int]] = field(default_factory=list)
    num_forwards: int = 0

    def __post_init__(self) -> None:
        self.length = 0
        self._logits = np.zeros((128, self.vocab_size), dtype=np.float32)
        self._hidden = np.zeros((128, FEATURES), dtype=np.float32)
        self._is_open = False

    @property
    def cached_len(self) -> int:
        return self.length

    def forward_rows(
        self,
        token_ids: Sequence[int],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
    ) -> RowOutput:
        number, self.num_forwards = self.num_forwards, self.num_forwards + 1
        assert not self._is_open, "a verify was not resolved before the next forward"
        assert token_ids, "a forward of no rows"
        assert all(0 <= i < self.vocab_size for i in token_ids), "an id outside the vocabulary"
        assert self.length + len(token_ids) <= self.max_context_len, "rows past the context"
        if number in self.fail_at:
            raise BackendError(f"injected fault in forward {number}")
        self.calls.append(Forwarded(tuple(token_ids), want_hidden, want_logits))
        self._logits[: len(token_ids) + 1] = np.nan
        self._hidden[: len(token_ids) + 1] = np.nan
        for row, token_id in enumerate(token_ids):
            self._append(token_id, row, len(token_ids))
            if want_logits == "all" or (want_logits == "last" and row == len(token_ids) - 1):
                self._logits[row] = self._row_logits()
            if want_hidden:
                self._hidden[row] = self._row_hidden()
        self._after_forward(len(token_ids))
        if self.clock is not None:
            self.clock.advance_ms(self.row_ms(len(token_ids)))
        num = len(token_ids)
        wanted = {"all": slice(num), "last": slice(num - 1, num), "none": None}[want_logits]
        return RowOutput(
            None if wanted is None else self._logits[wanted],
            self._hidden[:num] if want_hidden else None,
        )

    def on_verify_resolved(self, num_rows: int, num_accepted: int) -> None:
        assert 0 <= num_accepted < num_rows
        self.resolved.append((num_rows, num_accepted))

    # each kind implements:
    def _append(self, token_id: int, row: int, num_rows: int) -> None:
        raise NotImplementedError

    def _row_logits(self) -> np.ndarray:
        raise NotImplementedError

    def _row_hidden(self) -> np.ndarray:
        raise NotImplementedError

    def _after_forward(self, num_rows: int) -> None:
        pass

    def contents(self) -> object:
        """Everything that decides later rows, for the COLD check."""
        raise NotImplementedError


@dataclass
class LinearTarget(FakeTarget):
    """Keeps every position; rejected rows are garbage until overwritten."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._slots: list[int] = []
        self._prefixes = [START]
        """Element i: `mix` of the first i slots."""

    def _append(self, token_id: int, row: int, num_rows: int) -> None:
        del self._slots[self.length :], self._prefixes[self.length + 1 :]
        self._slots.append(token_id)
        self._prefixes.append(fold(self._prefixes[-1], token_id))
        self.length += 1

    def _row_logits(self) -> np.ndarray:
        second = self._slots[self.length - 2] if self.length > 1 else 0
        return logits_of((second, self._slots[self.length - 1]), self._prefixes[self.length])

    def _row_hidden(self) -> np.ndarray:
        return hidden_from(self._prefixes[self.length])

    def snapshot_state(self) -> object:
        return None

    def restore_state(self, snapshot: object) -> None:
        raise AssertionError("a linear cache takes no snapshot")

    def rewind_to(self, length: int) -> None:
        assert 0 < length <= self.length
        self.length = length

    def contents(self) -> object:
        return tuple(self._slots[: self.length])


@dataclass
class RecitingTarget(LinearTarget):
    """Goes on with a given text whatever it is fed: the row of position p says text[p + 1]."""

    text: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.vocab_size = max(self.text) + 1
        super().__post_init__()

    def _row_logits(self) -> np.ndarray:
        row = np.zeros(self.vocab_size, dtype=np.float32)
        if self.length < len(self.text):
            row[self.text[self.length]] = 9.0
        return row


@dataclass
class RingTarget(FakeTarget):
    """A window ring of exactly W slots: a verify evicts rows a rollback needs back (S18)."""

    window: int = 8
    reforwards: bool = False
    """Whether a partial acceptance is rolled back by re-forwarding: then every row goes back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = TargetTraits(verify_persists_accepted_kv=not self.reforwards)
        self._ring: dict[int, tuple[int, int]] = {}
        self._saved: list[tuple[int, tuple[int, int] | None]] = []
        self._saved_from = 0
        self.num_restored_rows = 0

    def _append(self, token_id: int, row: int, num_rows: int) -> None:
        if row == 0:
            self._saved, self._saved_from = [], self.length
        slot = self.length % self.window
        self._saved.append((slot, self._ring.get(slot)))
        self._ring[slot] = (self.length, token_id)
        self.length += 1

    def _visible(self) -> list[tuple[int, int]]:
        """What the newest row attends to: its window, in order."""
        first = self.length - self.window
        return sorted(e for e in self._ring.values() if first <= e[0] < self.length)

    def _row_logits(self) -> np.ndarray:
        entries = self._visible()
        ids = [token for _, token in entries]
        last_two = (ids[-2] if len(ids) > 1 else 0, ids[-1])
        return logits_of(last_two, mix(*(part for entry in entries for part in entry)))

    def _row_hidden(self) -> np.ndarray:
        return hidden_of([token for _, token in self._visible()])

    def _after_forward(self, num_rows: int) -> None:
        self._is_open = num_rows > 1 and self.calls[-1].want_logits == "all"

    def on_verify_resolved(self, num_rows: int, num_accepted: int) -> None:
        super().on_verify_resolved(num_rows, num_accepted)
        self._is_open = False
        if num_accepted + 1 == num_rows:
            return
        first = 0 if self.reforwards else num_accepted + 1
        # Newest first: a verify longer than the ring wrote some slots twice.
        for slot, entry in reversed(self._saved[first:]):
            self.num_restored_rows += 1
            if entry is None:
                self._ring.pop(slot, None)
            else:
                self._ring[slot] = entry

    def snapshot_state(self) -> object:
        return self.length if self.reforwards else None

    def restore_state(self, snapshot: object) -> None:
        assert self.reforwards, "this ring rewinds"
        assert self.resolved, "restored before the verify was resolved"
        self.length = snapshot  # type: ignore[assignment]

    def rewind_to(self, length: int) -> None:
        assert not self.reforwards, "this ring cannot rewind"
        assert self._saved_from < length <= self.length, "a ring rewinds within its last forward"
        self.length = length

    def contents(self) -> object:
        return tuple(self._visible()), self.length


@dataclass
class RecurrentTarget(FakeTarget):
    """Folds every token into one state: it cannot rewind, it restores and forwards again (S16)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = TargetTraits(verify_persists_accepted_kv=False, preferred_window=3)
        self._state = (1, 0, 0)

    def _append(self, token_id: int, row: int, num_rows: int) -> None:
        value, _, last = self._state
        self._state = (mix(value, token_id), last, token_id)
        self.length += 1

    def _row_logits(self) -> np.ndarray:
        value, second, last = self._state
        return logits_of((second, last), value)

    def _row_hidden(self) -> np.ndarray:
        return hidden_of(self._state)

    def snapshot_state(self) -> object:
        return self._state, self.length

    def restore_state(self, snapshot: object) -> None:
        self._state, self.length = snapshot  # type: ignore[misc]

    def rewind_to(self, length: int) -> None:
        raise AssertionError("a recurrent state cannot be rewound")

    def contents(self) -> object:
        return self._state, self.length


@dataclass
class SlotRecurrentTarget(RecurrentTarget):
    """A recurrent trunk whose verify keeps the state after every row; it commits one (S17)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = TargetTraits(verify_persists_accepted_kv=True, preferred_window=3)
        self._row_states: list[tuple[int, int, int]] = []

    def _append(self, token_id: int, row: int, num_rows: int) -> None:
        if row == 0:
            self._row_states = []
        super()._append(token_id, row, num_rows)
        self._row_states.append(self._state)

    def on_verify_resolved(self, num_rows: int, num_accepted: int) -> None:
        super().on_verify_resolved(num_rows, num_accepted)
        num_rejected = num_rows - 1 - num_accepted
        self._state = self._row_states[num_rows - 1 - num_rejected]
        self._resolved_len = self.length - num_rejected

    def snapshot_state(self) -> object:
        return None

    def restore_state(self, snapshot: object) -> None:
        raise AssertionError("rows are committed from their slots")

    def rewind_to(self, length: int) -> None:
        assert length == self._resolved_len, "only the resolved row's state is live"
        self.length = length


TARGETS: dict[str, Callable[..., FakeTarget]] = {
    "linear": LinearTarget,
    "ring": RingTarget,
    "ring-reforward": lambda **kw: RingTarget(reforwards=True, **kw),
    "recurrent": RecurrentTarget,
    "recurrent-slots": SlotRecurrentTarget,
}


def prefill(target: FakeTarget, prompt_ids: Sequence[int], chunk: int = 5) -> np.ndarray:
    """Feed a prompt in chunks, resolving each as fully kept; the last row's logits."""
    row = np.zeros(0)
    for start in range(0, len(prompt_ids), chunk):
        piece = prompt_ids[start : start + chunk]
        output = target.forward_rows(piece)
        if len(piece) > 1 and isinstance(target, RingTarget):
            target._is_open = False
        assert output.logits is not None
        row = output.logits[-1].copy()
    return row


class ColdTwin:
    """A fresh target that is fed one row at a time, as plain decoding would."""

    def __init__(self, kind: str) -> None:
        self._target = TARGETS[kind]()
        self._fed: list[int] = []

    def contents(self, token_ids: Sequence[int]) -> object:
        """What a cold cache of these tokens holds; they only ever grow."""
        assert list(token_ids[: len(self._fed)]) == self._fed, "the committed tokens changed"
        for token_id in token_ids[len(self._fed) :]:
            self._target.forward_rows([token_id])
            self._fed.append(token_id)
        return self._target.contents()


def cold_contents(kind: str, token_ids: Sequence[int]) -> object:
    """Contents of a fresh target that was fed one row at a time."""
    return ColdTwin(kind).contents(token_ids)


class Turn:
    """What the engine does around a step: sampler, stop rule, token list."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        stop_ids: Sequence[int] = (),
        max_tokens: int = 64,
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.sampler = Sampler(params or SamplingParams(temperature=0.0), prompt_ids)
        self.stop_ids = set(stop_ids)
        self.max_tokens = max_tokens
        self.emitted: list[int] = []
        self.is_over = False
        self.positions: list[int] = []

    @property
    def num_remaining(self) -> int:
        return self.max_tokens - len(self.emitted)

    def draw(self, row: np.ndarray, position: int, argmax: int | None = None) -> int | None:
        if self.is_over:
            return None
        assert np.isfinite(row).all(), "drew from a row that was never computed"
        assert position == len(self.prompt_ids) + len(self.emitted) == self.sampler.position
        token_id = self.sampler.draw(row, argmax)
        self.sampler.accept(token_id)
        self.emitted.append(token_id)
        self.positions.append(position)
        self.is_over = token_id in self.stop_ids or self.num_remaining <= 0
        return token_id


def plain_stream(
    kind: str,
    prompt_ids: Sequence[int],
    num: int,
    params: SamplingParams | None = None,
    **target_args: object,
) -> list[int]:
    """The tokens plain decoding emits: the reference for everything."""
    target = TARGETS[kind](**target_args)
    turn = Turn(prompt_ids, params, max_tokens=num)
    token_id = turn.draw(prefill(target, prompt_ids), len(prompt_ids))
    while not turn.is_over:
        assert token_id is not None
        logits = target.forward_rows([token_id]).logits
        assert logits is not None
        token_id = turn.draw(logits[0], target.cached_len)
    return turn.emitted
