"""One chat's keys and values on a torch device, in order of position (`backends.sliding_cache`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from backends.base import OutOfDeviceMemory
from backends.program import KvSlot
from backends.sliding_cache import Move, SlidingCache, SlidingSlot
from backends.torch_backend.memory import memory_for


class SlotBuffer(SlidingSlot):
    """One slot: keys and values [G, capacity, D]."""

    def __init__(
        self, spec: KvSlot, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, max_rows)
        shape = (spec.kv_heads, self.start_capacity, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def capacity(self) -> int:
        """Positions the buffer has room for, from `base` on."""
        return self.keys.shape[1]

    def moved(self, move: Move) -> tuple[Tensor, Tensor, int]:
        """Buffers and base after a move. State: unchanged, see `adopt`."""
        return _moved(self.keys, move), _moved(self.values, move), move.base

    def adopt(self, keys: Tensor, values: Tensor, base: int) -> None:
        """Use other buffers. State: contents, base."""
        self.keys, self.values, self.base = keys, values, base


def _moved(old: Tensor, move: Move) -> Tensor:
    new = old.new_zeros((old.shape[0], move.capacity, old.shape[2]))
    kept = old[:, move.held]
    new[:, : kept.shape[1]] = kept
    return new


class TorchCache(SlidingCache[SlotBuffer]):
    """One chat's slots on a device."""

    def __init__(
        self,
        specs: tuple[KvSlot, ...],
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__([SlotBuffer(spec, max_rows, dtype, device) for spec in specs])
        self._config = (specs, max_rows, dtype, device)
        self.generation = 0
        """Counts changes of buffers; a captured graph is good for one generation."""

    @property
    def num_bytes(self) -> int:
        """Memory held, capacity included."""
        return sum(slot.keys.nbytes + slot.values.nbytes for slot in self.slots)

    def _reserve(self, slots: Sequence[SlotBuffer], length: int) -> None:
        moves = [(slot, slot.move_for(self._length, length)) for slot in slots]
        with self._memory_for(length):
            moved = [(slot, slot.moved(move)) for slot, move in moves if move is not None]
        for slot, buffers in moved:
            slot.adopt(*buffers)
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
            held = slot.stored(self._length)
            with self._memory_for(self._length):
                state[f"k.{i}"] = slot.keys[:, held].transpose(0, 1).cpu().numpy().copy()
                state[f"v.{i}"] = slot.values[:, held].transpose(0, 1).cpu().numpy().copy()
            state[f"positions.{i}"] = np.arange(slot.first_stored(self._length), self._length)
        return state

    def import_state(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Replace the contents by an export. State: everything.

        Raises: OutOfDeviceMemory; BackendError on a misfit. The cache is then unchanged.
        """
        specs, max_rows, dtype, device = self._config
        parts = self._checked_parts(state, length, str(dtype).removeprefix("torch."))
        with self._memory_for(length):
            new = TorchCache(specs, max_rows, dtype, device)
            new._length = length
            for slot in new.slots:
                slot.base = slot.first_stored(length)
            new.ensure_capacity(length)
            for slot, (keys, values) in zip(new.slots, parts, strict=True):
                for buffer, part in ((slot.keys, keys), (slot.values, values)):
                    rows = torch.from_numpy(np.array(part)).to(device)
                    buffer[:, : len(rows)] = rows.transpose(0, 1)
        self.slots, self._length = new.slots, length
        self.generation += 1
