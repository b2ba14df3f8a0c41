"""A model's numbers, read once from the metadata and checked. Knows no tensor and no layer code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from models.errors import BadGguf
from models.gguf_file import GgufFile

RopeScalingType = Literal["none", "linear", "yarn", "longrope"]

DEFAULT_ROPE_BASE = 10000.0
"""`rope.freq_base` and `rope.freq_base_swa` where a file has none."""
_MAX_LAYERS = 4096
_MAX_WIDTH = 1 << 24
_MAX_CONTEXT = 1 << 31


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How angles are stretched beyond the trained context. Keys `{arch}.rope.scaling.*`."""

    type: RopeScalingType
    """`type`; absent means linear, harmless with factor 1."""
    factor: float
    """`factor` (old files: `{arch}.rope.scale_linear`); frequencies are divided by it."""
    original_context_len: int
    """`original_context_length`, in tokens; absent means the context length."""
    attn_factor: float
    """`attn_factor`; multiplies cos and sin."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The keys all architectures share; an architecture reads its private ones itself.

    Keys are cited without their `{general.architecture}.` prefix. Per-layer tuples have num_layers
    entries whether the file stores a scalar or an array.
    Source: llama.cpp `llama_model::load_hparams` for keys and defaults.
    """

    architecture: str
    """`general.architecture`."""
    num_layers: int
    """`block_count`, NextN blocks included."""
    hidden_size: int
    """`embedding_length` (E)."""
    context_len: int
    """`context_length`, trained for, in tokens."""
    vocab_size: int
    """Rows of `token_embd.weight` (V); must equal the entries of `tokenizer.ggml.tokens`."""
    ffn_len: tuple[int, ...]
    """`feed_forward_length` per layer (F); 0 where absent."""
    heads: tuple[int, ...]
    """`attention.head_count` per layer (H)."""
    kv_heads: tuple[int, ...]
    """`attention.head_count_kv` per layer (G); absent means head_count."""
    key_len: int
    """`attention.key_length` (D); absent means hidden_size / heads."""
    value_len: int
    """`attention.value_length`; absent means hidden_size / heads."""
    key_len_swa: int
    """`attention.key_length_swa`, of windowed layers; absent means key_len."""
    value_len_swa: int
    """`attention.value_length_swa`; absent means value_len."""
    rms_eps: float
    """`attention.layer_norm_rms_epsilon`."""
    rope_dim: int
    """`rope.dimension_count`, rotated dims; absent means key_len."""
    rope_dim_swa: int
    """`rope.dimension_count_swa`; absent means rope_dim."""
    rope_base: float
    """`rope.freq_base`; absent means 10000."""
    rope_base_swa: float
    """`rope.freq_base_swa`; absent means 10000, never rope_base."""
    rope_scaling: RopeScaling
    window: int
    """`attention.sliding_window` (W), own token included; 0 means no layer has one."""
    window_pattern: tuple[bool, ...] | None
    """`attention.sliding_window_pattern` per layer, True is windowed; None where absent.

    A scalar period P means: layer i is windowed iff i % P < P - 1."""
    num_experts: int
    """`expert_count`; 0 is a dense model."""
    num_experts_used: int
    """`expert_used_count`."""
    expert_ffn_len: int
    """`expert_feed_forward_length`; 0 where absent."""
    shared_kv_layers: int
    """`attention.shared_kv_layers`: the last M layers own no keys, values; all of a drafter's."""
    per_layer_input_len: int
    """`embedding_length_per_layer_input` (P); 0 means no per-layer embeddings."""
    logit_softcap: float
    """`final_logit_softcapping`; 0 is off."""
    suppressed_ids: tuple[int, ...]
    """`tokenizer.ggml.suppress_tokens`: never sampled."""

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Read and validate.

        Raises: BadGguf naming the key and its value when one is missing or out of range.
        """
        keys = _Keys(file)
        num_layers = keys.count("block_count", 1, _MAX_LAYERS)
        hidden_size = keys.count("embedding_length", 1, _MAX_WIDTH)
        context_len = keys.count("context_length", 1, _MAX_CONTEXT)
        heads = keys.per_layer("attention.head_count", num_layers)
        kv_heads = keys.per_layer("attention.head_count_kv", num_layers, heads)
        _check_heads(file, heads, kv_heads)
        default_len = hidden_size // max(heads)
        key_len = keys.count("attention.key_length", 1, _MAX_WIDTH, default_len)
        value_len = keys.count("attention.value_length", 1, _MAX_WIDTH, default_len)
        key_len_swa = keys.count("attention.key_length_swa", 1, _MAX_WIDTH, key_len)
        rope_dim = keys.rotated_dims("rope.dimension_count", key_len, key_len)
        num_experts = keys.count("expert_count", 0, 1 << 16, 0)
        return cls(
            architecture=file.architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            context_len=context_len,
            vocab_size=_vocab_size(file),
            ffn_len=keys.per_layer("feed_forward_length", num_layers, (0,) * num_layers),
            heads=heads,
            kv_heads=kv_heads,
            key_len=key_len,
            value_len=value_len,
            key_len_swa=key_len_swa,
            value_len_swa=keys.count("attention.value_length_swa", 1, _MAX_WIDTH, value_len),
            rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            rope_dim=rope_dim,
            rope_dim_swa=keys.rotated_dims(
                "rope.dimension_count_swa", key_len_swa, min(rope_dim, key_len_swa)
            ),
            rope_base=keys.rope_base("rope.freq_base"),
            rope_base_swa=keys.rope_base("rope.freq_base_swa"),
            rope_scaling=_rope_scaling(keys, context_len),
            window=keys.count("attention.sliding_window", 0, _MAX_CONTEXT, 0),
            window_pattern=_window_pattern(keys, num_layers),
            num_experts=num_experts,
            num_experts_used=keys.count("expert_used_count", 0, num_experts, 0),
            expert_ffn_len=keys.count("expert_feed_forward_length", 0, _MAX_WIDTH, 0),
            shared_kv_layers=keys.count("attention.shared_kv_layers", 0, num_layers, 0),
            per_layer_input_len=keys.count("embedding_length_per_layer_input", 0, _MAX_WIDTH, 0),
            logit_softcap=keys.non_negative("final_logit_softcapping", 0.0),
            suppressed_ids=_suppressed_ids(file),
        )


def periodic_window_pattern(num_layers: int, period: int) -> tuple[bool, ...]:
    """Every layer is windowed but each `period`-th: True for layer i iff i % period < period - 1.

    Source: llama.cpp `llama_hparams::set_swa_pattern`.
    """
    return tuple(layer % period < period - 1 for layer in range(num_layers))


class _Keys:
    """Checked access to the keys of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = file.architecture

    def full(self, key: str) -> str:
        return f"{self.prefix}.{key}"

    def bad(self, key: str, value: object, wanted: str) -> BadGguf:
        return BadGguf(f"{self.file.path.name}: {self.full(key)} is {value}, expected {wanted}")

    def count(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self.file.integer(self.full(key), default)
        if not least <= value <= most:
            raise self.bad(key, value, f"{least} to {most}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.file.number(self.full(key), default)
        if value <= 0.0:
            raise self.bad(key, value, "a number above 0")
        return value

    def rope_base(self, key: str) -> float:
        """Wavelengths grow by it, and YaRN divides by its logarithm."""
        value = self.file.number(self.full(key), DEFAULT_ROPE_BASE)
        if value <= 1.0:
            raise self.bad(key, value, "a number above 1")
        return value

    def non_negative(self, key: str, default: float) -> float:
        value = self.file.number(self.full(key), default)
        if value < 0.0:
            raise self.bad(key, value, "0 or more")
        return value

    def rotated_dims(self, key: str, head_len: int, default: int) -> int:
        value = self.count(key, 0, head_len, default)
        if value % 2:
            raise self.bad(key, value, "an even number")
        return value

    def per_layer(
        self, key: str, num_layers: int, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """A scalar for all layers, or one entry per layer."""
        full = self.full(key)
        if default is not None and not self.file.has(full):
            return default
        if not isinstance(self.file.metadata.get(full), np.ndarray):
            return (self.count(key, 0, _MAX_WIDTH),) * num_layers
        array = self.file.array(full, "iu")
        assert array is not None
        if len(array) < num_layers:
            raise self.bad(key, f"{len(array)} entries", f"{num_layers}, one per layer")
        if len(array) and not 0 <= int(array.min()) <= int(array.max()) <= _MAX_WIDTH:
            raise self.bad(key, array.tolist(), f"entries from 0 to {_MAX_WIDTH}")
        return tuple(array[:num_layers].tolist())


def _check_heads(file: GgufFile, heads: tuple[int, ...], kv_heads: tuple[int, ...]) -> None:
    """Zero key-value heads mark layers without attention, which hybrid models have."""
    for layer, (num_heads, num_kv) in enumerate(zip(heads, kv_heads, strict=True)):
        if num_kv and num_heads % num_kv:
            raise BadGguf(
                f"{file.path.name}: layer {layer} has {num_heads} heads, which {num_kv} "
                "key-value heads do not divide"
            )
    if max(heads) == 0 or max(kv_heads) == 0:
        raise BadGguf(f"{file.path.name}: no layer has attention heads")


def _vocab_size(file: GgufFile) -> int:
    shape = file.weight("token_embd.weight").shape
    if len(shape) != 2 or shape[0] > _MAX_WIDTH:
        raise BadGguf(f"{file.path.name}: token_embd.weight has shape {shape}, expected (V, E)")
    tokens = file.strings("tokenizer.ggml.tokens")
    if tokens and len(tokens) != shape[0]:
        raise BadGguf(
            f"{file.path.name}: {len(tokens)} tokens in the vocabulary, "
            f"{shape[0]} rows in token_embd.weight"
        )
    return shape[0]


def _rope_scaling(keys: _Keys, context_len: int) -> RopeScaling:
    key = "rope.scaling.type"
    kind = keys.file.text(keys.full(key), "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.bad(key, kind, "none, linear, yarn or longrope")
    old_factor = keys.non_negative("rope.scale_linear", 1.0)
    # llama.cpp reads a stored 0 as "not scaled".
    factor = keys.non_negative("rope.scaling.factor", old_factor) or 1.0
    return RopeScaling(
        type=cast(RopeScalingType, kind),
        factor=factor,
        original_context_len=keys.count(
            "rope.scaling.original_context_length", 1, _MAX_CONTEXT, context_len
        ),
        attn_factor=keys.positive("rope.scaling.attn_factor", 1.0),
    )


def _window_pattern(keys: _Keys, num_layers: int) -> tuple[bool, ...] | None:
    key = "attention.sliding_window_pattern"
    value = keys.file.metadata.get(keys.full(key))
    if value is None:
        return None
    if not isinstance(value, np.ndarray):
        period = keys.count(key, 1, _MAX_LAYERS)
        return periodic_window_pattern(num_layers, period)
    array = keys.file.array(keys.full(key), "biu")
    assert array is not None
    if len(array) < num_layers:
        raise keys.bad(key, f"{len(array)} entries", f"{num_layers}, one per layer")
    return tuple(bool(flag) for flag in array[:num_layers])


def _suppressed_ids(file: GgufFile) -> tuple[int, ...]:
    array = file.array("tokenizer.ggml.suppress_tokens", "iu")
    if array is None:
        return ()
    vocab_size = _vocab_size(file)
    for token_id in array.tolist():
        if not 0 <= token_id < vocab_size:
            raise BadGguf(f"{file.path.name}: suppressed token {token_id} is not in the vocabulary")
    return tuple(array.tolist())
