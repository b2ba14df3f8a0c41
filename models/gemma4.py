"""The `gemma4` architecture: dense, mixture-of-experts and per-layer-embedding (E) models.

Layers differ in head dim, kv heads and window; the last `shared_kv_layers` own no keys and values
and read those of the last owning layer of their kind. Source: llama.cpp `llm_build_gemma4`,
Hugging Face transformers `Gemma4TextModel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from backends.program import (
    Attention,
    MoeFfn,
    Norm,
    PerLayerAdd,
    PerLayerInputs,
    Program,
    Register,
    Rope,
    Scale,
)
from engine.speculative.target import TargetTraits
from models.config import ModelConfig
from models.errors import BadGguf, UnsupportedArchitecture
from models.gguf_file import GgufFile
from models.layers import (
    ProgramBuilder,
    RopeTable,
    add_attention_output,
    add_qkv,
    expert_gate_up,
    gated_ffn,
    rope,
    rope_factors,
)

_STANDING = 1e30
"""A wavelength factor that leaves a pair as it is. Source: llama.cpp `convert_hf_to_gguf`."""
_PREFERRED_WINDOW = 7
"""Drafts: with the last token they are 8 rows, where kernels for few rows end. Source: TensorSharp
`Gemma4Model.SpecPreferredDraftWindow`."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What windowed layers, or full ones, have in common."""

    head_dim: int
    rope: Rope
    window: int | None


def build(file: GgufFile, config: ModelConfig) -> Program:
    """The forward pass. Raises: BadGguf, UnsupportedArchitecture."""
    pattern = _window_pattern(file, config)
    windowed, full = _kinds(file, config)
    builder = ProgramBuilder(file, config)
    builder.embed(scale=math.sqrt(config.hidden_size))
    per_layer = _add_per_layer_inputs(builder) if config.per_layer_input_len else None
    donors: dict[bool, int] = {}
    for layer, is_windowed in enumerate(pattern):
        kind = windowed if is_windowed else full
        slot = donors.get(is_windowed)
        if layer < config.num_layers - config.shared_kv_layers:
            slot = donors[is_windowed] = builder.slot(
                config.kv_heads[layer], kind.head_dim, kind.window
            )
            _add_attention(builder, layer, kind, slot, owns_kv=True)
        elif slot is None:
            raise BadGguf(f"{file.path.name}: layer {layer} shares keys that no layer owns")
        else:
            _add_attention(builder, layer, kind, slot, owns_kv=False)
        _add_ffn(builder, layer)
        if per_layer is not None:
            _add_per_layer(builder, layer, per_layer)
        add_layer_scale(builder, layer)
    return builder.finish()


def traits(config: ModelConfig) -> TargetTraits:
    """Windowed slots keep enough rows for a verify to be rewound; a typed window may be longer."""
    return TargetTraits(preferred_window=_PREFERRED_WINDOW)


def _window_pattern(file: GgufFile, config: ModelConfig) -> tuple[bool, ...]:
    if config.window_pattern is None or not config.window:
        raise BadGguf(
            f"{file.path.name}: gemma4.attention.sliding_window or its pattern is missing"
        )
    return config.window_pattern


def _kinds(file: GgufFile, config: ModelConfig) -> tuple[LayerKind, LayerKind]:
    """Windowed and full. Only full layers stretch wavelengths by rope_freqs (p-RoPE)."""
    if config.key_len != config.value_len or config.key_len_swa != config.value_len_swa:
        raise UnsupportedArchitecture(
            f"{file.path.name}: keys and values of different head dims are not supported"
        )
    near = RopeTable(config.rope_base_swa, config.rope_dim_swa, is_scaled=False)
    far = RopeTable(config.rope_base, config.rope_dim, factors=_far_factors(file, config))
    return (
        LayerKind(config.key_len_swa, rope(config, near), config.window),
        LayerKind(config.key_len, rope(config, far), None),
    )


