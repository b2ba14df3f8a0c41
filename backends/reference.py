"""The oracle: a program in plain numpy, one row at a time, in float64.

Other backends are tested against it. It is written to be read, not to be fast: a cache is a list
of rows that keeps every position (windows only limit what is looked at), and a row runs through
all operations before the next one starts. So a row's bits cannot depend on the rows beside it,
and rewinding is always exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import psutil

from backends.base import (
    BackendCaps,
    BackendError,
    LoadProgress,
    RowOutput,
    Segment,
    WantLogits,
    check_given,
    check_token_ids,
)
from backends.program import Program
from backends.reference_ops import OPS, Matrices, RowState, SlotRows
from backends.weights import matrix_weights

if TYPE_CHECKING:
    from backends.base import Backend, Cache, Executable


class ReferenceCache:
    """Every position of every slot, in lists."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._length = 0
        self.slots = [SlotRows(s.kv_heads, s.head_dim, s.window) for s in program.slots]

    @property
    def length(self) -> int:
        """Valid positions, in tokens."""
        return self._length

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(a.nbytes for slot in self.slots for a in (*slot.keys, *slot.values))

    def advance(self) -> None:
        """Count the row that was just appended to the slots. State: length."""
        self._length += 1

    def ensure_capacity(self, length: int) -> None:
        """Lists grow by themselves. State: unchanged."""

    def can_rewind_to(self, length: int) -> bool:
        """Always: nothing is ever overwritten."""
        return 0 <= length <= self._length

    def rewind_to(self, length: int) -> None:
        """Drop every position >= length. State: length, slots."""
        if not self.can_rewind_to(length):
            raise BackendError(f"cannot rewind a cache of {self._length} tokens to {length}")
        self._length = length
        for slot in self.slots:
            del slot.keys[length:], slot.values[length:]

    def clone(self) -> ReferenceCache:
        """An independent copy. State: unchanged."""
        copy = ReferenceCache(self._program)
        copy._length = self._length
        for mine, theirs in zip(self.slots, copy.slots, strict=True):
            theirs.keys, theirs.values = (
                [k.copy() for k in mine.keys],
                [v.copy() for v in mine.values],
            )
        return copy

    def export_state(self) -> Mapping[str, np.ndarray]:
        """Valid contents, float64; a window slot gives its last `window` positions."""
        state: dict[str, np.ndarray] = {}
        for i, slot in enumerate(self.slots):
            first = 0 if slot.window is None else max(0, self._length - slot.window)
            shape = (self._length - first, slot.kv_heads, slot.head_dim)
            state[f"k.{i}"] = np.array(slot.keys[first:]).reshape(shape)
            state[f"v.{i}"] = np.array(slot.values[first:]).reshape(shape)
            state[f"positions.{i}"] = np.arange(first, self._length)
        return state

    def import_state(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Replace the contents. State: everything.

        Positions before an imported window become zeros, which no later row looks at; rewinding
        behind them is therefore not exact after an import.
        """
        loaded = []
        for i, slot in enumerate(self.slots):
            first = 0 if slot.window is None else max(0, length - slot.window)
            shape = (length - first, slot.kv_heads, slot.head_dim)
            parts = [state[f"{part}.{i}"] for part in "kv"]
            if any(part.shape != shape or part.dtype != np.float64 for part in parts):
                raise BackendError(f"the saved cache does not fit slot {i} of this model")
            blank = [np.zeros(shape[1:])] * first
            loaded.append([blank + list(part.copy()) for part in parts])
        for slot, (keys, values) in zip(self.slots, loaded, strict=True):
            slot.keys, slot.values = keys, values
        self._length = length


class ReferenceExecutable:
    """A program with its weights in float64."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._matrices = Matrices()
        self.notices: list[str] = []

    @property
    def caps(self) -> BackendCaps:
        """Rows are computed one by one: both kinds of independence hold by construction."""
        return BackendCaps("reference", "numpy, float64", "reference", True, True, max_rows=512)

    @property
    def weight_bytes(self) -> int:
        """Memory of the matrices used so far."""
        return self._matrices.num_bytes

    @property
    def cache_bytes_per_token(self) -> int:
        """Two float64 rows per slot without a window."""
        return sum(16 * s.kv_heads * s.head_dim for s in self._program.slots if s.window is None)

    @property
    def free_bytes(self) -> int:
        """Main memory that can be taken without swapping."""
        return int(psutil.virtual_memory().available)

    def new_cache(self) -> ReferenceCache:
        """An empty cache."""
        return ReferenceCache(self._program)

    def forward(
        self,
        segments: Sequence[Segment],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
        hidden: np.ndarray | None = None,
    ) -> RowOutput:
        """Append and compute, one row after another. State: each cache grows by its tokens."""
        check_token_ids(segments, self._program.vocab_size)
        given = check_given(self._program, segments, hidden)
        lengths = [segment.cache.length for segment in segments]
        rows: list[RowState] = []
        try:
            for segment in segments:
                own = None if given is None else given[len(rows) :]
                rows += self._forward_one(segment, want_logits, own)
        except BaseException:
            for segment, length in zip(segments, lengths, strict=True):
                self._drop_from(segment, length)
            raise
        logits = [row.logits for row in rows if row.logits is not None]
        return RowOutput(
            np.array(logits, np.float32) if logits else None,
            np.array([row.hidden for row in rows], np.float32) if want_hidden else None,
        )

    def _forward_one(
        self, segment: Segment, want_logits: WantLogits, given: np.ndarray | None
    ) -> list[RowState]:
        cache = segment.cache
        assert isinstance(cache, ReferenceCache), "a cache belongs to the backend that made it"
        rows = []
        for i, token_id in enumerate(segment.token_ids):
            is_last = i == len(segment.token_ids) - 1
            row = RowState(
                token_id,
                cache.length,
                cache.slots,
                [np.zeros(width) for width in self._program.widths],
                wants_logits=want_logits == "all" or (want_logits == "last" and is_last),
                given=None if given is None else given[i].astype(np.float64),
            )
            for op in self._program.ops:
                OPS[type(op)](op, row, self._matrices)
            if self._program.grows_cache:
                cache.advance()
            rows.append(row)
        return rows

    @staticmethod
    def _drop_from(segment: Segment, length: int) -> None:
        assert isinstance(segment.cache, ReferenceCache), "checked when the row ran"
        segment.cache.rewind_to(length)

    def close(self) -> None:
        """Release the weights."""
        self._matrices.clear()


class ReferenceBackend:
    """numpy on any machine: the last resort, and what tests compare with."""

    @property
    def name(self) -> str:
        """The name shown by `doctor`."""
        return "reference"

    def placed_bytes(self, program: Program) -> int:
        """What the file holds: a matrix is dequantized when it is first used."""
        return sum(weight.data.nbytes for weight in matrix_weights(program))

    def compile(
        self,
        program: Program,
        *,
        progress: LoadProgress | None = None,
        reads: Executable | None = None,
    ) -> ReferenceExecutable:
        """Nothing to lay out: matrices are dequantized when first used."""
        if progress is not None:
            progress(1.0)
        return ReferenceExecutable(program)


if TYPE_CHECKING:
    _backend: type[Backend] = ReferenceBackend
    _executable: type[Executable] = ReferenceExecutable
    _cache: type[Cache] = ReferenceCache
