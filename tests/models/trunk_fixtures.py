"""Tiny models of every dense trunk, what llama.cpp computed for them, and the backends at hand."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from backends.base import Backend, BackendUnavailable, Cache, Executable, Segment
from backends.program import Program
from backends.reference import ReferenceBackend
from models.config import ModelConfig
from models.gguf_file import GgufFile

TRUNKS_DIR = Path(__file__).parents[1] / "fixtures" / "trunks"
TRUNKS = ("llama", "qwen3", "qwen3moe", "gemma3", "gemma4-dense", "gemma4-moe", "gemma4-ple")


def _backend(module: str, name: str, *args: str) -> Backend:
    backend: Backend = getattr(importlib.import_module(module), name)(*args)
    return backend


def _torch_on_one_thread() -> Backend:
    # Models of this size lose with two: on a busy machine each meeting of threads costs 8 ms.
    importlib.import_module("torch").set_num_threads(1)
    return _backend("backends.torch_backend.backend", "TorchBackend", "cpu")


BACKENDS: dict[str, Callable[[], Backend]] = {"reference": ReferenceBackend}
BACKENDS["native"] = lambda: _backend("backends.native.backend", "NativeBackend")
if find_spec("torch"):
    BACKENDS["torch-cpu"] = _torch_on_one_thread
if find_spec("mlx"):
    BACKENDS["mlx"] = lambda: _backend("backends.mlx_backend.backend", "MlxBackend")


def available(name: str) -> Backend:
    """The backend; skips the test where it cannot run (no compiler, no device)."""
    try:
        return BACKENDS[name]()
    except BackendUnavailable as error:
        pytest.skip(f"{name}: {error}")


class Expected(NamedTuple):
    """llama.cpp on the CPU with a float32 cache."""

    token_ids: list[int]
    logits: np.ndarray
    """float32 [48, V], row i after token i."""
    greedy: list[int]
    """The 48 greedy tokens after `token_ids`."""
    greedy_gap: np.ndarray
    """Distance of the two best logits at each of them."""


@cache
def program(trunk: str) -> Program:
    """The trunk's program, as the loader would build it."""
    file = GgufFile.open(TRUNKS_DIR / trunk / "model.gguf")
    config = ModelConfig.from_gguf(file)
    built: Program = importlib.import_module(f"models.{config.architecture}").build(file, config)
    return built


@cache
def executable(trunk: str, backend: str) -> Executable:
    """The trunk on a backend; shared by the tests of a run."""
    return available(backend).compile(program(trunk))


@cache
def expected(trunk: str) -> Expected:
    """The stored answers."""
    with np.load(TRUNKS_DIR / trunk / "expected.npz") as stored:
        token_ids, greedy = stored["tokens"].tolist(), stored["greedy"].tolist()
        return Expected(token_ids, stored["logits"], greedy, stored["greedy_gap"])


def forward_in_chunks(
    model: Executable, cache: Cache, token_ids: list[int], chunk: int
) -> np.ndarray:
    """Logits of every row [len(token_ids), V], forwarded `chunk` rows at a time."""
    logits = []
    for start in range(0, len(token_ids), chunk):
        output = model.forward([Segment(token_ids[start : start + chunk], cache)])
        assert output.logits is not None
        logits.append(output.logits.copy())
    return np.concatenate(logits)
