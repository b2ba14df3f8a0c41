"""The torch dequantizers give the values of the published block layouts."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from backends.torch_backend.dequant import DEQUANTIZABLE, dequantize

HALF_OFFSETS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
HALF_OFFSETS |= dict.fromkeys(("Q4_K", "Q5_K"), (0, 2))
HALF_OFFSETS |= dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "F16"), (0,))
HALF_OFFSETS |= {"MXFP4": (), "F32": (), "BF16": ()}


def random_rows(type_name: str) -> np.ndarray:
    """Three rows of four blocks: random bytes, with finite scales of either sign."""
    rng = np.random.default_rng(7)
    if type_name in ("F32", "BF16"):
        values = rng.standard_normal((3, 32), np.float32)
        return quants.quantize(values, GGMLQuantizationType[type_name]).view(np.uint8)
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (12, block_bytes), np.uint8)
    for offset in HALF_OFFSETS[type_name]:
        scales = rng.standard_normal((12, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 140, 12)
    return blocks.reshape(3, -1)


@pytest.mark.parametrize("type_name", sorted(DEQUANTIZABLE))
def test_dequantizing_gives_the_published_values(type_name: str) -> None:
    rows = random_rows(type_name)
    expected = quants.dequantize(rows, GGMLQuantizationType[type_name])
    values = dequantize(type_name, torch.from_numpy(rows.copy())).numpy()
    np.testing.assert_array_equal(values, expected)
