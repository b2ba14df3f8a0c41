"""Real models on real text, against log probabilities of an independent float32 forward."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from backends.base import Executable, Segment
from backends.native.library import physical_cores
from models.config import ModelConfig
from models.gguf_file import GgufFile
from tests.models.trunk_fixtures import available
from tests.real_models import GEMMA3_270M_BYTES, SMOLLM2_BYTES, find_model

pytestmark = [pytest.mark.weights, pytest.mark.slow]

REAL_DIR = Path(__file__).parents[1] / "fixtures" / "real"
MODELS = {"smollm2-135m-q4_1": SMOLLM2_BYTES, "gemma3-270m-q4_k_m": GEMMA3_270M_BYTES}
ROWS = 128


def compiled(num_bytes: int, backend: str) -> Executable:
    file = GgufFile.open(find_model(num_bytes))
    config = ModelConfig.from_gguf(file)
    program = importlib.import_module(f"models.{config.architecture}").build(file, config)
    chosen = available(backend)
    if backend == "torch-cpu":  # tiny models left it with one thread
        importlib.import_module("torch").set_num_threads(physical_cores())
    return chosen.compile(program)


def top_logprobs(model: Executable, token_ids: list[int], top_ids: np.ndarray) -> np.ndarray:
    """Log probabilities of `top_ids` [T, 64], row by row of the text."""
    cache, found = model.new_cache(), []
    for start in range(0, len(token_ids), ROWS):
        output = model.forward([Segment(token_ids[start : start + ROWS], cache)])
        assert output.logits is not None
        logits = output.logits.astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        found.append(np.take_along_axis(logits, top_ids[start : start + ROWS], axis=1))
    return np.concatenate(found)


def divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence over 64 tokens and one heap of all others."""
    p, q = np.exp(expected), np.exp(found)
    heaps = [1 - np.minimum(share.sum(axis=1), 1 - 1e-9) for share in (p, q)]
    per_row = (p * (expected - found)).sum(axis=1) + heaps[0] * np.log(heaps[0] / heaps[1])
    return float(per_row.mean())


@pytest.mark.parametrize("name", MODELS)
def test_float32_forward_gives_the_reference_log_probabilities(name: str) -> None:
    """Past the window of 512 tokens too: Gemma's text has 900."""
    with np.load(REAL_DIR / f"{name}.npz") as stored:
        token_ids, top_ids = stored["tokens"].tolist(), stored["top_ids"].astype(np.int64)
        expected = stored["top_logprobs"]
    model = compiled(MODELS[name], "torch-cpu")
    found = top_logprobs(model, token_ids, top_ids)
    model.close()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_native_forward_is_at_least_as_faithful_as_llama_cpp(name: str) -> None:
    """Both round activations to 8 bits. Measured: 0.73 and 0.46 times its divergence."""
    with np.load(REAL_DIR / f"{name}.npz") as stored:
        token_ids, top_ids = stored["tokens"].tolist(), stored["top_ids"].astype(np.int64)
        expected = stored["top_logprobs"].astype(np.float64)
        theirs = stored["llama_cpp_top_logprobs"].astype(np.float64)
    model = compiled(MODELS[name], "native")
    ours = top_logprobs(model, token_ids, top_ids)
    model.close()

    assert divergence(expected, ours) <= divergence(expected, theirs)
