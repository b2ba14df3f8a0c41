"""Programs on MLX: the GPU of an Apple Silicon machine (and MLX's CPU device, for tests).

Nothing is promised about equal bits: MLX chooses other kernels for other numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from backends.base import (
    BackendCaps,
    BackendError,
    LoadProgress,
    OutOfDeviceMemory,
    RowOutput,
    Segment,
    WantLogits,
    check_given,
    check_token_ids,
    wanted_rows,
)
from backends.mlx_backend.kv_cache import MlxCache, SlotBuffer, restored_on_failure
from backends.mlx_backend.matrix import Matrix, is_packed, placed_bytes
from backends.mlx_backend.memory import free_bytes, memory_for
from backends.mlx_backend.ops import OPS, Part, Rows, Weights
from backends.program import (
    Attention,
    Embed,
    EmbedWithHidden,
    Head,
    PerLayerInputs,
    Program,
    Weight,
)
from backends.reference_ops import dequantize
from backends.weights import growth_notices, has_float32_cache, matrix_weights, tables

if TYPE_CHECKING:
    from backends.base import Backend, Cache, Executable

_MAX_ROWS = 512
_LAZY_ROWS = 16
"""Most rows that are computed in one go: a decode step or an ordinary verify."""


class MlxBackend:
    """MLX's default device."""

    @property
    def name(self) -> str:
        """The name shown by `doctor`."""
        return "mlx"

    @property
    def device(self) -> str:
        """A person's name for the device."""
        return device_name()

    def compile(
        self,
        program: Program,
        *,
        progress: LoadProgress | None = None,
        reads: Executable | None = None,
    ) -> MlxExecutable:
        """Convert the weights.

        Raises: UnsupportedWeight, OutOfDeviceMemory.
        """
        for table in tables(program):
            look_up(table, [0])  # one nobody can read is refused now
        needed = self.placed_bytes(program)
        if needed > free_bytes():
            raise _no_room(f"the weights of {needed} bytes")
        weights, head = list(matrix_weights(program)), _head_weight(program)
        matrices: dict[int, Matrix] = {}
        for i, weight in enumerate(weights):
            matrices[id(weight)] = _placed(weight, is_head=weight is head)
            if progress is not None:
                progress((i + 1) / len(weights))
        model = MlxExecutable(program, matrices)
        grown = [w for w in weights if _grows(w, is_head=w is head)]
        model.notices += growth_notices(
            [weight for weight in grown if weight is not head],
            sum(weight.data.nbytes for weight in weights),
            needed,
            is_head_exact=head in grown,
        )
        return model

    def placed_bytes(self, program: Program) -> int:
        """Memory of the weights, which processor and GPU share."""
        head = _head_weight(program)
        return sum(placed_bytes(w, is_head=w is head) for w in matrix_weights(program))


def device_name() -> str:
    """A person's name for MLX's default device."""
    return f"{device_kind()}, MLX {version('mlx')}"


def device_kind() -> str:
    """GPU or CPU."""
    return "GPU" if mx.default_device().type == mx.gpu else "CPU"


def _head_weight(program: Program) -> Weight:
    head = program.ops[-1]
    assert isinstance(head, Head), "the last operation is the head"
    return head.weight


def _grows(weight: Weight, *, is_head: bool) -> bool:
    """Whether it is unpacked to more than in the file; MLX's own layout is wider by its scales."""
    return not is_packed(weight) and placed_bytes(weight, is_head=is_head) > weight.data.nbytes


def _placed(weight: Weight, *, is_head: bool) -> Matrix:
    with memory_for(lambda: _no_room(f"{weight.name} of {weight.data.nbytes} bytes")):
        return Matrix(weight, is_head=is_head)


def _no_room(what: str) -> OutOfDeviceMemory:
    return OutOfDeviceMemory(
        f"{what} do not fit: {free_bytes()} bytes are free",
        hint="close other programs or use a smaller model",
    )


def look_up(table: Weight, token_ids: list[int]) -> mx.array:
    """Rows of a table, unpacked from the mapped file. Shapes: -> float32 [R, width]."""
    rows = np.ascontiguousarray(table.data[token_ids])
    return mx.array(dequantize(Weight(table.name, table.type, (len(rows), table.shape[-1]), rows)))


