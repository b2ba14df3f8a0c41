"""The `qwen3moe` architecture: Qwen 3 with experts in every layer.

Expert weights are always renormalised, whatever the original configuration said.
Source: llama.cpp `llm_build_qwen3moe`.
"""

from __future__ import annotations

from backends.program import Program
from engine.speculative.target import TargetTraits
from models.config import ModelConfig
from models.gguf_file import GgufFile
from models.layers import ProgramBuilder, add_moe_ffn, add_self_attention
from models.qwen3 import self_attention


def build(file: GgufFile, config: ModelConfig) -> Program:
    """The forward pass. Raises: BadGguf, UnsupportedArchitecture."""
    builder = ProgramBuilder(file, config)
    attention = self_attention(config)
    builder.embed()
    for layer in range(config.num_layers):
        add_self_attention(builder, layer, attention)
        add_moe_ffn(builder, layer)
    return builder.finish()


def traits(config: ModelConfig) -> TargetTraits:
    """A linear cache; experts add no state."""
    return TargetTraits()
