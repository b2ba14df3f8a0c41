"""The native kernels called one by one through ctypes: what the tests of packing and matmul share."""

from __future__ import annotations

import ctypes
import functools
import platform
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)

import numpy as np
from gguf import GGMLQuantizationType, quants

from backends.native.library import load_library

QUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
)
FLOATS = ("F32", "F16", "BF16")
IS_ARM = platform.machine() in ("arm64", "aarch64")
KERNELS = (
    ("neon-dotprod", "portable")
    if IS_ARM
    else ("avx512-vnni+amx", "avx512-vnni", "avx-vnni", "avx2", "portable")
)

# Byte offsets of the f16 fields of one file block: random bytes there would give infinities.
# Source: struct definitions in ggml-common.h.
F16_FIELDS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "MXFP4": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}


class Matrix(Structure):
    _fields_ = (
        ("type", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("groups", c_int32),
        ("group_bytes", c_int64),
        ("data", c_void_p),
    )


class Acts(Structure):
    _fields_ = (
        ("cols", c_int32),
        ("blocks", c_int32),
        ("ldx", c_int64),
        ("x", c_void_p),
        ("q", c_void_p),
        ("scale", c_void_p),
        ("sum16", c_void_p),
    )


class Kernels(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("quantize", CFUNCTYPE(None, POINTER(Acts), c_int, c_int)),
        (
            "matmul",
            CFUNCTYPE(
                None,
                *(POINTER(Matrix), POINTER(Acts), c_int, c_int),
                *(c_void_p, c_int64, c_int, c_int, c_void_p),
            ),
        ),
    )


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed uint8 [nbytes] that starts at a multiple of 64."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


@functools.cache
def kernel_library() -> ctypes.CDLL:
    """The package's own library with the calls its Python side has no use for."""
    library = ctypes.CDLL(load_library()._name)
    library.ft_kernels_select.argtypes = (c_char_p,)
    library.ft_kernels_select.restype = POINTER(Kernels)
    library.ft_matmul_scratch_bytes.restype = c_size_t
    library.ft_group_bytes.argtypes = (c_int32, c_int64)
    library.ft_group_bytes.restype = c_int64
    library.ft_pack.argtypes = (c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64)
    library.ft_unpack_row.argtypes = (POINTER(Matrix), c_int64, POINTER(c_float))
    library.ft_type_uses_int8.argtypes = (c_int32,)
    return library


def type_number(type_name: str) -> int:
    return int(GGMLQuantizationType[type_name])


def random_rows(type_name: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, row_bytes]: every bit pattern of codes and scales, f16 fields of sane size."""
    if type_name == "F32":
        return rng.standard_normal((rows, cols)).astype(np.float32).view(np.uint8)
    if type_name == "F16":
        return rng.standard_normal((rows, cols)).astype(np.float16).view(np.uint8)
    if type_name == "BF16":
        bits = rng.standard_normal((rows, cols)).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8)
    inputs, nbytes = quants.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    data = rng.integers(0, 256, (rows, cols // inputs, nbytes), dtype=np.uint8)
    for offset in F16_FIELDS[type_name]:
        values = (rng.standard_normal(data.shape[:2]) * 0.01).astype(np.float16)
        data[:, :, offset : offset + 2] = values[..., None].view(np.uint8)
    if type_name == "MXFP4":
        data[:, :, 0] = rng.integers(110, 130, data.shape[:2])
    return data.reshape(rows, -1)


def dequantized(type_name: str, data: np.ndarray) -> np.ndarray:
    """float32 [rows, cols], gguf-py's values."""
    return np.asarray(quants.dequantize(data, GGMLQuantizationType[type_name]), np.float32)


class PackedMatrix:
    """A matrix in packed layout that owns its bytes."""

    def __init__(self, library: ctypes.CDLL, type_name: str, data: np.ndarray, cols: int) -> None:
        self.library = library
        number, rows = type_number(type_name), data.shape[0]
        self.rows, self.cols, self.groups = rows, cols, (rows + 15) // 16
        self.group_bytes = library.ft_group_bytes(number, cols)
        self.packed = aligned(self.groups * self.group_bytes)
        data = np.ascontiguousarray(data)
        address = self.packed.ctypes.data
        library.ft_pack(number, data.ctypes.data, rows, cols, address, 0, self.groups)
        self.struct = Matrix(number, rows, cols, self.groups, self.group_bytes, address)

    def row(self, index: int) -> np.ndarray:
        out = np.empty(self.cols, np.float32)
        self.library.ft_unpack_row(byref(self.struct), index, out.ctypes.data_as(POINTER(c_float)))
        return out


class Activations:
    """Rows of activations with room for their quantized form."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = np.ascontiguousarray(x, np.float32)
        rows, cols = x.shape
        blocks = (cols + 31) // 32
        self.q = np.full((rows, blocks * 32), 99, np.int8)
        self.scale = np.full((rows, blocks), np.nan, np.float32)
        self.sum16 = np.full((rows, blocks, 2), 9999, np.int16)
        self.struct = Acts(
            cols,
            blocks,
            cols,
            self.x.ctypes.data,
            self.q.ctypes.data,
            self.scale.ctypes.data,
            self.sum16.ctypes.data,
        )


class NativeKernels:
    """One instruction set's quantize and matmul."""

    def __init__(self, library: ctypes.CDLL, name: str | None = None) -> None:
        chosen = library.ft_kernels_select(None if name is None else name.encode())
        self.is_here = bool(chosen)
        self.scratch = aligned(library.ft_matmul_scratch_bytes())
        if self.is_here:
            self.struct = chosen.contents
            self.name = self.struct.name.decode()

    def quantize(self, acts: Activations) -> Activations:
        self.struct.quantize(byref(acts.struct), 0, acts.x.shape[0])
        return acts

    def matmul(self, matrix: PackedMatrix, x: np.ndarray) -> np.ndarray:
        """float32 [R, rows]: every group, rows quantized here."""
        acts = self.quantize(Activations(x))
        y = np.full((x.shape[0], matrix.rows), np.nan, np.float32)
        self.matmul_into(matrix, acts, y, (0, x.shape[0]), (0, matrix.groups))
        return y

    def matmul_into(
        self,
        matrix: PackedMatrix,
        acts: Activations,
        y: np.ndarray,
        rows: tuple[int, int],
        groups: tuple[int, int],
    ) -> None:
        self.struct.matmul(
            byref(matrix.struct),
            byref(acts.struct),
            *rows,
            y.ctypes.data,
            y.strides[0] // 4,
            *groups,
            self.scratch.ctypes.data,
        )
