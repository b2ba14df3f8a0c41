"""Keys and values of one chat on a torch device.

A slot is a buffer [G, capacity, D] in order of position. One that keeps everything grows by
doubling. A windowed one covers a sliding range: when it is full, the positions still needed move
to its front. It always holds `window + max_rows - 1` positions or more behind the newest, so that
no row of a forward misses a key and any `max_rows` rows can be taken back exactly. Against a ring
addressed modulo its capacity this costs one copy per few hundred tokens, and keys stay in order of
position: the attention reads one plain slice and sums in the same order as without a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from backends.base import BackendError, OutOfDeviceMemory
from backends.program import KvSlot
from backends.torch_backend.memory import memory_for

_FIRST_CAPACITY = 256
_SLACK = 256
"""Positions a windowed slot takes in before it moves its contents to the front."""


def _rounded(capacity: int) -> int:
    # Attention kernels on a GPU want masks whose rows are a multiple of 16 bytes.
    return -(-capacity // 64) * 64


class SlotBuffer:
    """One slot. `base` is the position at index 0."""

    def __init__(
        self, spec: KvSlot, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.base = 0
        self._kept = 0 if spec.window is None else spec.window + max_rows - 1
        capacity = 0 if spec.window is None else _rounded(self._kept + max_rows + _SLACK)
        self.keys = torch.zeros(
            (spec.kv_heads, capacity, spec.head_dim), dtype=dtype, device=device
        )
        self.values = torch.zeros_like(self.keys)

    @property
    def capacity(self) -> int:
        """Positions the buffer has room for, from `base` on."""
        return self.keys.shape[1]

    def reserved(self, length: int, new_length: int) -> tuple[Tensor, Tensor, int]:
        """Buffers and base with room up to `new_length`. State: unchanged, see `adopt`.

        Windowed: what lies more than `_kept` positions behind `length` is let go.
        """
        if new_length - self.base <= self.capacity:
            return self.keys, self.values, self.base
        if self.spec.window is not None:
            base = max(self.base, length - self._kept)
            held = slice(base - self.base, length - self.base)
            return self._moved(self.keys, held), self._moved(self.values, held), base
        capacity = max(_FIRST_CAPACITY, self.capacity)
        while capacity < new_length:
            capacity *= 2
        held = slice(0, length)
        keys = self._moved(self.keys, held, capacity)
        return keys, self._moved(self.values, held, capacity), 0

    def _moved(self, old: Tensor, held: slice, capacity: int | None = None) -> Tensor:
        heads, own_capacity, dim = old.shape
        new = old.new_zeros((heads, capacity or own_capacity, dim))
        kept = old[:, held]
        new[:, : kept.shape[1]] = kept
        return new

    def adopt(self, keys: Tensor, values: Tensor, base: int) -> None:
        """Use other buffers. State: contents, base."""
        self.keys, self.values, self.base = keys, values, base

    def first_visible(self, position: int) -> int:
        """The oldest position a row at `position` sees."""
        return 0 if self.spec.window is None else max(0, position - self.spec.window + 1)


class TorchCache:
    """One chat's slots; all have the same length."""

    def __init__(
        self,
        specs: tuple[KvSlot, ...],
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = (specs, max_rows, dtype, device)
        self._length = 0
        self.generation = 0
        """Counts changes of buffers; a captured graph is good for one generation."""
        self.slots = [SlotBuffer(spec, max_rows, dtype, device) for spec in specs]

    @property
    def length(self) -> int:
        """Valid positions, in tokens."""
        return self._length

    @property
    def num_bytes(self) -> int:
        """Memory held, capacity included."""
        return sum(slot.keys.nbytes + slot.values.nbytes for slot in self.slots)

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

    def _reserve(self, slots: list[SlotBuffer], length: int) -> None:
        with self._memory_for(length):
            reserved = [slot.reserved(self._length, length) for slot in slots]
        for slot, (keys, values, base) in zip(slots, reserved, strict=True):
            if keys is not slot.keys:
                slot.adopt(keys, values, base)
                self.generation += 1

    def _memory_for(self, length: int) -> AbstractContextManager[None]:
        """Every allocation of a cache happens in here. Raises: OutOfDeviceMemory."""
        return memory_for(lambda: self._no_memory(length))

    def _no_memory(self, length: int) -> OutOfDeviceMemory:
        per_token = sum(
            2 * s.spec.kv_heads * s.spec.head_dim * s.keys.element_size()
            for s in self.slots
            if s.spec.window is None
        )
        return OutOfDeviceMemory(
            f"a context of {length} tokens needs {length * per_token} bytes, "
            f"{self.num_bytes} are held and no more are free",
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

    def clone(self) -> TorchCache:
        """An independent copy. State: unchanged. Raises: OutOfDeviceMemory."""
        with self._memory_for(self._length):
            copy = TorchCache(*self._config)
            for mine, slot in zip(self.slots, copy.slots, strict=True):
                slot.adopt(mine.keys.clone(), mine.values.clone(), mine.base)
        copy._length = self._length
        return copy

    def export_state(self) -> Mapping[str, np.ndarray]:
        """Valid contents in order of position, in the stored type. State: unchanged.

        Raises: OutOfDeviceMemory, MemoryError.
        """
        state: dict[str, np.ndarray] = {}
        for i, slot in enumerate(self.slots):
            first = slot.first_visible(self._length - 1) if self._length else 0
            held = slice(first - slot.base, self._length - slot.base)
            with self._memory_for(self._length):
                state[f"k.{i}"] = slot.keys[:, held].transpose(0, 1).cpu().numpy().copy()
                state[f"v.{i}"] = slot.values[:, held].transpose(0, 1).cpu().numpy().copy()
            state[f"positions.{i}"] = np.arange(first, self._length)
        return state

    def import_state(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Replace the contents by an export. State: everything.

        Raises: OutOfDeviceMemory; BackendError on a misfit. The cache is then unchanged.
        """
        specs, max_rows, dtype, device = self._config
        with self._memory_for(length):
            new = TorchCache(specs, max_rows, dtype, device)
        new._length = length
        for i, slot in enumerate(new.slots):
            slot.base = slot.first_visible(length - 1) if length else 0
            shape = (length - slot.base, slot.spec.kv_heads, slot.spec.head_dim)
            parts = [state.get(f"{part}.{i}") for part in "kv"]
            if any(p is None or p.shape != shape or torch_type(p) != dtype for p in parts):
                raise BackendError(f"the saved cache does not fit slot {i} of this model")
        new.ensure_capacity(length)
        for i, slot in enumerate(new.slots):
            for buffer, part in ((slot.keys, "k"), (slot.values, "v")):
                with self._memory_for(length):
                    rows = torch.from_numpy(np.array(state[f"{part}.{i}"])).to(device)
                buffer[:, : len(rows)] = rows.transpose(0, 1)
        self.slots, self._length = new.slots, length
        self.generation += 1


def torch_type(array: np.ndarray) -> torch.dtype | None:
    """The torch type of a stored array, or None for one no cache uses."""
    return {"float32": torch.float32, "float16": torch.float16}.get(array.dtype.name)