class MlxExecutable:
    """A program with its weights in MLX arrays."""

    def __init__(self, program: Program, matrices: dict[int, Matrix]) -> None:
        self._program = program
        self.notices: list[str] = []
        self._weights = Weights(matrices)
        self._kv_type = mx.float32 if has_float32_cache(program) else mx.float16

    @property
    def caps(self) -> BackendCaps:
        """No equal bits."""
        return BackendCaps("mlx", device_name(), f"mlx {device_kind()}", False, False, _MAX_ROWS)

    @property
    def weight_bytes(self) -> int:
        """Memory of the matrices; tables that are only looked up stay in the mapped file."""
        return sum(matrix.num_bytes for matrix in self._weights.matrices.values())

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of the slots without a window."""
        slots = (slot for slot in self._program.slots if slot.window is None)
        return sum(2 * int(self._kv_type.size) * s.kv_heads * s.head_dim for s in slots)

    @property
    def free_bytes(self) -> int:
        """Memory that is free now: one memory for processor and GPU."""
        return free_bytes()

    def new_cache(self) -> MlxCache:
        """An empty cache."""
        return MlxCache(self._program.slots, _MAX_ROWS, self._kv_type)

    def forward(
        self,
        segments: Sequence[Segment],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
        hidden: np.ndarray | None = None,
    ) -> RowOutput:
        """Append and compute. State: each cache grows by its tokens once all rows are done."""
        num_rows = sum(len(segment.token_ids) for segment in segments)
        try:
            with memory_for(lambda: self._no_memory(num_rows)):
                rows = self._rows(
                    segments, want_logits, check_given(self._program, segments, hidden)
                )
                self._compute(rows)
        except RuntimeError as error:
            raise BackendError(f"MLX could not compute {num_rows} rows: {error}") from error
        output = RowOutput(
            None if rows.logits is None else np.array(rows.logits),
            np.array(rows.hidden) if want_hidden else None,
        )
        if self._program.grows_cache:
            for part in rows.parts:
                part.cache.advance(part.num_rows)
        return output

    def _compute(self, rows: Rows) -> None:
        """Run every operation. State: `rows`, the slots behind their valid length.

        Of a small forward everything is computed at once, in place: were the old arrays kept,
        every step would copy the whole cache. One that fails leaves rows waiting to be computed
        behind the valid ones, a few. A large one could not be afforded again, so it is computed
        slot by slot and the slot that fails is put back.
        """
        for op in self._program.ops:
            slots: list[SlotBuffer] = []
            if isinstance(op, Attention) and op.writes_kv and len(rows.positions) > _LAZY_ROWS:
                slots = [part.cache.slots[op.slot] for part in rows.parts]
            with restored_on_failure(slots):
                OPS[type(op)](op, rows, self._weights)
                if slots:
                    mx.eval([(slot.keys, slot.values) for slot in slots])
        written = [(s.keys, s.values) for part in rows.parts for s in part.cache.slots]
        mx.eval(written, rows.hidden, rows.logits)

    def _no_memory(self, num_rows: int) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(
            f"the activations of {num_rows} rows do not fit beside {self.weight_bytes} bytes of "
            f"weights: {free_bytes()} bytes are free",
            hint="close other programs, end other chats or use a smaller model",
        )

    def _rows(
        self, segments: Sequence[Segment], want_logits: WantLogits, given: np.ndarray | None
    ) -> Rows:
        token_ids = [token_id for segment in segments for token_id in segment.token_ids]
        if not 0 < len(token_ids) <= _MAX_ROWS:
            raise BackendError(f"a forward takes 1 to {_MAX_ROWS} rows, not {len(token_ids)}")
        check_token_ids(segments, self._program.vocab_size)
        parts: list[Part] = []
        for segment in segments:
            cache = segment.cache
            assert isinstance(cache, MlxCache), "a cache belongs to the backend that made it"
            grows = self._program.grows_cache
            if grows:
                cache.ensure_rows(len(segment.token_ids))
            first_row = parts[-1].rows.stop if parts else 0
            rows = slice(first_row, first_row + len(segment.token_ids))
            parts.append(Part(cache, rows, cache.length, grows))
        return Rows(
            np.concatenate([part.positions for part in parts]),
            parts,
            {
                id(op): look_up(op.table, token_ids)
                for op in self._program.ops
                if isinstance(op, (Embed, EmbedWithHidden, PerLayerInputs))
            },
            list(wanted_rows(segments, want_logits)),
            None if given is None else mx.array(given),
        )

    def close(self) -> None:
        """Release the weights."""
        self._weights.matrices.clear()
        self._weights.constants.clear()


if TYPE_CHECKING:
    _backend: type[Backend] = MlxBackend
    _executable: type[Executable] = MlxExecutable
    _cache: type[Cache] = MlxCache