def _far_factors(file: GgufFile, config: ModelConfig) -> np.ndarray:
    """Wavelength factors [dims / 2] of full layers: a quarter of the pairs turn, the rest stand.

    Some files leave them out. Source: transformers `Gemma4TextConfig`, partial_rotary_factor 0.25
    of proportional rotation.
    """
    factors = rope_factors(file, config, config.rope_dim)
    if factors is None:
        factors = np.full(config.rope_dim // 2, _STANDING, np.float32)
        factors[: config.rope_dim // 8] = 1.0
    return factors


def _add_attention(
    builder: ProgramBuilder, layer: int, kind: LayerKind, slot: int, owns_kv: bool
) -> None:
    """Scores are not scaled. Without a v matrix, v is the raw k projection; v-norm has no weight.

    Ownership goes by layer number, never by which tensors the file happens to carry.
    """
    file, config, block = builder.file, builder.config, f"blk.{layer}"
    dim, heads = kind.head_dim, config.heads[layer]
    kv_size = config.kv_heads[layer] * dim
    has_v = file.has_tensor(f"{block}.attn_v.weight") or file.has_tensor(f"{block}.attn_qkv.weight")
    sizes: tuple[int, ...] = (heads * dim, kv_size, kv_size) if has_v else (heads * dim, kv_size)
    if not owns_kv:
        sizes = (heads * dim,)
    qkv = builder.register("qkv", sum(sizes))
    attended = builder.register("attended", heads * dim)
    add_qkv(builder, layer, qkv, sizes)
    builder.add(
        Attention(
            src=qkv,
            dst=attended,
            heads=heads,
            slot=slot,
            scale=1.0,
            rope=kind.rope,
            q_norm=builder.norm(f"{block}.attn_q_norm.weight", dim),
            k_norm=builder.norm(f"{block}.attn_k_norm.weight", dim) if owns_kv else None,
            v_norm=Norm(None, config.rms_eps) if owns_kv else None,
            writes_kv=owns_kv,
            v_from_k=owns_kv and not has_v,
        )
    )
    add_attention_output(builder, layer, attended, heads * dim, has_post_norm=True)


def _add_ffn(builder: ProgramBuilder, layer: int) -> None:
    """A dense block, or a dense branch beside experts that see the residual through own norms."""
    file, config, block = builder.file, builder.config, f"blk.{layer}"
    if not file.has_tensor(f"{block}.ffn_gate_inp.weight"):
        builder.add(gated_ffn(builder, layer, "gelu_tanh", post_norm="post_ffw_norm"))
        return
    experts, width = config.num_experts, config.hidden_size
    router_scale = file.vector(f"{block}.ffn_gate_inp.scale", width) / math.sqrt(width)
    builder.add(
        MoeFfn(
            dst=builder.residual,
            norm=builder.residual_norm(layer, "pre_ffw_norm_2"),
            router=file.weight(f"{block}.ffn_gate_inp.weight", (experts, width)),
            gate_up=expert_gate_up(builder, layer),
            down=file.weight(
                f"{block}.ffn_down_exps.weight", (experts, width, config.expert_ffn_len)
            ),
            num_used=config.num_experts_used,
            activation="gelu_tanh",
            router_norm=Norm(None, config.rms_eps),
            router_scale=router_scale,
            expert_scale=file.optional_vector(f"{block}.ffn_down_exps.scale", experts),
            experts_post_norm=builder.residual_norm(layer, "post_ffw_norm_2"),
            dense=gated_ffn(builder, layer, "gelu_tanh", post_norm="post_ffw_norm_1"),
            post_norm=builder.residual_norm(layer, "post_ffw_norm"),
        )
    )


def _add_per_layer_inputs(builder: ProgramBuilder) -> Register:
    """One small input per layer and token: table row and projected embedding, averaged."""
    file, config = builder.file, builder.config
    own, total = config.per_layer_input_len, config.per_layer_input_len * config.num_layers
    dst = builder.register("per_layer", total)
    builder.add(
        PerLayerInputs(
            table=file.weight("per_layer_token_embd.weight", (config.vocab_size, total)),
            src=builder.residual,
            dst=dst,
            projection=file.weight("per_layer_model_proj.weight", (total, config.hidden_size)),
            norm=builder.norm("per_layer_proj_norm.weight", own),
            table_scale=math.sqrt(own),
            proj_scale=1.0 / math.sqrt(config.hidden_size),
            scale=1.0 / math.sqrt(2.0),
        )
    )
    return dst


def _add_per_layer(builder: ProgramBuilder, layer: int, inputs: Register) -> None:
    file, block = builder.file, f"blk.{layer}"
    own, width = builder.config.per_layer_input_len, builder.config.hidden_size
    builder.add(
        PerLayerAdd(
            dst=builder.residual,
            inputs=inputs,
            offset=layer * own,
            gate=file.weight(f"{block}.inp_gate.weight", (own, width)),
            proj=file.weight(f"{block}.proj.weight", (width, own)),
            activation="gelu_tanh",
            post_norm=builder.residual_norm(layer, "post_norm"),
        )
    )


def add_layer_scale(builder: ProgramBuilder, layer: int) -> None:
    """The whole residual stream is scaled at the end of a layer, per-layer input included."""
    factor = builder.file.optional_vector(f"blk.{layer}.layer_output_scale.weight", 1)
    if factor is not None:
        builder.add(Scale(builder.residual, float(factor[0])))
