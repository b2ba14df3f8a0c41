"""Keys and values of one chat in MLX arrays.

A slot is a buffer [G, capacity, D] in order of position, as in the torch backend: one that keeps
everything grows by doubling, a windowed one covers a sliding range of at least
`window + max_rows - 1` positions behind the newest, so that any forward can be taken back exactly.
MLX arrays are values: a clone shares memory until one of the two is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from backends.base import BackendError, OutOfDeviceMemory
from backends.mlx_backend.memory import memory_for
from backends.program import KvSlot

_FIRST_CAPACITY = 256
_SLACK = 256
"""Positions a windowed slot takes in before it moves its contents to the front."""


class SlotBuffer:
    """One slot. `base` is the position at index 0."""

    def __init__(self, spec: KvSlot, max_rows: int, dtype: mx.Dtype) -> None:
        self.spec = spec
        self.base = 0
        self._kept = 0 if spec.window is None else spec.window + max_rows - 1
        capacity = 0 if spec.window is None else self._kept + max_rows + _SLACK
        self.keys = mx.zeros((spec.kv_heads, capacity, spec.head_dim), dtype)
        self.values = mx.zeros((spec.kv_heads, capacity, spec.head_dim), dtype)

    @property
    def capacity(self) -> int:
        """Positions the buffer has room for, from `base` on."""
        return int(self.keys.shape[1])

    def reserve(self, length: int, new_length: int) -> None:
        """Make room up to `new_length`. State: buffers, base; what rows can see stays.

        Windowed: what lies more than `_kept` positions behind `length` is let go.
        """
        if new_length - self.base <= self.capacity:
            return
        base, capacity = 0, max(_FIRST_CAPACITY, self.capacity)
        if self.spec.window is not None:
            base = max(self.base, length - self._kept)
        else:
            while capacity < new_length:
                capacity *= 2
        held = slice(base - self.base, length - self.base)
        self.keys = _moved(self.keys, held, capacity)
        self.values = _moved(self.values, held, capacity)
        self.base = base

    def write(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Put rows [G, n, D] at positions from `start` on. State: buffers."""
        at = slice(start - self.base, start - self.base + keys.shape[1])
        self.keys[:, at] = keys.astype(self.keys.dtype)
        self.values[:, at] = values.astype(self.values.dtype)

    def first_visible(self, position: int) -> int:
        """The oldest position a row at `position` sees."""
        return 0 if self.spec.window is None else max(0, position - self.spec.window + 1)


def _moved(old: mx.array, held: slice, capacity: int) -> mx.array:
    kept = old[:, held]
    rest = mx.zeros((old.shape[0], capacity - kept.shape[1], old.shape[2]), old.dtype)
    return mx.concatenate([kept, rest], axis=1)


@contextmanager
def restored_on_failure(slots: Sequence[SlotBuffer]) -> Iterator[None]:
    """Changes of the slots happen in here. State: buffers and bases as before, when it raises."""
    # Writing changes an array object in place, so the old values need objects of their own.
    before = [(mx.array(slot.keys), mx.array(slot.values), slot.base) for slot in slots]
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done:
            for slot, (keys, values, base) in zip(slots, before, strict=True):
                slot.keys, slot.values, slot.base = keys, values, base


