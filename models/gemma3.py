"""The `gemma3` architecture: text trunk of Gemma 3, 270M to 27B.

Norm weights in the file are final multipliers (the +1 is already in them).
Source: llama.cpp `llm_build_gemma3`; Gemma 3 report (arXiv 2503.19786).
"""

from __future__ import annotations

import math

from backends.program import Program
from engine.speculative.target import TargetTraits
from models.config import ModelConfig, periodic_window_pattern
from models.gguf_file import GgufFile
from models.layers import (
    ProgramBuilder,
    RopeTable,
    SelfAttention,
    add_self_attention,
    gated_ffn,
    head_dim,
    rope,
)

_DEFAULT_PERIOD = 6
"""Five windowed layers, then a full one. Source: llama.cpp `llama_model::load_hparams`."""
_LAYERS_OF_27B = 62


def build(file: GgufFile, config: ModelConfig) -> Program:
    """The forward pass. Raises: BadGguf, UnsupportedArchitecture."""
    builder = ProgramBuilder(file, config)
    windowed, full = _attentions(config)
    builder.embed(scale=math.sqrt(config.hidden_size))
    for layer, is_windowed in enumerate(_window_pattern(config)):
        add_self_attention(builder, layer, windowed if is_windowed else full)
        builder.add(gated_ffn(builder, layer, "gelu_tanh", post_norm="post_ffw_norm"))
    return builder.finish()


def _window_pattern(config: ModelConfig) -> tuple[bool, ...]:
    if not config.window:
        return (False,) * config.num_layers
    return config.window_pattern or periodic_window_pattern(config.num_layers, _DEFAULT_PERIOD)


def _attentions(config: ModelConfig) -> tuple[SelfAttention, SelfAttention]:
    """Windowed layers turn by their own base, unscaled; full ones by the scaled model base."""
    dim = head_dim(config)
    # No key carries the 27B model's query scale: its layer count tells it (llama.cpp as well).
    is_27b = config.num_layers == _LAYERS_OF_27B
    per_head = config.hidden_size / max(config.heads) if is_27b else dim
    scale = 1.0 / math.sqrt(per_head)
    near = rope(config, RopeTable(config.rope_base_swa, config.rope_dim_swa, is_scaled=False))
    far = rope(config, RopeTable(config.rope_base, config.rope_dim))
    return (
        SelfAttention(near, scale, config.window, has_qk_norm=True, has_post_norm=True),
        SelfAttention(far, scale, None, has_qk_norm=True, has_post_norm=True),
    )


def traits(config: ModelConfig) -> TargetTraits:
    """Windowed slots keep enough rows for a verify to be rewound."""
    return TargetTraits()
