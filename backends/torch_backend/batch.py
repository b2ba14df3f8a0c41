"""The rows of one forward on a torch device: positions, looked-up embeddings, where keys go."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from backends.torch_backend.kv_cache import SlotBuffer, TorchCache

_EXTENT_STEP = 512
"""Keys a masked attention reads are rounded up to this, so that few shapes occur."""


@dataclass(slots=True)
class SlotRows:
    """Where the rows of a part go in one slot, and what they may see."""

    slot: SlotBuffer
    write_index: Tensor
    """int64 [rows], buffer index of each row's key."""
    base: Tensor
    """int64 scalar, position at buffer index 0."""
    extent: int
    """Keys a masked attention reads, from index 0 on."""

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Put rows [rows, G, D] in place. State: the slot's buffers, behind its valid length."""
        for buffer, new in ((self.slot.keys, keys), (self.slot.values, values)):
            buffer.index_copy_(1, self.write_index, new.transpose(0, 1).to(buffer.dtype))


@dataclass(slots=True)
class Part:
    """Rows of one chat, contiguous in the batch and in position."""

    first_row: int
    num_rows: int
    start: int
    """Position of the first row."""
    slots: list[SlotRows]
    is_appended: bool = True
    """False for a drafter's rows: all stand at the cache's length and see what is before it."""

    def position(self, row: int) -> int:
        """Where a row of the part stands."""
        return self.start + row * int(self.is_appended)

    @property
    def rows(self) -> slice:
        """Its rows of the batch."""
        return slice(self.first_row, self.first_row + self.num_rows)


@dataclass(slots=True)
class Batch:
    """All rows; P is their number padded to whole blocks."""

    num_rows: int
    positions: Tensor
    """int64 [P]."""
    looked_up: dict[int, Tensor]
    """Table rows float32 [P, width], by id of the operation that asks for them."""
    parts: list[Part]
    given: Tensor | None = None
    """Hidden rows float32 [P, given], for a drafter."""
    angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """cos and sin float32 [P, 1, pairs], by id of the Rope; filled when first needed."""


def extent_of(slot: SlotBuffer, end: int) -> int:
    """Keys a masked attention reads for rows up to position `end`, rounded up."""
    if slot.spec.window is not None:
        return slot.capacity
    return min(slot.capacity, -(-end // _EXTENT_STEP) * _EXTENT_STEP)


def part_of(
    cache: TorchCache, first_row: int, num_rows: int, device: torch.device, *, is_appended: bool
) -> Part:
    """The part that appends rows to a cache which has room for them, or only looks at it."""
    start = cache.length
    end = start + num_rows * int(is_appended)
    positions = torch.arange(num_rows, device=device) * int(is_appended) + start
    bases = {slot.base: torch.tensor(slot.base, device=device) for slot in cache.slots}
    write_at = {base: positions - tensor for base, tensor in bases.items()}
    slots = [
        SlotRows(slot, write_at[slot.base], bases[slot.base], extent_of(slot, end))
        for slot in cache.slots
    ]
    return Part(first_row, num_rows, start, slots, is_appended)
