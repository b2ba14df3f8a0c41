"""Puts a program's weights into the packed layout, tensor by tensor, and lets the file's pages go.

Nothing is held twice: after a tensor is packed the pages of the mapped file that held it are given
back. A type without kernels is dequantized to F16, which can take eight times its bytes.
"""

from __future__ import annotations

import math
import mmap

import numpy as np

from backends.base import LoadProgress, OutOfDeviceMemory, UnsupportedWeight
from backends.native.library import GROUP, Matrix, ThreadPool, aligned_bytes, load_library
from backends.program import Program, Weight
from backends.weights import matrix_weights, tables

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
"""Rows dequantized at once, whole groups: bounds the float32 scratch to a few hundred MB on the
widest models."""


def packed_weights(program: Program) -> list[Weight]:
    """Every weight that is packed, once: the matrices, and tables whose rows nothing can read."""
    unread = [table for table in tables(program) if table.type not in KERNEL_TYPES]
    return list({id(weight): weight for weight in (*matrix_weights(program), *unread)}.values())


def packed_type(weight: Weight) -> str:
    """The type a weight is kept in: its own, or F16 where that has no kernels."""
    return weight.type if weight.type in KERNEL_TYPES else "F16"


def packed_bytes(weight: Weight) -> int:
    """Memory a weight takes when packed. Raises: UnsupportedWeight."""
    count, out, cols = math.prod(weight.shape[:-2]), weight.shape[-2], weight.shape[-1]
    return count * -(-out // GROUP) * _group_bytes(weight, cols)


def _group_bytes(weight: Weight, cols: int) -> int:
    number = KERNEL_TYPES[packed_type(weight)][0]
    group_bytes = int(load_library().ft_group_bytes(number, cols))
    if group_bytes < 0:
        raise UnsupportedWeight(
            f"{weight.name}: {cols} inputs per row do not fit the type {packed_type(weight)}"
        )
    return group_bytes


class WeightPacker:
    """Packs each weight object once; the program keeps them alive meanwhile."""

    def __init__(
        self, pool: ThreadPool, progress: LoadProgress | None = None, total_bytes: int = 0
    ) -> None:
        """`total_bytes`: what all weights take when packed, for the progress."""
        self._library = load_library()
        self._pool = pool
        self._progress = progress
        self._total_bytes = total_bytes
        self._packed: dict[int, list[Matrix]] = {}
        self._buffers: list[np.ndarray] = []

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
            if self._progress is not None and self._total_bytes:
                self._progress(self.num_bytes / self._total_bytes)
        return self._packed[id(weight)]

    def table(self, weight: Weight) -> Matrix:
        """A table that is only looked up: its rows stay in the mapped file, in the file's layout.

        Raises: UnsupportedWeight, OutOfDeviceMemory.
        """
        if weight.type not in KERNEL_TYPES:
            return self.matrix(weight)
        check_weight(weight)
        number, (rows, cols) = KERNEL_TYPES[weight.type][0], weight.shape
        _group_bytes(weight, cols)  # raises for more columns than the kernels unpack
        return Matrix(number, rows, cols, 0, weight.data.shape[1], weight.data.ctypes.data)

    def _pack(self, weight: Weight) -> list[Matrix]:
        out, cols = weight.shape[-2:]
        has_kernels = weight.type in KERNEL_TYPES
        if has_kernels:
            check_weight(weight)
        elif len(weight.data) != math.prod(weight.shape[:-1]):
            raise UnsupportedWeight(f"{weight.name}: {len(weight.data)} rows, not {weight.shape}")
        number, group_bytes = KERNEL_TYPES[packed_type(weight)][0], _group_bytes(weight, cols)
        groups = -(-out // GROUP)
        buffer = self._allocate(weight.name, packed_bytes(weight))
        matrices = []
        for i in range(math.prod(weight.shape[:-2])):
            part, rows = buffer[i * groups * group_bytes :], weight.data[i * out : (i + 1) * out]
            step = out if has_kernels else DEQUANTIZE_ROWS
            for start in range(0, out, step):
                piece = rows[start : start + step]
                source = piece if has_kernels else dequantized(weight, piece)
                self._library.ft_pack_matrix(
                    self._pool.handle,
                    number,
                    source.ctypes.data,
                    len(piece),
                    cols,
                    part[start // GROUP * group_bytes :].ctypes.data,
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


def dequantized(weight: Weight, rows: np.ndarray) -> np.ndarray:
    """Some rows of a weight whose type has no kernels.

    Shapes: rows uint8 [n, row_bytes] -> float16 [n, in]. Raises: UnsupportedWeight.
    """
    from gguf import GGMLQuantizationType, quants  # deferred: 0.24 s, and rarely needed

    try:
        values = quants.dequantize(rows, GGMLQuantizationType[weight.type])
    except (KeyError, NotImplementedError, ValueError):
        raise UnsupportedWeight(
            f"{weight.name} has the type {weight.type}, which this program cannot read",
            hint="use a file in another quantization, for example Q4_K_M",
        ) from None
    if values.shape != (len(rows), weight.shape[-1]):
        raise UnsupportedWeight(f"{weight.name}: its bytes do not go with its shape {weight.shape}")
    return np.asarray(values.astype(np.float16))


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
