"""A tiny gemma4 trunk and its assistant drafter, written as GGUF files from seeded random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

VOCAB, WIDTH, OWN_WIDTH, HEADS = 96, 64, 48, 4
"""V; the trunk's and the drafter's hidden size; query heads of both."""
WINDOW, NEAR_DIM, FAR_DIM = 16, 16, 32
"""The sliding window, and the head dims of windowed and full layers."""
EPS, SOFTCAP, NEAR_BASE, FAR_BASE = 1e-6, 30.0, 1e4, 1e6
TRUNK_PATTERN = (True, False, True, False, True, False)
"""Windowed or full; the last two layers share the keys of layers 2 and 3."""
NUM_SHARED = 2
OWN_PATTERN = (True, True, True, False)
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"t{i}" for i in range(4, VOCAB))]
CONTEXT_LEN = 2048


class Tensors(dict[str, np.ndarray]):
    """float32 tensors by name, drawn from one seed; every one random, norms and scales too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def matrix(self, name: str, out: int, size: int) -> None:
        values = self._rng.standard_normal((out, size)) / np.sqrt(size)
        self[f"{name}.weight"] = values.astype(np.float32)

    def vector(self, name: str, size: int, around: float = 1.0) -> None:
        values = around + 0.1 * self._rng.standard_normal(size)
        self[f"{name}.weight"] = values.astype(np.float32)


def _add_layer(tensors: Tensors, layer: int, width: int, dim: int, *, owns_kv: bool) -> None:
    block = f"blk.{layer}"
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        tensors.vector(f"{block}.{name}", width)
    tensors.matrix(f"{block}.attn_q", HEADS * dim, width)
    # Scores are not scaled: such queries keep them small enough that rounding is not amplified.
    tensors.vector(f"{block}.attn_q_norm", dim, around=0.3)
    if owns_kv:
        tensors.matrix(f"{block}.attn_k", dim, width)
        tensors.matrix(f"{block}.attn_v", dim, width)
        tensors.vector(f"{block}.attn_k_norm", dim)
    tensors.matrix(f"{block}.attn_output", width, HEADS * dim)
    tensors.matrix(f"{block}.ffn_gate", 96, width)
    tensors.matrix(f"{block}.ffn_up", 96, width)
    tensors.matrix(f"{block}.ffn_down", width, 96)
    tensors.vector(f"{block}.layer_output_scale", 1)


def trunk_tensors(seed: int = 11) -> Tensors:
    tensors = Tensors(seed)
    tensors.matrix("token_embd", VOCAB, WIDTH)
    tensors.vector("output_norm", WIDTH)
    tensors["rope_freqs.weight"] = rope_factors()
    for layer, is_near in enumerate(TRUNK_PATTERN):
        owns_kv = layer < len(TRUNK_PATTERN) - NUM_SHARED
        _add_layer(tensors, layer, WIDTH, NEAR_DIM if is_near else FAR_DIM, owns_kv=owns_kv)
    return tensors


def assistant_tensors(seed: int = 12) -> Tensors:
    tensors = Tensors(seed)
    tensors.matrix("token_embd", VOCAB, OWN_WIDTH)
    tensors.vector("output_norm", OWN_WIDTH)
    tensors["rope_freqs.weight"] = rope_factors()
    tensors.matrix("nextn.pre_projection", OWN_WIDTH, 2 * WIDTH)
    tensors.matrix("nextn.post_projection", WIDTH, OWN_WIDTH)
    for layer, is_near in enumerate(OWN_PATTERN):
        _add_layer(tensors, layer, OWN_WIDTH, NEAR_DIM if is_near else FAR_DIM, owns_kv=False)
    return tensors


def rope_factors() -> np.ndarray:
    """A quarter of the pairs turn, the others stand still."""
    pairs = FAR_DIM // 2
    return np.array([1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4), np.float32)


def _keys(width: int, pattern: tuple[bool, ...], num_shared: int) -> dict[str, Any]:
    return {
        "context_length": CONTEXT_LEN,
        "embedding_length": width,
        "block_count": len(pattern),
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": FAR_DIM,
        "attention.value_length": FAR_DIM,
        "attention.key_length_swa": NEAR_DIM,
        "attention.value_length_swa": NEAR_DIM,
        "attention.layer_norm_rms_epsilon": EPS,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": list(pattern),
        "attention.shared_kv_layers": num_shared,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": FAR_DIM,
        "rope.dimension_count_swa": NEAR_DIM,
        "rope.freq_base": FAR_BASE,
        "rope.freq_base_swa": NEAR_BASE,
    }


def _write(
    path: Path, arch: str, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> Path:
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        full = f"{arch}.{key}"
        match value:
            case None:
                pass
            case list():
                writer.add_array(full, value)
            case int():
                writer.add_uint32(full, value)
            case float():
                writer.add_float32(full, value)
    _add_vocabulary(writer)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(TOKENS)
    control = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN]
    writer.add_token_types([*control, *([TokenType.NORMAL] * (VOCAB - 4))])
    writer.add_token_merges(["t 4"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)


def write_trunk(folder: Path, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    """The trunk's file; `changes` replace keys, `__` stands for a dot, None removes one."""
    keys = _keys(WIDTH, TRUNK_PATTERN, NUM_SHARED) | {"final_logit_softcapping": SOFTCAP}
    return _write(folder / "trunk.gguf", "gemma4", _changed(keys, changes), tensors)


def write_assistant(folder: Path, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    """The drafter's file; its softcap key must be ignored."""
    own = {
        "embedding_length_out": WIDTH,
        "nextn_predict_layers": len(OWN_PATTERN),
        "final_logit_softcapping": 5.0,
    }
    keys = _keys(OWN_WIDTH, OWN_PATTERN, len(OWN_PATTERN)) | own
    return _write(folder / "assistant.gguf", "gemma4-assistant", _changed(keys, changes), tensors)


def _changed(keys: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return dict(keys) | {key.replace("__", "."): value for key, value in changes.items()}


def predictable(noise: float = 0.4) -> tuple[Tensors, Tensors]:
    """A trunk that mostly follows one permutation of the tokens, and a drafter that knows it.

    `noise` is how much the layers add to the embedding: what makes the trunk deviate, so that
    drafts are accepted whole, in part and not at all.
    """
    trunk, assistant = trunk_tensors(), assistant_tensors()
    after = np.random.default_rng(5).permutation(VOCAB)
    table = trunk["token_embd.weight"]
    trunk["output.weight"] = table[np.argsort(after)]
    trunk["output.weight"][1] = 0.0  # an answer never ends by itself
    projection = assistant["nextn.pre_projection.weight"][:, :WIDTH]
    assistant["nextn.pre_projection.weight"][:, WIDTH:] *= noise
    assistant["token_embd.weight"] = 8.0 * (table @ projection.T)[np.argsort(after)]
    for tensors in (trunk, assistant):
        for name in tensors:
            if name.endswith(("post_attention_norm.weight", "post_ffw_norm.weight")):
                tensors[name] *= noise
    return trunk, assistant
