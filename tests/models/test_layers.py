"""Trunks read what files of their kind may hold, and refuse the rest by name."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.program import Attention, Head, Program, Project
from backends.reference import ReferenceBackend
from models import gemma3
from models.config import ModelConfig, RopeScaling
from models.errors import BadGguf, ModelError, UnsupportedArchitecture
from models.gguf_file import GgufFile
from models.layers import RopeTable, rope, rope_factors
from tests.models.make_gguf import MadeGguf, MadeTensor
from tests.models.trunk_fixtures import TRUNKS_DIR, forward_in_chunks, program

Tensors = dict[str, np.ndarray]
Change = Callable[[dict[str, Any], Tensors], object]


def opened(trunk: str) -> GgufFile:
    return GgufFile.open(TRUNKS_DIR / trunk / "model.gguf")


def config_of(trunk: str) -> ModelConfig:
    return ModelConfig.from_gguf(opened(trunk))


def built(trunk: str, folder: Path, change: Change) -> Program:
    """The program of a fixture whose metadata and float32 tensors were changed."""
    file = opened(trunk)
    tensors = {
        name: file.weight(name).data.view("<f4").reshape(file.weight(name).shape).copy()
        for name in file.tensors
    }
    metadata = dict(file.metadata)
    change(metadata, tensors)
    made = [MadeTensor(name, data) for name, data in tensors.items()]
    path = MadeGguf(list(metadata.items()), made).write(folder / "changed.gguf")
    changed = GgufFile.open(path)
    config = ModelConfig.from_gguf(changed)
    module = importlib.import_module(f"models.{config.architecture}")
    return module.build(changed, config)  # type: ignore[no-any-return]


def logits_of(built_program: Program) -> np.ndarray:
    model = ReferenceBackend().compile(built_program)
    return forward_in_chunks(model, model.new_cache(), [5, 9, 300, 17, 2, 80], 6)


def attentions(built_program: Program) -> list[Attention]:
    return [op for op in built_program.ops if isinstance(op, Attention)]


def scaled(kind: Any, factor: float, attn_factor: float = 1.0) -> ModelConfig:
    scaling = RopeScaling(kind, factor, original_context_len=4096, attn_factor=attn_factor)
    return replace(config_of("qwen3"), rope_scaling=scaling)


# Rotary tables ------------------------------------------------------------------------------


def test_llama_divides_by_the_files_wavelength_factors() -> None:
    """Known answer: Llama 3 scaling by 8 from 64 tokens, heads of 16 dims, base 5e5."""
    factors = rope_factors(opened("llama"), config_of("llama"), 16)
    known = [1, 2.4422596, 8, 8, 8, 8, 8, 8]
    assert factors is not None
    np.testing.assert_allclose(factors, known, rtol=1e-6)
    first = attentions(program("llama"))[0].rope
    assert first is not None
    expected = 5e5 ** (-2 * np.arange(8) / 16) / known
    np.testing.assert_allclose(first.inv_freq, expected, rtol=1e-6)


@pytest.mark.parametrize(("kind", "divisor"), [("linear", 4.0), ("longrope", 4.0), ("none", 1.0)])
def test_plain_scaling_divides_every_frequency_or_none(kind: str, divisor: float) -> None:
    table = rope(scaled(kind, 4.0), RopeTable(1e4, 8))
    np.testing.assert_allclose(table.inv_freq, [1 / divisor, 0.1 / divisor, *table.inv_freq[2:]])
    unscaled = rope(scaled(kind, 4.0), RopeTable(1e4, 8, is_scaled=False))
    np.testing.assert_allclose(unscaled.inv_freq, [1, 0.1, 0.01, 0.001])


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_scales_attention() -> None:
    """Written out pair by pair from the paper: 128 dims, base 1e6, 4096 tokens by 4."""
    table = rope(scaled("yarn", 4.0, attn_factor=0.9), RopeTable(1e6, 128))
    low = math.floor(128 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(1e6)))
    high = math.ceil(128 * math.log(4096 / (1 * 2 * math.pi)) / (2 * math.log(1e6)))
    for pair in range(64):
        own = 1e6 ** (-2 * pair / 128)
        slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
        expected = own * (1 - slowed) + own / 4 * slowed
        assert table.inv_freq[pair] == pytest.approx(expected, rel=1e-12)
    assert table.mscale == pytest.approx((1 + 0.1 * math.log(4)) * 0.9)


def test_gemma3_scales_only_its_full_layers() -> None:
    windowed, full = attentions(program("gemma3"))[0].rope, attentions(program("gemma3"))[5].rope
    assert windowed is not None
    assert full is not None
    assert windowed.inv_freq[:2] == pytest.approx([1.0, 1e4 ** (-2 / 32)])
    assert full.inv_freq[:2] == pytest.approx([1 / 8, 1e6 ** (-2 / 32) / 8])


def test_gemma4_turns_a_quarter_of_its_full_layers_pairs() -> None:
    windowed, full = (attentions(program("gemma4-dense"))[i].rope for i in (0, 2))
    assert windowed is not None
    assert full is not None
    assert (full.inv_freq[:4] > 1e-3).all()
    assert (full.inv_freq[4:] < 1e-25).all()
    assert (windowed.inv_freq > 1e-4).all()


# Windows, scales, owners ----------------------------------------------------------------------


def test_gemma3_without_a_pattern_has_every_sixth_layer_full() -> None:
    config = replace(config_of("gemma3"), num_layers=18, window_pattern=None)
    pattern = gemma3._window_pattern(config)
    assert [layer for layer, windowed in enumerate(pattern) if not windowed] == [5, 11, 17]
    assert not any(gemma3._window_pattern(replace(config, window=0)))


@pytest.mark.parametrize(("num_layers", "expected"), [(62, 1 / 4), (61, 1 / math.sqrt(32))])
def test_gemma3_of_62_layers_scales_queries_by_width_over_heads(
    num_layers: int, expected: float
) -> None:
    config = replace(config_of("gemma3"), num_layers=num_layers)
    windowed, full = gemma3._attentions(config)
    assert windowed.scale == full.scale == pytest.approx(expected)


def test_shared_layers_read_the_last_owner_of_their_kind_and_store_nothing() -> None:
    built_program = program("gemma4-ple")
    assert [slot.window for slot in built_program.slots] == [16, None, 16, None]
    assert [(op.slot, op.writes_kv) for op in attentions(built_program)] == [
        (0, True), (1, True), (2, True), (3, True), (2, False), (3, False),
    ]  # fmt: skip


def test_keys_that_a_shared_layer_carries_are_ignored(tmp_path: Path) -> None:
    """Real checkpoints ship them; ownership goes by layer number."""

    def add_keys(_: dict[str, Any], tensors: Tensors) -> None:
        for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            tensors[f"blk.4.{name}"] = tensors[f"blk.2.{name}"] * 3

    changed = built("gemma4-ple", tmp_path, add_keys)
    np.testing.assert_array_equal(logits_of(changed), logits_of(program("gemma4-ple")))


def test_gemma4_without_a_v_matrix_takes_the_raw_keys() -> None:
    assert [op.v_from_k for op in attentions(program("gemma4-dense"))] == [
        False, False, True, False, False, True,
    ]  # fmt: skip


# What files may hold --------------------------------------------------------------------------


def fuse_qkv(_: dict[str, Any], tensors: Tensors) -> None:
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            if parts[0] in tensors:
                fused = np.concatenate([tensors.pop(part) for part in parts])
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = fused


def add_biases(_: dict[str, Any], tensors: Tensors) -> None:
    rng = np.random.default_rng(0)
    for layer in range(2):
        for part in ("q", "k", "v", "output"):
            width = len(tensors[f"blk.{layer}.attn_{part}.weight"])
            tensors[f"blk.{layer}.attn_{part}.bias"] = rng.standard_normal(width, np.float32)


def test_fused_qkv_gives_what_separate_matrices_give(tmp_path: Path) -> None:
    changed = built("llama", tmp_path, fuse_qkv)
    assert [len(op.weights) for op in changed.ops if isinstance(op, Project)] == [1, 1]
    np.testing.assert_allclose(logits_of(changed), logits_of(program("llama")), rtol=0, atol=1e-6)


def test_biases_are_added_and_may_be_fused_too(tmp_path: Path) -> None:
    separate = logits_of(built("llama", tmp_path, add_biases))
    assert np.abs(separate - logits_of(program("llama"))).max() > 0.1

    def add_and_fuse(metadata: dict[str, Any], tensors: Tensors) -> None:
        add_biases(metadata, tensors)
        fuse_qkv(metadata, tensors)

    fused = logits_of(built("llama", tmp_path, add_and_fuse))
    np.testing.assert_allclose(fused, separate, rtol=0, atol=1e-6)


def test_fused_expert_gates_give_what_split_ones_give(tmp_path: Path) -> None:
    def fuse(_: dict[str, Any], tensors: Tensors) -> None:
        for layer in range(2):
            halves = [tensors.pop(f"blk.{layer}.ffn_{p}_exps.weight") for p in ("gate", "up")]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)

    changed = logits_of(built("qwen3moe", tmp_path, fuse))
    np.testing.assert_allclose(changed, logits_of(program("qwen3moe")), rtol=0, atol=1e-6)


def test_llama_with_experts_runs_each_rows_best(tmp_path: Path) -> None:
    """Mixtral files: experts of the dense width. Equal experts are worth one dense block."""

    def make_experts(metadata: dict[str, Any], tensors: Tensors) -> None:
        metadata |= {"llama.expert_count": 4, "llama.expert_used_count": 2}
        for layer in range(2):
            for part in ("gate", "up", "down"):
                dense = tensors.pop(f"blk.{layer}.ffn_{part}.weight")
                tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack([dense] * 4)
            router = np.random.default_rng(layer).standard_normal((4, 64), np.float32)
            tensors[f"blk.{layer}.ffn_gate_inp.weight"] = router

    changed = logits_of(built("llama", tmp_path, make_experts))
    np.testing.assert_allclose(changed, logits_of(program("llama")), rtol=0, atol=1e-5)


def test_an_own_output_matrix_replaces_the_tied_table(tmp_path: Path) -> None:
    def untie(_: dict[str, Any], tensors: Tensors) -> None:
        tensors["output.weight"] = -tensors["token_embd.weight"]

    tied, own = program("llama"), built("llama", tmp_path, untie)
    assert isinstance(tied.ops[-1], Head)
    assert tied.ops[-1].weight is tied.ops[0].table  # type: ignore[union-attr]
    np.testing.assert_allclose(logits_of(own), -logits_of(tied), rtol=0, atol=1e-6)


def test_a_gemma4_file_without_factors_turns_a_quarter_of_the_pairs(tmp_path: Path) -> None:
    for mine, own in zip(
        attentions(built("gemma4-dense", tmp_path, drop("rope_freqs.weight"))),
        attentions(program("gemma4-dense")),
        strict=True,
    ):
        assert mine.rope is not None
        assert own.rope is not None
        np.testing.assert_array_equal(mine.rope.inv_freq, own.rope.inv_freq)


# What is refused ------------------------------------------------------------------------------


def drop(name: str) -> Change:
    return lambda _, tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.update({name: np.ones(shape, np.float32)})


def key(name: str, value: Any) -> Change:
    return lambda metadata, _: metadata.update({name: value})


@pytest.mark.parametrize(
    ("trunk", "change", "error", "message"),
    [
        ("llama", drop("blk.1.ffn_up.weight"), BadGguf, r"tensor blk\.1\.ffn_up\.weight is missing"),
        ("llama", drop("output_norm.weight"), BadGguf, r"tensor output_norm\.weight is missing"),
        ("qwen3", drop("blk.0.attn_q_norm.weight"), BadGguf, r"attn_q_norm\.weight is missing"),
        ("gemma3", drop("blk.2.post_ffw_norm.weight"), BadGguf, r"post_ffw_norm\.weight is missing"),
        ("gemma4-ple", drop("blk.3.inp_gate.weight"), BadGguf, r"blk\.3\.inp_gate\.weight is missing"),
        ("gemma4-moe", drop("blk.0.ffn_gate_inp.scale"), BadGguf, r"ffn_gate_inp\.scale is missing"),
        (
            "llama", put("blk.1.attn_k.weight", 48, 64), BadGguf,
            r"blk\.1\.attn_k\.weight has shape \(48, 64\), expected \(32, 64\)",
        ),
        (
            "gemma4-dense", lambda _, tensors: tensors["rope_freqs.weight"].fill(0), BadGguf,
            r"rope_freqs\.weight has a factor that is not above 0",
        ),
        (
            "gemma3",
            lambda metadata, _: metadata.update(
                {
                    "gemma3.block_count": 62,
                    "gemma3.attention.head_count": np.array([0] + [4] * 61, np.int32),
                    "gemma3.attention.head_count_kv": np.array([0] + [2] * 61, np.int32),
                }
            ),
            BadGguf, r"blk\.0\.attn_q\.weight has shape",
        ),
        ("llama", put("rope_freqs.weight", 7), BadGguf, r"shape \(7,\), expected \(8,\)"),
        (
            "llama", key("llama.rope.dimension_count", 8), BadGguf,
            "dimension_count is 8, the heads have 16 dims",
        ),
        (
            "qwen3", key("qwen3.attention.value_length", 16), UnsupportedArchitecture,
            "keys of 32 and values of 16",
        ),
        (
            "llama", put("blk.0.ffn_up.bias", 96), UnsupportedArchitecture,
            r"blk\.0\.ffn_up\.bias: biases there are not supported",
        ),
        (
            "qwen3moe", put("blk.1.ffn_up_exps.scale", 8), UnsupportedArchitecture,
            r"blk\.1\.ffn_up_exps\.scale is not supported",
        ),
        (
            "gemma4-dense", lambda metadata, _: metadata.pop("gemma4.attention.sliding_window"),
            BadGguf, "sliding_window or its pattern is missing",
        ),
        (
            "gemma4-ple", key("gemma4.attention.shared_kv_layers", 5), BadGguf,
            "layer 1 shares keys that no layer owns",
        ),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_its_architecture_is_refused_by_name(
    trunk: str, change: Change, error: type[ModelError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        built(trunk, tmp_path, change)
