"""A program with its weights packed: one call into the library per forward, rows of any chats.

Checks everything the kernels will trust (token ids, cache kinds, row counts) before the call, and
moves cache lengths only after it: a forward happens whole or not at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from backends.base import (
    BackendCaps,
    BackendError,
    LoadProgress,
    OutOfDeviceMemory,
    RowOutput,
    Segment,
    UnsupportedWeight,
    WantLogits,
    check_given,
    check_token_ids,
    wanted_rows,
)
from backends.native.kv_cache import CacheLayout, NativeCache, plan_rings
from backends.native.library import (
    ForwardArgs,
    Kernels,
    SegmentSpec,
    ThreadPool,
    load_library,
)
from backends.native.translate import Translator
from backends.native.weights import WeightPacker, packed_bytes, packed_type, packed_weights
from backends.program import Attention, Program
from backends.weights import growth_notices, has_float32_cache

if TYPE_CHECKING:
    from backends.base import Executable

MAX_ROWS = 512
"""Most rows of a forward: enough to keep prefill compute-bound, and bounds the buffers."""
MAX_VERIFY_ROWS = 65
"""Rings keep what a verify of this many rows may take back (64 drafts and the last token)."""
SHARED_RING_ROWS = 128
"""Most rows of a forward where layers read another layer's ring: they look at all fresh rows at
once, so the ring must hold window and rows."""
PHASE_OF_KIND = (
    "embed",
    "project",
    "attention",
    "project",
    "ffn",
    "ffn",
    "other",
    "head",
    "other",
    "other",
    "embed",
)
"""Phase of each op kind, in the order of `enum ft_op_kind` (program.h)."""

BIG_LOGITS = 64 << 20
"""Bytes of logits above which the buffer is given back when fewer rows are wanted again."""


class NativeExecutable:
    """Weights, buffers and thread pool of one model."""

    def __init__(
        self,
        program: Program,
        kernels: Kernels,
        pool: ThreadPool,
        available_bytes: Callable[[], int],
        progress: LoadProgress | None = None,
        reads: NativeExecutable | None = None,
    ) -> None:
        """Pack the weights. `reads`: a drafter's target, whose caches it looks at.

        Raises: UnsupportedWeight, OutOfDeviceMemory.
        """
        self._library = load_library()
        self._program = program
        self._kernels = kernels
        self._pool = pool
        self._available_bytes = available_bytes
        weights = packed_weights(program)
        total_bytes = sum(map(packed_bytes, weights))
        free = available_bytes()
        if total_bytes > free:
            raise OutOfDeviceMemory(
                f"the weights need {total_bytes} bytes, {free} are free",
                hint="close other programs or choose a smaller model",
            )
        self._packer = WeightPacker(pool, progress, total_bytes)
        self.notices = growth_notices(
            [weight for weight in weights if packed_type(weight) != weight.type],
            sum(weight.data.nbytes for weight in weights),
            total_bytes,
        )
        self._layout: CacheLayout = _cache_layout(program) if reads is None else reads._layout
        if self._layout.slots != program.slots:
            raise UnsupportedWeight("a drafter looks at other slots than its target has")
        self._max_rows = _most_rows(program)
        translator = Translator(program, self._packer, self._layout.rings)
        spec = translator.spec(is_f32_cache=self._layout.dtype == np.float32)
        self._kept = translator.kept
        self._handle = self._library.ft_program_new(ctypes.byref(spec), kernels.handle)
        if not self._handle:
            raise OutOfDeviceMemory("no memory for the program", hint="close other programs")
        self._logits = np.empty((0, program.vocab_size), np.float32)
        self._argmax = np.empty(self._max_rows, np.int32)
        self._kind_ns = np.zeros(len(PHASE_OF_KIND), np.int64)
        self._hidden = np.empty((0, program.hidden_size), np.float32)

    @property
    def caps(self) -> BackendCaps:
        """Every sum has one fixed order, so rows and chunk boundaries change no bit."""
        device = f"CPU, {self._kernels.name}, {self._pool.threads} threads"
        arithmetic = f"native {self._kernels.name}"
        return BackendCaps("native", device, arithmetic, True, True, self._max_rows)

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return self._packer.num_bytes

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory one token takes in the slots that keep every position."""
        slots = range(len(self._layout.slots))
        return sum(self._layout.position_bytes(i) for i in slots if not self._layout.rings[i])

    @property
    def free_bytes(self) -> int:
        """Main memory that can be taken without swapping."""
        return self._available_bytes()

    def new_cache(self) -> NativeCache:
        """An empty cache."""
        return NativeCache(self._layout, self._available_bytes)

    # Forward --------------------------------------------------------------------------------

    def forward(
        self,
        segments: Sequence[Segment],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
        hidden: np.ndarray | None = None,
    ) -> RowOutput:
        """Append each segment's tokens to its cache and compute the wanted rows in one call.

        Shapes: R = total tokens <= caps.max_rows; logits [rows wanted, V] float32; `hidden`
                [R, given_size] float32, for a drafter.
        State:  each cache grows by its segment's tokens, a drafter's by none; nothing changes
                when it raises.
        Raises: OutOfDeviceMemory, BackendError.
        """
        token_ids = self._checked_ids(segments)
        wanted = np.array(wanted_rows(segments, want_logits), np.int32)
        caches = self._checked_caches(segments)
        given = check_given(self._program, segments, hidden)
        grows = self._program.grows_cache
        for segment, cache in zip(segments, caches, strict=True):
            if grows:
                cache.ensure_capacity(cache.length + len(segment.token_ids))
        self._reserve(2 * len(wanted), len(token_ids) if want_hidden else 0)
        specs = (SegmentSpec * len(caches))()
        for spec, segment, cache in zip(specs, segments, caches, strict=True):
            spec.slots, spec.start, spec.rows = cache.memory, cache.length, len(segment.token_ids)
        self._kind_ns.fill(0)
        args = ForwardArgs(
            token_ids.ctypes.data,
            specs,
            wanted.ctypes.data,
            self._logits.ctypes.data,
            self._argmax.ctypes.data,
            self._hidden.ctypes.data if want_hidden else None,
            None if given is None else given.ctypes.data,
            self._kind_ns.ctypes.data,
            len(caches),
            len(wanted),
        )
        if self._library.ft_forward(self._handle, self._pool.handle, ctypes.byref(args)):
            raise OutOfDeviceMemory(
                f"no memory for the buffers of {len(token_ids)} rows", hint="close other programs"
            )
        for segment, cache in zip(segments, caches, strict=True):
            if grows:
                cache.advance(len(segment.token_ids))
        return RowOutput(
            self._logits[: len(wanted)] if len(wanted) else None,
            self._hidden[: len(token_ids)] if want_hidden else None,
            self._argmax[: len(wanted)] if len(wanted) else None,
        )

    def _checked_ids(self, segments: Sequence[Segment]) -> np.ndarray:
        flat = [token_id for segment in segments for token_id in segment.token_ids]
        if not flat or not all(len(segment.token_ids) for segment in segments):
            raise BackendError("a forward needs at least one token of every chat")
        if len(flat) > self._max_rows:
            raise BackendError(f"{len(flat)} rows in one forward, at most {self._max_rows} fit")
        check_token_ids(segments, self._program.vocab_size)
        return np.array(flat, np.int32)

    def _checked_caches(self, segments: Sequence[Segment]) -> list[NativeCache]:
        if not self._handle:
            raise BackendError("the model was closed")
        caches: list[NativeCache] = []
        for segment in segments:
            cache = segment.cache
            if not isinstance(cache, NativeCache) or cache.layout is not self._layout:
                raise BackendError("a cache of another model was passed to a forward")
            if any(cache is other for other in caches):
                raise BackendError("the same cache was passed twice to one forward")
            caches.append(cache)
        return caches

    def _reserve(self, logit_rows: int, hidden_rows: int) -> None:
        vocab_size, held = self._program.vocab_size, len(self._logits)
        is_wasteful = self._logits.nbytes > BIG_LOGITS and logit_rows * 4 < held
        if logit_rows > held or is_wasteful:
            self._logits = np.empty((0, vocab_size), np.float32)
            self._logits = np.empty((logit_rows, vocab_size), np.float32)
        if hidden_rows > len(self._hidden):
            self._hidden = np.empty((hidden_rows, self._program.hidden_size), np.float32)

    def phase_ms(self) -> dict[str, float]:
        """Milliseconds of the last forward by phase, on the calling thread."""
        times: dict[str, float] = {}
        for phase, num_ns in zip(PHASE_OF_KIND, self._kind_ns, strict=True):
            times[phase] = times.get(phase, 0.0) + float(num_ns) / 1e6
        return times

    def close(self) -> None:
        """Release weights and buffers. State: forwards raise from now on."""
        if self._handle:
            self._library.ft_program_free(self._handle)
        self._handle = None
        self._packer = WeightPacker(self._pool)
        self._kept = []


def _cache_layout(program: Program) -> CacheLayout:
    shared = _shared_slots(program)
    ahead = [
        SHARED_RING_ROWS if i in shared else MAX_VERIFY_ROWS for i in range(len(program.slots))
    ]
    is_f32 = has_float32_cache(program)
    dtype = np.dtype(np.float32) if is_f32 else np.dtype(np.float16)
    return CacheLayout(program.slots, plan_rings(program.slots, ahead), dtype)


def _shared_slots(program: Program) -> set[int]:
    """Slots that a layer reads without writing them."""
    return {op.slot for op in program.ops if isinstance(op, Attention) and not op.writes_kv}


def _most_rows(program: Program) -> int:
    shared = [program.slots[i] for i in _shared_slots(program)]
    return SHARED_RING_ROWS if any(slot.window is not None for slot in shared) else MAX_ROWS


if TYPE_CHECKING:
    _: type[Executable] = NativeExecutable
