"""Packing keeps the file's values to the bit and the file's size to a few bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from tests.backends.native_kernels import (
    FLOATS,
    QUANTIZED,
    PackedMatrix,
    dequantized,
    kernel_library,
    random_rows,
    type_number,
)
from tests.cpu_backend import needs_native

if TYPE_CHECKING:
    import ctypes

pytestmark = needs_native


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return kernel_library()


def columns_of(type_name: str) -> tuple[int, ...]:
    if type_name in FLOATS:
        return (1, 31, 96, 576)
    is_super_block = quants.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][0] == 256
    return (256, 768) if is_super_block else (32, 96, 576, 640)


@pytest.mark.parametrize("type_name", [*QUANTIZED, *FLOATS])
@pytest.mark.parametrize("rows", [1, 16, 21])
def test_unpacked_rows_equal_the_files_values_bit_for_bit(library, type_name, rows):
    for cols in columns_of(type_name):
        rng = np.random.default_rng(cols * 100 + rows)
        data = random_rows(type_name, rows, cols, rng)
        matrix = PackedMatrix(library, type_name, data, cols)
        expected = dequantized(type_name, data)
        unpacked = np.stack([matrix.row(i) for i in range(rows)])
        np.testing.assert_array_equal(unpacked.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_name", [*QUANTIZED, *FLOATS])
def test_packed_size_is_the_files_size_rounded_to_64_bytes(library, type_name):
    inputs, nbytes = quants.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    for cols in columns_of(type_name):
        in_file = 16 * cols // inputs * nbytes
        assert library.ft_group_bytes(type_number(type_name), cols) == (in_file + 63) // 64 * 64


@pytest.mark.parametrize(
    ("number", "cols"), [(99, 256), (type_number("Q4_0"), 33), (type_number("Q4_K"), 288), (0, 0)]
)
def test_group_bytes_refuses_unknown_types_and_partial_blocks(library, number, cols):
    assert library.ft_group_bytes(number, cols) == -1


def test_packing_in_pieces_equals_packing_at_once(library):
    data = random_rows("Q5_K", 70, 512, np.random.default_rng(5))
    whole = PackedMatrix(library, "Q5_K", data, 512)
    pieces = np.full_like(whole.packed, 255)
    for g0, g1 in ((3, 5), (0, 1), (1, 3)):
        library.ft_pack(type_number("Q5_K"), data.ctypes.data, 70, 512, pieces.ctypes.data, g0, g1)
    np.testing.assert_array_equal(pieces, whole.packed)
