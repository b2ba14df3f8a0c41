"""Puts a program's weights into the packed layout, tensor by tensor, and lets the file's pages go.

Nothing is held twice: after a tensor is packed the pages of the mapped file that held it are given
back. A type without kernels is dequantized to F16, and the notice says what that costs.
"""

from __future__ import annotations

import math
import mmap

import numpy as np

from backends.base import LoadProgress, OutOfDeviceMemory, UnsupportedWeight
from backends.native.library import GROUP, Matrix, ThreadPool, aligned_bytes, load_library
from backends.program import Weight

KERNEL_TYPES: dict[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}
"""Type name -> (ggml number, inputs per block, bytes per block). Source: ggml.h, ggml-common.h."""

DEQUANTIZE_ROWS = 4096
"""Rows dequantized at once: bounds the float32 scratch to a few hundred MB on the widest models."""


class WeightPacker:
    """Packs each weight object once; the program keeps them alive meanwhile."""

    def __init__(
        self, pool: ThreadPool, progress: LoadProgress | None = None, total_bytes: int = 0
    ) -> None:
        self._library = load_library()
        self._pool = pool
        self._progress = progress
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._packed: dict[int, list[Matrix]] = {}
        self._buffers: list[np.ndarray] = []
        self.notices: list[str] = []
        """One sentence per tensor that is kept in another type."""

    @property
    def num_bytes(self) -> int:
        """Memory the packed weights take."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def matrix(self, weight: Weight) -> Matrix:
        """The packed form of a matrix (out, in). Raises: UnsupportedWeight, OutOfDeviceMemory."""
        return self.experts(weight)[0]

    def experts(self, weight: Weight) -> list[Matrix]:
        """The packed form of a stack (experts, out, in), one matrix each; a matrix gives one."""
        if id(weight) not in self._packed:
            self._packed[id(weight)] = self._pack(weight)
            self._done_bytes += weight.data.nbytes
            if self._progress is not None and self._total_bytes:
                self._progress(min(1.0, self._done_bytes / self._total_bytes))
        return self._packed[id(weight)]

    def table(self, weight: Weight) -> Matrix:
        """A table that is only looked up: its rows stay in the mapped file, in the file's layout.

        Raises: UnsupportedWeight, OutOfDeviceMemory.
        """
        if weight.type not in KERNEL_TYPES:
            return self.matrix(weight)
        check_weight(weight)
        number, (rows, cols) = KERNEL_TYPES[weight.type][0], weight.shape
        if self._library.ft_group_bytes(number, cols) < 0:
            return self.matrix(weight)
        return Matrix(number, rows, cols, 0, weight.data.shape[1], weight.data.ctypes.data)

    def _pack(self, weight: Weight) -> list[Matrix]:
        count, out, cols = math.prod(weight.shape[:-2]), weight.shape[-2], weight.shape[-1]
        type_name, source = weight.type, weight.data
        if type_name in KERNEL_TYPES:
            check_weight(weight)
        else:
            type_name, source = "F16", self._dequantized(weight)
        number = KERNEL_TYPES[type_name][0]
        group_bytes = self._library.ft_group_bytes(number, cols)
        if group_bytes < 0:
            raise UnsupportedWeight(
                f"{weight.name}: {cols} inputs per row do not fit the type {type_name}"
            )
        groups = -(-out // GROUP)
        buffer = self._allocate(weight.name, count * groups * group_bytes)
        matrices = []
        for i in range(count):
            part = buffer[i * groups * group_bytes :]
            self._library.ft_pack_matrix(
                self._pool.handle,
                number,
                source[i * out :].ctypes.data,
                out,
                cols,
                part.ctypes.data,
            )
            matrices.append(Matrix(number, out, cols, groups, group_bytes, part.ctypes.data))
        release_pages(weight.data)
        return matrices

    def _allocate(self, name: str, size: int) -> np.ndarray:
        try:
            buffer = aligned_bytes(size)
        except MemoryError:
            raise OutOfDeviceMemory(
                f"{name} needs {size} bytes, which are not free",
                hint="close other programs or choose a smaller model",
            ) from None
        self._buffers.append(buffer)
        return buffer

    def _dequantized(self, weight: Weight) -> np.ndarray:
        """float16 rows of a type without kernels. Shapes: -> uint8 [rows, 2 * in]."""
        from gguf import GGMLQuantizationType, quants  # deferred: 0.24 s, and rarely needed

        rows, cols = weight.data.shape[0], weight.shape[-1]
        result = np.empty((rows, cols), np.float16)
        try:
            number = GGMLQuantizationType[weight.type]
            for start in range(0, rows, DEQUANTIZE_ROWS):
                part = weight.data[start : start + DEQUANTIZE_ROWS]
                result[start : start + DEQUANTIZE_ROWS] = quants.dequantize(part, number)
        except (KeyError, NotImplementedError, ValueError):
            raise UnsupportedWeight(
                f"{weight.name} has the type {weight.type}, which this program cannot read",
                hint="use a file in another quantization, for example Q4_K_M",
            ) from None
        self.notices.append(
            f"{weight.name}: no kernels for {weight.type}, kept as F16 "
            f"({result.nbytes} bytes instead of {weight.data.nbytes})"
        )
        return result.view(np.uint8)


def check_weight(weight: Weight) -> None:
    """The bytes are there and lie as the type says, so that a kernel never reads past them.

    Raises: UnsupportedWeight naming tensor, type and sizes.
    """
    _, block_len, block_bytes = KERNEL_TYPES[weight.type]
    rows, cols = math.prod(weight.shape[:-1]), weight.shape[-1]
    expected = (rows, cols // block_len * block_bytes)
    data = weight.data
    if cols % block_len or data.shape != expected or data.dtype != np.uint8:
        raise UnsupportedWeight(
            f"{weight.name}: type {weight.type} and shape {weight.shape} do not go with "
            f"{data.dtype} data of shape {data.shape} (expected uint8 {expected})"
        )
    if not data.flags.c_contiguous:
        raise UnsupportedWeight(f"{weight.name}: its rows do not lie one after another")


def release_pages(data: np.ndarray) -> None:
    """Tell the system that a packed tensor's part of the mapped file is not needed any more.

    Only where the array is a view of an mmap: the same advice would erase ordinary memory.
    """
    mapped = _mapping_under(data)
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    base = np.frombuffer(mapped, np.uint8).ctypes.data
    first = -(-(data.ctypes.data - base) // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (data.ctypes.data - base + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def _mapping_under(data: np.ndarray) -> mmap.mmap | None:
    base: object = data
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None
