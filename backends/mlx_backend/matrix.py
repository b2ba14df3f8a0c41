"""Weights in MLX: packed where MLX's own layout holds the file's values exactly, else dense.

MLX's affine layout is w = code * scale + bias per group of 32 inputs, codes as one stream of bits.
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K are of that form; scales stay float32, because the
product of a K-quant's two scales needs 17 bits. Q6_K has groups of 16, which MLX has not: it and
the rest become float16, whose products are float16 too. That is too coarse for logits, so a head
stays exact: of type Q6_K by spreading each group of 16 over 32 inputs, half of them zero (16 bits
per weight, as float16), of the rest as float32. Source of the layout: MLX `mlx.core.quantize`; of
the blocks: ggml `ggml-common.h`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from backends.program import Weight
from backends.reference_ops import dequantize

_GROUP = 32
_ROWS_AT_ONCE = 4096
"""Rows unpacked at once while loading; bounds the memory of the codes, one byte each."""


class Affine(NamedTuple):
    """Some rows in MLX's terms, groups of 32."""

    codes: np.ndarray
    """uint8 [rows, in]."""
    scales: np.ndarray
    """float32 [rows, in / 32]."""
    biases: np.ndarray
    """float32 [rows, in / 32]."""


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a byte offset of every block, float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., B] bytes to [..., 2 B] numbers: all low nibbles, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _bits(packed: np.ndarray) -> np.ndarray:
    """[N, B] bytes to [N, 8 B] bits, lowest first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _q4_0(blocks: np.ndarray) -> Affine:
    scale = _halves(blocks, 0)
    return Affine(_nibbles(blocks[:, 2:]), scale, -8 * scale)


def _q4_1(blocks: np.ndarray) -> Affine:
    return Affine(_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Affine:
    scale = _halves(blocks, 0)
    return Affine(_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, scale, -16 * scale)


def _q5_1(blocks: np.ndarray) -> Affine:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Affine(codes, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Affine:
    scale = _halves(blocks, 0)
    return Affine(blocks[:, 2:] ^ 0x80, scale, -128 * scale)  # two's complement to offset 128


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes to eight 6-bit scales and eight 6-bit minima."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> Affine:
    scales, minima = _k_scales(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return Affine(codes, _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima)


def _q5_k(blocks: np.ndarray) -> Affine:
    scales, minima = _k_scales(blocks[:, 4:16])
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = _bits(blocks[:, 16:48, None]).transpose(0, 2, 1)
    codes = (low | high << 4).reshape(-1, 256)
    return Affine(codes, _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima)


def _q6_k(blocks: np.ndarray) -> Affine:
    """Groups of 16 as groups of 32 whose second half is never looked at."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 256)
    codes = np.zeros((len(blocks), 16, _GROUP), np.uint8)
    codes[:, :, :16] = (low | high << 4).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(np.int8) * _halves(blocks, 208)
    return Affine(codes.reshape(len(blocks), -1), scales, -32 * scales)


_AFFINE = {
    "Q4_0": (18, 4, _q4_0),
    "Q4_1": (20, 4, _q4_1),
    "Q5_0": (22, 5, _q5_0),
    "Q5_1": (24, 5, _q5_1),
    "Q8_0": (34, 8, _q8_0),
    "Q4_K": (144, 4, _q4_k),
    "Q5_K": (176, 5, _q5_k),
}
_SPREAD = {"Q6_K": (210, 6, _q6_k)}


