"""Weights on a device: dense, or as the file's quantized bytes that are unpacked at each use.

On the CPU every product runs in blocks of one fixed number of rows, so that the library underneath
sees one shape whatever the number of rows: it sums differently for other shapes (measured on x86
with MKL: rows of a 1-row and an 8-row product differ, rows of two 8-row products never). On a GPU,
where no equal bits are promised, it is one product: a prefill reads its weights once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from backends.program import Weight
from backends.reference_ops import dequantize as dequantize_on_host
from backends.torch_backend.dequant import DEQUANTIZABLE, dequantize

CPU_ROW_BLOCK = 8
"""A product of 8 rows takes about as long as one of 1 on the CPU: reading weights decides."""
_ROWS_AT_ONCE = 4096
"""Rows unpacked at once while loading: bounds the memory of their float32 values."""


def held_bytes(weight: Weight, device: torch.device, *, is_dense: bool) -> int:
    """Bytes a matrix takes on the device; what cannot be unpacked there is always dense."""
    if is_dense or weight.type not in DEQUANTIZABLE:
        return math.prod(weight.shape) * compute_type(weight, device).itemsize
    return weight.data.nbytes


def compute_type(weight: Weight, device: torch.device) -> torch.dtype:
    """float32 on the CPU and for F32 tensors; float16 for the rest on a GPU."""
    on_gpu = device.type == "cuda"
    return torch.float16 if on_gpu and weight.type != "F32" else torch.float32


def _copied(data: np.ndarray) -> Tensor:
    # Not torch.from_numpy(view): the mapped file is read-only, and torch warns about that.
    return torch.from_numpy(np.array(data))


def look_up(table: Weight, token_ids: list[int], device: torch.device) -> Tensor:
    """Rows of a table, unpacked from the mapped file. Shapes: -> float32 [len(token_ids), width].

    The table itself never moves to the device: a per-layer table can outweigh the model.
    """
    return _unpacked(table, table.data[token_ids], device)


def _unpacked(weight: Weight, rows: np.ndarray, device: torch.device) -> Tensor:
    """Some rows of a weight. Shapes: rows uint8 [n, row_bytes] -> float32 [n, in].

    Raises: UnsupportedWeight for a type nobody can read.
    """
    if weight.type in DEQUANTIZABLE:
        return dequantize(weight.type, _copied(rows).to(device))
    part = Weight(weight.name, weight.type, (len(rows), weight.shape[-1]), rows)
    return torch.from_numpy(dequantize_on_host(part)).to(device)


class Matrix:
    """One weight; an expert stack is its experts' rows one after another."""

    def __init__(self, weight: Weight, device: torch.device, *, is_dense: bool) -> None:
        self.weight = weight
        self._dtype = compute_type(weight, device)
        self._dense: Tensor | None = None
        self._packed: Tensor | None = None
        if is_dense or weight.type not in DEQUANTIZABLE:
            self._dense = self._unpacked_at_load(device)
        else:
            self._packed = _copied(weight.data).to(device)

    def _unpacked_at_load(self, device: torch.device) -> Tensor:
        data = self.weight.data
        dense = torch.empty((len(data), self.weight.shape[-1]), dtype=self._dtype, device=device)
        for start in range(0, len(data), _ROWS_AT_ONCE):
            part = data[start : start + _ROWS_AT_ONCE]
            dense[start : start + len(part)] = _unpacked(self.weight, part, device)
        return dense

    @property
    def is_dense(self) -> bool:
        """Whether it is unpacked once and for all."""
        return self._dense is not None

    @property
    def num_bytes(self) -> int:
        """Memory on the device."""
        held = self._dense if self._dense is not None else self._packed
        assert held is not None, "one of the two is always held"
        return held.nbytes

    def dense(self, part: slice = slice(None)) -> Tensor:
        """Rows as floats. Shapes: -> [rows, in], in the compute type."""
        if self._dense is not None:
            return self._dense[part]
        assert self._packed is not None, "one of the two is always held"
        return dequantize(self.weight.type, self._packed[part]).to(self._dtype)


def multiply_in_blocks(x: Tensor, dense: Tensor) -> Tensor:
    """x @ dense^T in blocks of CPU_ROW_BLOCK rows.

    Shapes: x [R, in] float32, R a multiple of the block; dense [out, in] -> [R, out] float32.
    """
    blocks = [multiply_at_once(block, dense) for block in torch.split(x, CPU_ROW_BLOCK)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def multiply_at_once(x: Tensor, dense: Tensor) -> Tensor:
    """x @ dense^T. Shapes: x [R, in] float32, dense [out, in] -> [R, out] float32."""
    return (_multiply_half if dense.dtype == torch.float16 else functional.linear)(x, dense)


def _multiply_half(x: Tensor, dense: Tensor) -> Tensor:
    """float16 inputs, float32 sums and results.

    Each row is brought to at most 1 first: activations of some models pass float16's 65504.
    """
    size = x.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
    scaled = (x / size).half()
    return torch.mm(scaled, dense.t(), out_dtype=torch.float32) * size
