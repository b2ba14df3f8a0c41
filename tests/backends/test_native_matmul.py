"""Native kernels: near a float64 reference, and one row's bits never depend on anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.backends.native_kernels import (
    FLOATS,
    KERNELS,
    QUANTIZED,
    Activations,
    NativeKernels,
    PackedMatrix,
    dequantized,
    kernel_library,
    random_rows,
)
from tests.cpu_backend import needs_native

if TYPE_CHECKING:
    import ctypes

pytestmark = needs_native

ROW_COUNTS = (*range(1, 18), 33, 70)
SUPER_BLOCK = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return kernel_library()


@pytest.fixture(scope="module", params=KERNELS)
def kernels(library, request) -> NativeKernels:
    chosen = NativeKernels(library, request.param)
    if not chosen.is_here:
        pytest.skip(f"{request.param} does not run on this processor")
    return chosen


def shapes_of(type_name: str) -> tuple[tuple[int, int], ...]:
    """(rows, cols): rows off the group of 16, cols off the chunk of 256 and over one panel (2048)."""
    if type_name in SUPER_BLOCK:
        return ((21, 256), (48, 768), (5, 2304))
    if type_name in FLOATS:
        return ((21, 1), (48, 577), (5, 2048))
    return ((21, 32), (33, 96), (48, 576), (5, 640), (16, 2080))


def case(library, type_name: str, rows: int, cols: int) -> tuple[PackedMatrix, np.ndarray]:
    data = random_rows(type_name, rows, cols, np.random.default_rng(rows + cols))
    return PackedMatrix(library, type_name, data, cols), dequantized(type_name, data)


def random_x(rows: int, cols: int) -> np.ndarray:
    rng = np.random.default_rng(1000 * rows + cols)
    return (rng.standard_normal((rows, cols)) * rng.choice([0.1, 1, 30], (rows, cols))).astype("f")


def quantized_values(acts: Activations) -> np.ndarray:
    """float64 [R, cols]: what the integer kernels multiply."""
    blocks = acts.q.astype(np.float64).reshape(*acts.scale.shape, 32) * acts.scale[..., None]
    return blocks.reshape(acts.q.shape)[:, : acts.x.shape[1]]


@pytest.mark.parametrize("cols", [32, 96, 576, 577, 31, 640])
def test_quantized_activations_are_within_half_a_step_of_the_input(kernels, cols):
    acts = kernels.quantize(Activations(random_x(3, cols)))
    step = np.repeat(acts.scale, 32, axis=1)[:, :cols]
    assert (np.abs(quantized_values(acts) - acts.x) <= step * 0.5001).all()
    assert np.abs(acts.q).max() == 127
    assert (acts.q[:, cols:] == 0).all()
    np.testing.assert_array_equal(acts.sum16, acts.q.reshape(3, -1, 2, 16).sum(-1))


def test_quantized_activations_are_the_same_bits_everywhere(library, kernels):
    for cols in (32, 100, 576):
        x = random_x(9, cols)
        x[0, :32], x[1, 5], x[2, :32], x[3, 0] = 0, 1e-40, 3e-36, -7e37
        x[4, :32] = np.arange(32) - 15.5  # ties
        here = kernels.quantize(Activations(x))
        portable = NativeKernels(library, "portable").quantize(Activations(x))
        for name in ("q", "scale", "sum16"):
            np.testing.assert_array_equal(getattr(here, name), getattr(portable, name))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_its_neighbours(library, kernels, bad):
    matrix, _ = case(library, "Q4_1", 21, 96)
    x = random_x(3, 96)
    expected = kernels.matmul(matrix, x)
    x[1, 40] = bad
    y = kernels.matmul(matrix, x)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_integer_kernels_multiply_the_quantized_values(library, kernels, type_name):
    """Error bound: float32 rounding of one fixed-order sum, 2^-24 per block and term."""
    for rows, cols in shapes_of(type_name):
        matrix, weights = case(library, type_name, rows, cols)
        acts = kernels.quantize(Activations(random_x(18, cols)))
        x = quantized_values(acts)
        y = kernels.matmul(matrix, acts.x)
        magnitude = np.abs(x) @ np.abs(weights.astype(np.float64)).T
        bound = (cols / 32 + 6) * 2.0**-23 * magnitude
        if type_name in ("Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"):
            bound *= 8  # code * scale and minimum are rounded apart before they cancel
        assert (np.abs(y - x @ weights.astype(np.float64).T) <= bound).all()


@pytest.mark.parametrize("type_name", FLOATS)
def test_float_kernels_are_accurate_float32(library, kernels, type_name):
    for rows, cols in shapes_of(type_name):
        matrix, weights = case(library, type_name, rows, cols)
        x = random_x(18, cols)
        magnitude = np.abs(x).astype(np.float64) @ np.abs(weights.astype(np.float64)).T
        error = np.abs(kernels.matmul(matrix, x) - x.astype(np.float64) @ weights.astype("d").T)
        assert (error <= (cols / 2 + 1) * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("type_name", [*QUANTIZED, *FLOATS])
def test_s70_a_rows_bits_do_not_depend_on_the_rows_beside_it(library, kernels, type_name):
    for rows, cols in shapes_of(type_name):
        matrix, _ = case(library, type_name, rows, cols)
        x = random_x(max(ROW_COUNTS), cols)
        alone = np.concatenate([kernels.matmul(matrix, x[i : i + 1]) for i in range(len(x))])
        for count in ROW_COUNTS:
            start = len(x) - count
            together = kernels.matmul(matrix, x[start:])
            np.testing.assert_array_equal(together.view("u4"), alone[start:].view("u4"))


@pytest.mark.parametrize("type_name", [*QUANTIZED, *FLOATS])
def test_s70_every_instruction_set_gives_the_portable_bits(library, kernels, type_name):
    portable = NativeKernels(library, "portable")
    for rows, cols in shapes_of(type_name):
        matrix, _ = case(library, type_name, rows, cols)
        for count in (1, 5, 8, 37):
            x = random_x(count, cols)
            expected = portable.matmul(matrix, x)
            np.testing.assert_array_equal(kernels.matmul(matrix, x).view("u4"), expected.view("u4"))


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K", "BF16"])
@pytest.mark.parametrize("count", [3, 40])
def test_only_the_asked_rows_and_groups_are_written(library, kernels, type_name, count):
    matrix, _ = case(library, type_name, 45, 768)
    x = random_x(count, 768)
    expected = kernels.matmul(matrix, x)
    acts = kernels.quantize(Activations(x))
    y = np.full((count, 50), -1.0, np.float32)
    kernels.matmul_into(matrix, acts, y, (1, count - 1), (1, 3))
    np.testing.assert_array_equal(y[1:-1, 16:45], expected[1:-1, 16:])
    y[1:-1, 16:45] = -1
    assert (y == -1).all()
