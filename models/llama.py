"""The `llama` architecture: SmolLM2, Llama 2 and 3, Mistral, and Mixtral's experts.

The file's q and k rows are already permuted for rotating neighbouring dims, so they are used as
they lie. Source: llama.cpp `llm_build_llama`; Touvron et al. 2023 (arXiv 2302.13971).
"""

from __future__ import annotations

import math
from dataclasses import replace

from backends.program import Program
from engine.speculative.target import TargetTraits
from models.config import ModelConfig
from models.errors import BadGguf
from models.gguf_file import GgufFile
from models.layers import (
    ProgramBuilder,
    RopeTable,
    SelfAttention,
    add_moe_ffn,
    add_self_attention,
    gated_ffn,
    head_dim,
    rope,
    rope_factors,
)


def build(file: GgufFile, config: ModelConfig) -> Program:
    """The forward pass. Raises: BadGguf, UnsupportedArchitecture."""
    dim = head_dim(config)
    if config.rope_dim != dim:
        raise BadGguf(
            f"{file.path.name}: llama.rope.dimension_count is {config.rope_dim}, "
            f"the heads have {dim} dims"
        )
    if config.num_experts and not config.expert_ffn_len:
        config = replace(config, expert_ffn_len=config.ffn_len[0])  # Mixtral files have one key
    builder = ProgramBuilder(file, config)
    table = RopeTable(
        config.rope_base, dim, interleaved=True, factors=rope_factors(file, config, dim)
    )
    attention = SelfAttention(rope(config, table), scale=1.0 / math.sqrt(dim))
    builder.embed()
    for layer in range(config.num_layers):
        add_self_attention(builder, layer, attention)
        if config.num_experts:
            add_moe_ffn(builder, layer)
        else:
            builder.add(gated_ffn(builder, layer, "silu"))
    return builder.finish()


def traits(config: ModelConfig) -> TargetTraits:
    """A linear cache: a verify only has to be rewound."""
    return TargetTraits()