class MlxCache:
    """One chat's slots; all have the same length."""

    def __init__(self, specs: tuple[KvSlot, ...], max_rows: int, dtype: mx.Dtype) -> None:
        self._config = (specs, max_rows, dtype)
        self._length = 0
        self.slots = [SlotBuffer(spec, max_rows, dtype) for spec in specs]

    @property
    def length(self) -> int:
        """Valid positions, in tokens."""
        return self._length

    @property
    def num_bytes(self) -> int:
        """Memory held, capacity included."""
        return sum(int(slot.keys.nbytes) + int(slot.values.nbytes) for slot in self.slots)

    def ensure_capacity(self, length: int) -> None:
        """Make room for `length` tokens in the slots that keep everything. State: capacity.

        Raises: OutOfDeviceMemory; the cache is then unchanged.
        """
        self._reserve([s for s in self.slots if s.spec.window is None], length)

    def ensure_rows(self, num_rows: int) -> None:
        """Make room for rows behind the newest, in every slot. State: capacity, bases."""
        self._reserve(self.slots, self._length + num_rows)

    def _reserve(self, slots: list[SlotBuffer], length: int) -> None:
        try:
            with memory_for(lambda: self._out_of_memory(length)), restored_on_failure(slots):
                for slot in slots:
                    slot.reserve(self._length, length)
                mx.eval([(slot.keys, slot.values) for slot in slots])
        except (OverflowError, ValueError, TypeError) as error:  # no shape is that large
            raise self._out_of_memory(length) from error

    def _out_of_memory(self, length: int) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(
            f"a context of {length} tokens does not fit: {self.num_bytes} bytes are held "
            "and no more are free",
            hint="shorten the chat or lower --ctx-size",
        )

    def advance(self, num_rows: int) -> None:
        """Count rows that were written behind the newest. State: length."""
        self._length += num_rows

    def can_rewind_to(self, length: int) -> bool:
        """Whether the keys that later rows need are all still there."""
        if not 0 <= length <= self._length:
            return False
        return length == 0 or all(slot.first_visible(length) >= slot.base for slot in self.slots)

    def rewind_to(self, length: int) -> None:
        """Drop every position >= length. State: length; bases when nothing is left.

        Raises: BackendError where a window has moved on; the cache is then unchanged.
        """
        if not self.can_rewind_to(length):
            raise BackendError(
                f"cannot rewind a cache of {self._length} tokens to {length}: "
                "the sliding window has moved on"
            )
        self._length = length
        if length == 0:
            for slot in self.slots:
                slot.base = 0

    def clone(self) -> MlxCache:
        """An independent copy, whose memory is taken when one of the two is written.

        State: unchanged.
        """
        copy = MlxCache(*self._config)
        copy._length = self._length
        for mine, slot in zip(self.slots, copy.slots, strict=True):
            slot.keys, slot.values, slot.base = (
                mx.array(mine.keys),
                mx.array(mine.values),
                mine.base,
            )
        return copy

    def export_state(self) -> Mapping[str, np.ndarray]:
        """Valid contents in order of position, in the stored type. State: unchanged."""
        state: dict[str, np.ndarray] = {}
        for i, slot in enumerate(self.slots):
            first = slot.first_visible(self._length - 1) if self._length else 0
            held = slice(first - slot.base, self._length - slot.base)
            state[f"k.{i}"] = np.array(slot.keys[:, held]).transpose(1, 0, 2)
            state[f"v.{i}"] = np.array(slot.values[:, held]).transpose(1, 0, 2)
            state[f"positions.{i}"] = np.arange(first, self._length)
        return state

    def import_state(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Replace the contents by an export. State: everything.

        Raises: OutOfDeviceMemory; BackendError on a misfit. The cache is then unchanged.
        """
        new = MlxCache(*self._config)
        for i, slot in enumerate(new.slots):
            first = slot.first_visible(length - 1) if length else 0
            shape = (length - first, slot.spec.kv_heads, slot.spec.head_dim)
            wanted = np.dtype(np.float16 if slot.keys.dtype == mx.float16 else np.float32)
            parts = [state.get(f"{part}.{i}") for part in "kv"]
            if any(p is None or p.shape != shape or p.dtype != wanted for p in parts):
                raise BackendError(f"the saved cache does not fit slot {i} of this model")
            slot.base = first
        new.ensure_capacity(length)
        with memory_for(lambda: self._out_of_memory(length)):
            for i, slot in enumerate(new.slots):
                keys, values = (mx.array(state[f"{part}.{i}"]).swapaxes(0, 1) for part in "kv")
                slot.write(slot.base, keys, values)
            mx.eval([(slot.keys, slot.values) for slot in new.slots])
        self.slots, self._length = new.slots, length
