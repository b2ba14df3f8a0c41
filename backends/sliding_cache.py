"""What caches with keys in order of position have in common; torch and MLX keep theirs so.

A slot is a buffer [G, capacity, D]. One that keeps everything grows by doubling. A windowed one
covers a sliding range: when it is full, the positions still needed move to its front. It always
holds `window + max_rows - 1` positions or more behind the newest, so that no row of a forward
misses a key and any `max_rows` rows can be taken back exactly. Against a ring addressed modulo its
capacity this costs one copy per few hundred tokens, and keys stay in order of position: the
attention reads one plain slice and sums in the same order as without a window.

Knows numbers only; the arrays are the backends'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from backends.base import BackendError
from backends.program import KvSlot

if TYPE_CHECKING:
    import numpy as np

_FIRST_CAPACITY = 256
_SLACK = 256
"""Positions a windowed slot takes in before it moves its contents to the front."""


class Move(NamedTuple):
    """How a buffer gets the room for more positions."""

    base: int
    """Position at index 0 of the new buffer."""
    capacity: int
    held: slice
    """What of the old buffer goes to the front of the new one."""


class SlidingSlot(ABC):
    """One slot. `base` is the position at index 0."""

    def __init__(self, spec: KvSlot, max_rows: int) -> None:
        self.spec = spec
        self.base = 0
        self._kept = 0 if spec.window is None else spec.window + max_rows - 1
        # Attention kernels on a GPU want masks whose rows are a multiple of 16 bytes.
        sliding = -(-(self._kept + max_rows + _SLACK) // 64) * 64
        self.start_capacity = 0 if spec.window is None else sliding

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Positions the buffer has room for, from `base` on."""

    def first_visible(self, position: int) -> int:
        """The oldest position a row at `position` sees."""
        return 0 if self.spec.window is None else max(0, position - self.spec.window + 1)

    def first_stored(self, length: int) -> int:
        """The oldest position of an export at a length: what its newest row sees."""
        return self.first_visible(length - 1) if length else 0

    def stored(self, length: int) -> slice:
        """Where an export at a length lies in the buffer."""
        return slice(self.first_stored(length) - self.base, length - self.base)

    def move_for(self, length: int, new_length: int) -> Move | None:
        """What makes room up to `new_length` behind `length` valid positions; None: there is room.

        Windowed: what lies more than `window + max_rows - 1` positions behind is let go.
        """
        if new_length - self.base <= self.capacity:
            return None
        base, capacity = 0, max(_FIRST_CAPACITY, self.capacity)
        if self.spec.window is not None:
            base = max(self.base, length - self._kept)
        else:
            while capacity < new_length:
                capacity *= 2
        return Move(base, capacity, slice(base - self.base, length - self.base))


Slot = TypeVar("Slot", bound=SlidingSlot)


class SlidingCache(ABC, Generic[Slot]):
    """One chat's slots; all have the same length."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self._length = 0

    @property
    def length(self) -> int:
        """Valid positions, in tokens."""
        return self._length

    def ensure_capacity(self, length: int) -> None:
        """Make room for `length` tokens in the slots that keep everything. State: capacity.

        Raises: OutOfDeviceMemory; the cache is then unchanged.
        """
        self._reserve([s for s in self.slots if s.spec.window is None], length)

    def ensure_rows(self, num_rows: int) -> None:
        """Make room for rows behind the newest, in every slot. State: capacity, bases.

        Raises: OutOfDeviceMemory; the cache is then unchanged.
        """
        self._reserve(self.slots, self._length + num_rows)

    @abstractmethod
    def _reserve(self, slots: Sequence[Slot], length: int) -> None:
        """Give some slots room up to `length`; all of them or none."""

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

    def _checked_parts(
        self, state: Mapping[str, np.ndarray], length: int, type_name: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values [n, G, D] of each slot of an export. Raises: BackendError on a misfit."""
        found = []
        for i, slot in enumerate(self.slots):
            num = length - slot.first_stored(length)
            shape = (num, slot.spec.kv_heads, slot.spec.head_dim)
            parts = [state[key] for key in (f"k.{i}", f"v.{i}") if key in state]
            if [(part.shape, part.dtype.name) for part in parts] != [(shape, type_name)] * 2:
                raise BackendError(f"the saved cache does not fit slot {i} of this model")
            found.append((parts[0], parts[1]))
        return found
