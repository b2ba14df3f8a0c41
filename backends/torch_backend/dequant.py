"""ggml block formats to floats, as torch operations on whole matrices. Knows no layers.

Each function takes the blocks of a matrix as uint8 [N, block_bytes] and gives float32
[N, block_len]. Source of every layout: ggml `ggml-common.h` and `dequantize_row_*` in
`ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# The non-linear 4-bit values of IQ4_NL and IQ4_XS, and twice those of MXFP4 (E2M1).
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte offset, float32 [N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., B] bytes to [..., 2 B] numbers: all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """[N, ..., B] bytes to [N, ..., len(shifts), B]: one plane per shift."""
    by = torch.tensor(list(shifts), dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> by[:, None]) & mask


def _look_up(values: tuple[int, ...], codes: Tensor) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[N, 4] bytes to [N, 32]: bit j belongs to number j."""
    by = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> by) & 1).reshape(len(packed), 32)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | (_fifth_bits(blocks[:, 2:6]) << 4)
    return (codes.float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | (_fifth_bits(blocks[:, 4:8]) << 4)
    return codes.float() * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _grouped(codes: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """codes [N, 256] * scales [N, groups] - minima [N, groups], group by group."""
    groups = codes.float().reshape(len(codes), scales.shape[1], -1)
    scaled = groups * scales.unsqueeze(-1)
    if minima is not None:
        scaled = scaled - minima.unsqueeze(-1)
    return scaled.reshape(len(codes), -1)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    codes = _bits(blocks[:, 16:80].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 256)
    d, dmin = _half(blocks, 80), _half(blocks, 82)
    return _grouped(codes, d * (scales & 15).float(), dmin * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    high = _bits(packed[:, 8:], range(0, 8, 2), 3).reshape(-1, 16)
    scales = (low | (high << 4)).float() - 32
    low_bits = _bits(blocks[:, 32:96].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 256)
    high_bit = _bits(blocks[:, :32], range(8), 1).reshape(-1, 256)
    codes = low_bits.float() + 4 * high_bit.float() - 4
    return _grouped(codes, _half(blocks, 108) * scales)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes to eight 6-bit scales and eight 6-bit minima, float32 [N, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return _grouped(codes, _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks[:, 4:16])
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256)
    high = _bits(blocks[:, 16:48], range(8), 1).reshape(-1, 256)
    codes = low | (high << 4)
    return _grouped(codes, _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 256)
    codes = (low | (high << 4)).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _grouped(codes, _half(blocks, 208) * scales)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _look_up(_IQ4_VALUES, _nibbles(blocks[:, 2:])) * _half(blocks, 0)


def _iq4_xs(blocks: Tensor) -> Tensor:
    by = torch.tensor([0, 4], dtype=torch.uint8, device=blocks.device)
    low = ((blocks[:, 4:8].unsqueeze(-1) >> by) & 15).reshape(-1, 8)
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 2:4].unsqueeze(-1) >> pairs) & 3).reshape(-1, 8)
    scales = (low | (high << 4)).float() - 32
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256)
    return _grouped(_look_up(_IQ4_VALUES, codes), _half(blocks, 0) * scales)


def _mxfp4(blocks: Tensor) -> Tensor:
    # Half the exponent's power of two, because the table holds twice the values.
    scale = torch.exp2(blocks[:, :1].float() - 128)
    return _look_up(_MXFP4_VALUES, _nibbles(blocks[:, 1:])) * scale


_BLOCKS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "F32": (4, _f32),
    "F16": (2, _f16),
    "BF16": (2, _bf16),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "MXFP4": (17, _mxfp4),
}
DEQUANTIZABLE = frozenset(_BLOCKS)
"""Types `dequantize` knows."""


def dequantize(type_name: str, data: Tensor) -> Tensor:
    """The values of some rows. Shapes: data uint8 [rows, row_bytes] -> float32 [rows, cols]."""
    block_bytes, unpack = _BLOCKS[type_name]
    return unpack(data.reshape(-1, block_bytes)).reshape(data.shape[0], -1)
