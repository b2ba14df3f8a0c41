"""One chat's keys and values for the native kernels: growing linear slots and window rings.

Layout (see `src/program.h`): blocks of 128 positions; keys [blocks, G, 8, D, 16] so that one load
holds the same dim of 16 keys, values [blocks, G, 128, D padded to 16]. A ring's position p lies at
p % ring; it grows like a linear slot until it is full size, so nothing moves when it wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backends.base import BackendError, OutOfDeviceMemory
from backends.native.library import SlotMemory
from backends.program import KvSlot

TILE = 16
"""Positions per tile (FT_KEY_TILE)."""
BLOCK = 128
"""Capacities are multiples of it (FT_KEY_BLOCK): a block of keys never wraps inside."""
START_CAPACITY = 256
"""Positions a cache has room for at first."""
MAX_LEN = 1 << 30
"""Positions are int32 inside the kernels."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What every cache of one program has in common."""

    slots: tuple[KvSlot, ...]
    rings: tuple[int, ...]
    """Positions of each slot's full ring; 0 keeps every position."""
    dtype: np.dtype[np.floating]
    """float16, or float32 for programs of F32 weights."""

    def position_bytes(self, index: int) -> int:
        """Memory of one position in a slot."""
        slot = self.slots[index]
        dims = slot.head_dim + -(-slot.head_dim // TILE) * TILE
        return slot.kv_heads * dims * self.dtype.itemsize


def ring_size(window: int, ahead: int) -> int:
    """Positions of a ring that lets `ahead` rows be written and taken back exactly.

    Row q needs q - window + 1 .. q, so window + ahead - 1 positions are enough; rounded up to
    whole blocks.
    """
    return -(-(window + ahead - 1) // BLOCK) * BLOCK


class NativeCache:
    """Keys and values of one chat. Knows no token ids."""

    def __init__(self, layout: CacheLayout, available_bytes: Callable[[], int]) -> None:
        self._layout = layout
        self._available_bytes = available_bytes
        self._length = 0
        self._first_held = [0] * len(layout.slots)
        self._keys: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        for slot in layout.slots:
            self._keys.append(self._blank_keys(slot, 0))
            self._values.append(self._blank_values(slot, 0))
        self.memory = (SlotMemory * max(1, len(layout.slots)))()
        """What the kernels see; up to date with the arrays."""

    @property
    def length(self) -> int:
        """Valid positions, in tokens."""
        return self._length

    @property
    def num_bytes(self) -> int:
        """Memory held, capacity included."""
        return sum(array.nbytes for array in (*self._keys, *self._values))

    @property
    def layout(self) -> CacheLayout:
        """What this cache has in common with its program's others."""
        return self._layout

    # Growing --------------------------------------------------------------------------------

    def ensure_capacity(self, length: int) -> None:
        """Make room for `length` tokens, doubling.

        State: capacity only. Raises: OutOfDeviceMemory; the cache is then unchanged.
        """
        wanted = [self._wanted_capacity(i, length) for i in range(len(self._layout.slots))]
        grown = [i for i, capacity in enumerate(wanted) if capacity > self._capacity(i)]
        if not grown:
            return
        if length > MAX_LEN:
            raise OutOfDeviceMemory(f"a cache holds at most {MAX_LEN} tokens, asked for {length}")
        needed = sum(wanted[i] * self._layout.position_bytes(i) for i in grown)
        free = self._available_bytes()
        if needed > free:
            raise self._no_memory(length, needed, free)
        try:
            fresh = [self._grown(i, wanted[i]) for i in grown]
        except MemoryError:
            raise self._no_memory(length, needed, free) from None
        for i, (keys, values) in zip(grown, fresh, strict=True):
            self._keys[i], self._values[i] = keys, values
            self.memory[i] = SlotMemory(keys.ctypes.data, values.ctypes.data, wanted[i])

    def _capacity(self, index: int) -> int:
        return len(self._keys[index]) * BLOCK

    def _wanted_capacity(self, index: int, length: int) -> int:
        held = self._capacity(index)
        if length <= held:
            return held
        capacity = max(START_CAPACITY, 2 * held, -(-length // BLOCK) * BLOCK)
        ring = self._layout.rings[index]
        return min(capacity, ring) if ring else capacity

    def _grown(self, index: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        slot, blocks = self._layout.slots[index], len(self._keys[index])
        keys = self._blank_keys(slot, capacity // BLOCK)
        values = self._blank_values(slot, capacity // BLOCK)
        keys[:blocks], values[:blocks] = self._keys[index], self._values[index]
        return keys, values

    # Zeros, not noise: masked positions are multiplied by 0, which must not meet a NaN.
    def _blank_keys(self, slot: KvSlot, blocks: int) -> np.ndarray:
        shape = (blocks, slot.kv_heads, BLOCK // TILE, slot.head_dim, TILE)
        return np.zeros(shape, self._layout.dtype)

    def _blank_values(self, slot: KvSlot, blocks: int) -> np.ndarray:
        padded = -(-slot.head_dim // TILE) * TILE
        return np.zeros((blocks, slot.kv_heads, BLOCK, padded), self._layout.dtype)

    def _no_memory(self, length: int, needed: int, free: int) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(
            f"a cache of {length} tokens needs {needed} more bytes, {free} are free",
            hint="start a new chat, or lower the context size",
        )

    # Moving ---------------------------------------------------------------------------------

    def advance(self, rows: int) -> None:
        """Count rows that the kernels appended. State: length."""
        self._length += rows
        for i, ring in enumerate(self._layout.rings):
            if ring:
                self._first_held[i] = max(self._first_held[i], self._length - ring)

    def can_rewind_to(self, length: int) -> bool:
        """Whether every position the next row would look at is still there."""
        if not 0 <= length <= self._length:
            return False
        if length in (0, self._length):
            return True
        return all(
            slot.window is None or max(0, length - slot.window + 1) >= first
            for slot, first in zip(self._layout.slots, self._first_held, strict=True)
        )

    def rewind_to(self, length: int) -> None:
        """Drop every position >= length. State: length.

        Raises: BackendError where `can_rewind_to` is false; the cache is then unchanged.
        """
        if not self.can_rewind_to(length):
            raise BackendError(
                f"a cache of {self._length} tokens cannot go back to {length}: its window "
                f"slots hold positions from {max(self._first_held)} on"
            )
        self._length = length
        if length == 0:
            self._first_held = [0] * len(self._first_held)

    def clone(self) -> NativeCache:
        """An independent copy that shares no buffer.

        State: self unchanged. Raises: OutOfDeviceMemory.
        """
        copy = NativeCache(self._layout, self._available_bytes)
        copy.ensure_capacity(self._length)
        for i in range(len(self._layout.slots)):
            blocks = min(len(self._keys[i]), len(copy._keys[i]))
            copy._keys[i][:blocks] = self._keys[i][:blocks]
            copy._values[i][:blocks] = self._values[i][:blocks]
        copy._length, copy._first_held = self._length, list(self._first_held)
        return copy

    # Saving ---------------------------------------------------------------------------------

    def export_state(self) -> Mapping[str, np.ndarray]:
        """Valid contents in logical order; a window slot gives its last `window` positions.

        Raises: MemoryError.
        """
        state: dict[str, np.ndarray] = {}
        for i in range(len(self._layout.slots)):
            positions = self._held_positions(i)
            block, inside = self._places(i, positions)
            tile, lane, dim = inside // TILE, inside % TILE, self._layout.slots[i].head_dim
            state[f"k.{i}"] = self._keys[i][block, :, tile, :, lane]
            state[f"v.{i}"] = self._values[i][block, :, inside, :dim]
            state[f"positions.{i}"] = positions
        return state

    def _held_positions(self, index: int) -> np.ndarray:
        window = self._layout.slots[index].window
        first = 0 if window is None else max(self._length - window, self._first_held[index])
        return np.arange(first, self._length, dtype=np.int64)

    def _places(self, index: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = positions % max(1, self._capacity(index))
        return places // BLOCK, places % BLOCK

    def import_state(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Replace the contents by an export of a cache of the same program. State: everything.

        Raises: OutOfDeviceMemory; BackendError on a shape or type that does not fit. The cache is
                then unchanged.
        """
        starts = [self._check_import(state, i, length) for i in range(len(self._layout.slots))]
        self.ensure_capacity(length)
        for i, start in enumerate(starts):
            block, inside = self._places(i, np.arange(start, length, dtype=np.int64))
            tile, lane, dim = inside // TILE, inside % TILE, self._layout.slots[i].head_dim
            self._keys[i][block, :, tile, :, lane] = state[f"k.{i}"]
            self._values[i][block, :, inside, :dim] = state[f"v.{i}"]
        self._length = length
        self._first_held = starts

    def _check_import(self, state: Mapping[str, np.ndarray], index: int, length: int) -> int:
        slot = self._layout.slots[index]
        keys, values = state.get(f"k.{index}"), state.get(f"v.{index}")
        if keys is None or values is None or length < 0:
            raise BackendError(f"the saved cache has no slot {index}")
        count = len(keys)
        needed = length if slot.window is None else min(length, slot.window - 1)
        shape = (count, slot.kv_heads, slot.head_dim)
        fits = keys.shape == values.shape == shape and needed <= count <= length
        fits = fits and (slot.window is None or count <= self._layout.rings[index])
        if not fits or keys.dtype != self._layout.dtype or values.dtype != self._layout.dtype:
            raise BackendError(
                f"the saved cache does not fit slot {index}: {keys.dtype} {keys.shape} and "
                f"{values.dtype} {values.shape} for {length} tokens of "
                f"{self._layout.dtype} [{slot.kv_heads}, {slot.head_dim}]"
            )
        return length - count


def plan_rings(slots: Sequence[KvSlot], ahead: Sequence[int]) -> tuple[int, ...]:
    """Ring positions per slot: 0 without a window, else room for `ahead` rows."""
    return tuple(
        0 if slot.window is None else ring_size(slot.window, rows)
        for slot, rows in zip(slots, ahead, strict=True)
    )
