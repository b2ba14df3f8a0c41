"""Keys and values of one chat in MLX arrays, in order of position (`backends.sliding_cache`).

MLX arrays are values: a clone shares memory until one of the two is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from backends.base import OutOfDeviceMemory
from backends.mlx_backend.memory import memory_for
from backends.program import KvSlot
from backends.sliding_cache import Move, SlidingCache, SlidingSlot


class SlotBuffer(SlidingSlot):
    """One slot: keys and values [G, capacity, D]."""

    def __init__(self, spec: KvSlot, max_rows: int, dtype: mx.Dtype) -> None:
        super().__init__(spec, max_rows)
        shape = (spec.kv_heads, self.start_capacity, spec.head_dim)
        self.keys, self.values = mx.zeros(shape, dtype), mx.zeros(shape, dtype)

    @property
    def capacity(self) -> int:
        """Positions the buffer has room for, from `base` on."""
        return int(self.keys.shape[1])

    def reserve(self, length: int, new_length: int) -> None:
        """Make room up to `new_length`. State: buffers, base; what rows can see stays."""
        if (move := self.move_for(length, new_length)) is not None:
            self.keys, self.values = _moved(self.keys, move), _moved(self.values, move)
            self.base = move.base

    def write(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Put rows [G, n, D] at positions from `start` on. State: buffers."""
        at = slice(start - self.base, start - self.base + keys.shape[1])
        self.keys[:, at] = keys.astype(self.keys.dtype)
        self.values[:, at] = values.astype(self.values.dtype)


def _moved(old: mx.array, move: Move) -> mx.array:
    kept = old[:, move.held]
    rest = mx.zeros((old.shape[0], move.capacity - kept.shape[1], old.shape[2]), old.dtype)
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


class MlxCache(SlidingCache[SlotBuffer]):
    """One chat's slots."""

    def __init__(self, specs: tuple[KvSlot, ...], max_rows: int, dtype: mx.Dtype) -> None:
        super().__init__([SlotBuffer(spec, max_rows, dtype) for spec in specs])
        self._config = (specs, max_rows, dtype)

    @property
    def num_bytes(self) -> int:
        """Memory held, capacity included."""
        return sum(int(slot.keys.nbytes) + int(slot.values.nbytes) for slot in self.slots)

    def _reserve(self, slots: Sequence[SlotBuffer], length: int) -> None:
        try:
            with memory_for(lambda: self._no_memory(length)), restored_on_failure(slots):
                for slot in slots:
                    slot.reserve(self._length, length)
                mx.eval([(slot.keys, slot.values) for slot in slots])
        except (OverflowError, ValueError, TypeError) as error:  # no shape is that large
            raise self._no_memory(length) from error

    def _no_memory(self, length: int) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(
            f"a context of {length} tokens does not fit: {self.num_bytes} bytes are held "
            "and no more are free",
            hint="shorten the chat or lower --ctx-size",
        )

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
        """Valid contents in order of position, in the stored type. State: unchanged.

        Raises: OutOfDeviceMemory.
        """
        state: dict[str, np.ndarray] = {}
        with memory_for(lambda: self._no_memory(self._length)):
            for i, slot in enumerate(self.slots):
                held = slot.stored(self._length)
                state[f"k.{i}"] = np.array(slot.keys[:, held]).transpose(1, 0, 2)
                state[f"v.{i}"] = np.array(slot.values[:, held]).transpose(1, 0, 2)
                state[f"positions.{i}"] = np.arange(slot.first_stored(self._length), self._length)
        return state

    def import_state(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Replace the contents by an export. State: everything.

        Raises: OutOfDeviceMemory; BackendError on a misfit. The cache is then unchanged.
        """
        specs, max_rows, dtype = self._config
        parts = self._checked_parts(state, length, "float16" if dtype == mx.float16 else "float32")
        new = MlxCache(specs, max_rows, dtype)
        for slot in new.slots:
            slot.base = slot.first_stored(length)
        new.ensure_capacity(length)
        with memory_for(lambda: self._no_memory(length)):
            for slot, (keys, values) in zip(new.slots, parts, strict=True):
                by_head = (mx.array(part).swapaxes(0, 1) for part in (keys, values))
                slot.write(slot.base, *by_head)
            mx.eval([(slot.keys, slot.values) for slot in new.slots])
        self.slots, self._length = new.slots, length
