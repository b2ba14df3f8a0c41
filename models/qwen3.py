"""The `qwen3` architecture: dense Qwen 3. Source: llama.cpp `llm_build_qwen3`."""

from __future__ import annotations

import math

from backends.program import Program
from engine.speculative.target import TargetTraits
from models.config import ModelConfig
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


def self_attention(config: ModelConfig) -> SelfAttention:
    """q and k normed per head, then rotated in halves over the full head."""
    table = RopeTable(config.rope_base, config.rope_dim)
    scale = 1.0 / math.sqrt(head_dim(config))
    return SelfAttention(rope(config, table), scale, has_qk_norm=True)


def build(file: GgufFile, config: ModelConfig) -> Program:
    """The forward pass. Raises: BadGguf, UnsupportedArchitecture."""
    builder = ProgramBuilder(file, config)
    attention = self_attention(config)
    builder.embed()
    for layer in range(config.num_layers):
        add_self_attention(builder, layer, attention)
        builder.add(gated_ffn(builder, layer, "silu"))
    return builder.finish()


def traits(config: ModelConfig) -> TargetTraits:
    """A linear cache: a verify only has to be rewound."""
    return TargetTraits()