def placed_bytes(weight: Weight, *, is_head: bool) -> int:
    """Memory of all parts of a matrix."""
    size = math.prod(weight.shape)
    if weight.type in _AFFINE:
        return size * _AFFINE[weight.type][1] // 8 + size // _GROUP * 8
    if is_head and weight.type in _SPREAD:
        return 2 * (size * _SPREAD[weight.type][1] // 8 + size // _GROUP * 8)
    return size * np.dtype(_dense_type(weight, is_head)).itemsize


def is_packed(weight: Weight) -> bool:
    """Whether MLX has a layout of its own for the type."""
    return weight.type in _AFFINE


def _dense_type(weight: Weight, is_head: bool) -> type[np.floating]:
    # MLX's CPU device multiplies gathered experts in float32 only.
    is_stack_on_cpu = len(weight.shape) == 3 and mx.default_device().type == mx.cpu
    is_exact = weight.type == "F32" or is_head or is_stack_on_cpu
    return np.float32 if is_exact else np.float16


def _bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, in] to uint32 [rows, in * bits / 32]."""
    if bits == 4:
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
    elif bits == 8:
        packed = codes
    else:
        by_code = np.unpackbits(codes[..., None], axis=-1, bitorder="little", count=bits)
        packed = np.packbits(by_code.reshape(len(codes), -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")


class Matrix:
    """One weight; a stack of experts has a leading axis."""

    def __init__(self, weight: Weight, *, is_head: bool = False) -> None:
        self._bits = 0
        self._is_spread = is_head and weight.type in _SPREAD
        self._arrays: tuple[mx.array, ...]
        if weight.type in _AFFINE or self._is_spread:
            self._arrays = self._packed(weight)
        else:
            self._arrays = (mx.array(dequantize(weight).astype(_dense_type(weight, is_head))),)
        # Copied to MLX now: otherwise all of the file's unpacked values would wait in memory.
        mx.eval(*self._arrays)

    def _packed(self, weight: Weight) -> tuple[mx.array, ...]:
        block_bytes, self._bits, unpack = (_AFFINE | _SPREAD)[weight.type]
        words, scales, biases = [], [], []
        for start in range(0, len(weight.data), _ROWS_AT_ONCE):
            rows = weight.data[start : start + _ROWS_AT_ONCE]
            affine = unpack(rows.reshape(-1, block_bytes))
            words.append(_bit_stream(affine.codes.reshape(len(rows), -1), self._bits))
            scales.append(affine.scales.reshape(len(rows), -1))
            biases.append(affine.biases.reshape(len(rows), -1))
        leading = weight.shape[:-1]
        parts = (np.concatenate(part) for part in (words, scales, biases))
        return tuple(mx.array(part.reshape(*leading, part.shape[-1])) for part in parts)

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        return sum(int(array.nbytes) for array in self._arrays)

    def multiply(self, x: mx.array) -> mx.array:
        """Shapes: x [..., in] float32 -> [..., out] float32."""
        if self._is_spread:
            x = _spread(x)
        if self._bits:
            words, scales, biases = self._arrays
            return mx.quantized_matmul(
                x, words, scales, biases, transpose=True, group_size=_GROUP, bits=self._bits
            )
        dense = self._arrays[0].swapaxes(-1, -2)
        rows, size = _in_type_of(dense, x)
        return (rows @ dense).astype(mx.float32) * size

    def multiply_experts(self, x: mx.array, experts: mx.array) -> mx.array:
        """Each row with its own experts.

        Shapes: x [R, 1 or k, 1, in], experts uint32 [R, k] -> [R, k, 1, out] float32.
        """
        if self._bits:
            words, scales, biases = self._arrays
            return mx.gather_qmm(
                x,
                words,
                scales,
                biases,
                rhs_indices=experts,
                transpose=True,
                group_size=_GROUP,
                bits=self._bits,
            )
        dense = self._arrays[0].swapaxes(-1, -2)
        rows, size = _in_type_of(dense, x)
        return mx.gather_mm(rows, dense, rhs_indices=experts).astype(mx.float32) * size


def _spread(x: mx.array) -> mx.array:
    """Every 16 numbers followed by 16 zeros. Shapes: x [..., in] -> [..., 2 * in]."""
    halves = x.reshape(*x.shape[:-1], -1, _GROUP // 2)
    return mx.concatenate([halves, mx.zeros_like(halves)], axis=-1).flatten(-2)


def _in_type_of(dense: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
    """Rows in the weights' type, and what the product is to be multiplied with.

    For float16 each row is brought to at most 1: activations of some models pass its 65504.
    """
    if dense.dtype == mx.float32:
        return x, mx.array(1.0)
    size = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), 1e-30)
    return (x / size).astype(mx.float16), size
