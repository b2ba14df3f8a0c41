"""A model's numbers come from its keys, with llama.cpp's defaults, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.config import ModelConfig, periodic_window_pattern
from models.errors import BadGguf
from models.gguf_file import GgufFile
from tests.models.make_gguf import made

TRUNKS = Path(__file__).parent.parent / "fixtures" / "trunks"
LEAST = {
    "block_count": 2,
    "embedding_length": 32,
    "context_length": 128,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def config(tmp_path: Path, *, rows: int = 3, tokens: int = 3, **changes: Any) -> ModelConfig:
    """The least file plus keys; `__` stands for a dot, None removes a key."""
    keys = LEAST | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"toy.{key}": value for key, value in keys.items() if value is not None}
    metadata |= {
        "general.architecture": "toy",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(tokens)],
    }
    if "suppress" in changes:
        metadata["tokenizer.ggml.suppress_tokens"] = changes["suppress"]
    parts = made(metadata, token_embd__weight=np.zeros((rows, 32)))
    return ModelConfig.from_gguf(GgufFile.open(parts.write(tmp_path / "model.gguf")))


def test_absent_keys_take_llama_cpp_defaults(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert found.heads == found.kv_heads == (4, 4)
    assert found.ffn_len == (0, 0)
    assert found.key_len == found.value_len == found.key_len_swa == found.value_len_swa == 8
    assert found.rope_dim == found.rope_dim_swa == 8
    assert found.rope_base == found.rope_base_swa == 10000.0
    assert (found.rope_scaling.type, found.rope_scaling.factor) == ("linear", 1.0)
    assert found.rope_scaling.original_context_len == 128
    assert (found.window, found.window_pattern) == (0, None)
    assert (found.num_experts, found.logit_softcap, found.suppressed_ids) == (0, 0.0, ())
    assert found.vocab_size == 3


def test_the_windowed_base_never_follows_the_full_one(tmp_path: Path) -> None:
    assert config(tmp_path, rope__freq_base=1e6).rope_base_swa == 10000.0


def test_per_layer_keys_are_scalars_or_arrays(tmp_path: Path) -> None:
    found = config(
        tmp_path, feed_forward_length=[64, 96], attention__head_count_kv=[2, 0], rope__freq_base=5e5
    )
    assert found.ffn_len == (64, 96)
    assert found.kv_heads == (2, 0)
    assert config(tmp_path, feed_forward_length=64).ffn_len == (64, 64)


def test_window_patterns_are_flags_or_a_period(tmp_path: Path) -> None:
    key = "attention__sliding_window_pattern"
    assert config(tmp_path, **{key: [True, False]}).window_pattern == (True, False)
    assert config(tmp_path, **{key: 2}).window_pattern == (True, False)
    full = [i for i, flag in enumerate(periodic_window_pattern(18, 6)) if not flag]
    assert full == [5, 11, 17]


def test_the_old_linear_scale_key_is_read(tmp_path: Path) -> None:
    assert config(tmp_path, rope__scale_linear=4.0).rope_scaling.factor == 4.0


def test_gemma4_numbers_are_those_of_the_file() -> None:
    found = ModelConfig.from_gguf(GgufFile.open(TRUNKS / "gemma4-ple" / "model.gguf"))
    assert found.ffn_len == (96, 96, 96, 96, 192, 192)
    assert (found.key_len, found.key_len_swa) == (32, 16)
    assert (found.rope_dim, found.rope_dim_swa) == (32, 16)
    assert (found.rope_base, found.rope_base_swa) == (1e6, 1e4)
    assert found.window_pattern == (True, False) * 3
    assert (found.shared_kv_layers, found.per_layer_input_len) == (2, 16)
    assert (found.window, found.logit_softcap) == (16, 30.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": 0}, "toy.block_count is 0, expected 1 to"),
        ({"block_count": None}, "key toy.block_count is missing"),
        ({"block_count": "two"}, "toy.block_count should be an integer"),
        ({"embedding_length": -1}, "toy.embedding_length is -1"),
        ({"context_length": 0}, "toy.context_length is 0"),
        ({"attention__head_count": 0}, "no layer has attention heads"),
        ({"attention__head_count_kv": 3}, "layer 0 has 4 heads, which 3 key-value heads"),
        ({"attention__head_count_kv": [0, 0]}, "no layer has attention heads"),
        ({"attention__head_count_kv": [2]}, r"head_count_kv is 1 entries, expected 2"),
        ({"feed_forward_length": [64, -1]}, "toy.feed_forward_length is"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, "rms_epsilon is 0.0, expected a number"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is nan"),
        ({"rope__freq_base": -1.0}, "toy.rope.freq_base is -1.0"),
        ({"rope__freq_base_swa": 1.0}, "toy.rope.freq_base_swa is 1.0, expected a number above 1"),
        ({"rope__dimension_count": 7}, "toy.rope.dimension_count is 7, expected an even"),
        ({"rope__dimension_count": 10}, "toy.rope.dimension_count is 10, expected 0 to 8"),
        ({"rope__scaling__type": "warp"}, "toy.rope.scaling.type is warp"),
        ({"expert_count": 2, "expert_used_count": 3}, "expert_used_count is 3, expected 0 to 2"),
        ({"attention__shared_kv_layers": 3}, "shared_kv_layers is 3, expected 0 to 2"),
        ({"attention__sliding_window_pattern": [True]}, "pattern is 1 entries, expected 2"),
        ({"final_logit_softcapping": -1.0}, "softcapping is -1.0, expected 0 or more"),
        ({"suppress": [5]}, "suppressed token 5 is not in the vocabulary"),
        ({"tokens": 4}, "4 tokens in the vocabulary, 3 rows in token_embd.weight"),
    ],
)
def test_impossible_numbers_are_refused_by_key_and_value(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadGguf, match=words):
        config(tmp_path, **changes)
