"""Building blocks the trunks share: registers, checked weights, rotary tables, whole sub-blocks.

A trunk file says which blocks a layer has and in which order; everything here appends operations
to one `Program` and computes nothing. Tensor names and shapes: llama.cpp `llama-arch.cpp`.
Dimension letters: E hidden, H heads, G kv heads, D head dim, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from backends.program import (
    Activation,
    Attention,
    Embed,
    GatedFfn,
    Head,
    KvSlot,
    MoeFfn,
    Norm,
    Op,
    Program,
    Project,
    ProjectAdd,
    Register,
    Rope,
    Weight,
)
from models.config import ModelConfig
from models.errors import BadGguf, UnsupportedArchitecture
from models.gguf_file import GgufFile


class ProgramBuilder:
    """Collects the operations of one trunk. Register 0 is the residual stream [E]."""

    residual: Register = 0

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.file = file
        self.config = config
        self.table = file.weight("token_embd.weight", (config.vocab_size, config.hidden_size))
        self.slots: list[KvSlot] = []
        self._ops: list[Op] = []
        self._widths = [config.hidden_size]
        self._registers: dict[tuple[str, int], Register] = {}

    def add(self, op: Op) -> None:
        """Append an operation."""
        self._ops.append(op)

    def register(self, role: str, width: int) -> Register:
        """The scratch register of a role and width; layers of one shape share it."""
        key = (role, width)
        if key not in self._registers:
            self._registers[key] = len(self._widths)
            self._widths.append(width)
        return self._registers[key]

    def slot(self, kv_heads: int, head_dim: int, window: int | None) -> int:
        """A new key/value slot; returns its index."""
        self.slots.append(KvSlot(kv_heads, head_dim, window))
        return len(self.slots) - 1

    def norm(self, name: str, width: int) -> Norm:
        """A norm with a weight of this name. Raises: BadGguf when missing or misfit."""
        return Norm(self.file.vector(name, width), self.config.rms_eps)

    def residual_norm(self, layer: int, name: str) -> Norm:
        """The norm `blk.<layer>.<name>.weight` over the residual width."""
        return self.norm(f"blk.{layer}.{name}.weight", self.config.hidden_size)

    def embed(self, scale: float = 1.0) -> None:
        """Start the residual stream from the token table."""
        self.add(Embed(self.table, self.residual, scale))

    def finish(self, hidden_projection: Weight | None = None) -> Program:
        """Append the head, tied to the token table where the file has no `output.weight`.

        `hidden_projection` (F, E) brings a drafter's hidden rows to the width of its target's.
        """
        config = self.config
        weight = self.file.optional_weight("output.weight", self.table.shape) or self.table
        self.add(
            Head(
                self.residual,
                self.norm("output_norm.weight", config.hidden_size),
                weight,
                config.logit_softcap,
                config.suppressed_ids,
                hidden_projection,
            )
        )
        return Program(
            tuple(self._ops),
            tuple(self._widths),
            tuple(self.slots),
            config.vocab_size,
            config.hidden_size if hidden_projection is None else hidden_projection.shape[0],
        )


@dataclass(frozen=True, slots=True)
class RopeTable:
    """What one kind of layer rotates by."""

    base: float
    dims: int
    interleaved: bool = False
    is_scaled: bool = True
    """Whether the file's `rope.scaling` applies to these layers."""
    factors: np.ndarray | None = None
    """float32 [dims / 2], wavelengths are multiplied by it (rope_freqs, longrope)."""


def rope(config: ModelConfig, table: RopeTable) -> Rope:
    """Fold base, factors and scaling into one frequency per pair.

    Source: Su et al. 2021 (arXiv 2104.09864); YaRN: Peng et al. 2023 (arXiv 2309.00071), with
    ggml's `rope_yarn` constants beta_fast 32, beta_slow 1.
    """
    pairs = np.arange(table.dims // 2, dtype=np.float64)
    inv_freq = table.base ** (-2.0 * pairs / table.dims)
    if table.factors is not None:
        inv_freq = inv_freq / table.factors.astype(np.float64)
    scaling = config.rope_scaling
    if not table.is_scaled:
        return Rope(inv_freq, table.interleaved)
    if scaling.type == "yarn":
        kept = _yarn_kept_share(pairs, table, scaling.original_context_len)
        inv_freq = inv_freq / scaling.factor * (1.0 - kept) + inv_freq * kept
        mscale = (1.0 + 0.1 * math.log(scaling.factor)) * scaling.attn_factor
        return Rope(inv_freq, table.interleaved, mscale)
    if scaling.type != "none":
        inv_freq = inv_freq / scaling.factor
    return Rope(inv_freq, table.interleaved, scaling.attn_factor)


def _yarn_kept_share(pairs: np.ndarray, table: RopeTable, context_len: int) -> np.ndarray:
    """How much of each pair's own frequency YaRN keeps: 1 for fast pairs, 0 for slow ones."""

    def pair_turning(times: float) -> float:
        turns = context_len / (times * 2.0 * math.pi)
        return table.dims * math.log(turns) / (2.0 * math.log(table.base))

    low = max(0.0, math.floor(pair_turning(32.0)))
    high = min(table.dims - 1.0, math.ceil(pair_turning(1.0)))
    return 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)


def rope_factors(file: GgufFile, config: ModelConfig, dims: int) -> np.ndarray | None:
    """The file's wavelength factors [dims / 2], or None.

    Of longrope's two sets the long one is meant for contexts beyond the original length.
    Raises: BadGguf when one is missing, or not above zero.
    """
    name = "rope_freqs.weight"
    if config.rope_scaling.type == "longrope":
        is_long = config.context_len > config.rope_scaling.original_context_len
        name = "rope_factors_long.weight" if is_long else "rope_factors_short.weight"
    elif not file.has_tensor(name):
        return None
    factors = file.vector(name, dims // 2)
    if not (factors > 0.0).all():
        raise BadGguf(f"{file.path.name}: tensor {name} has a factor that is not above 0")
    return factors


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """How a layer that owns its keys and values attends."""

    rope: Rope
    scale: float
    window: int | None = None
    has_qk_norm: bool = False
    has_post_norm: bool = False


def head_dim(config: ModelConfig) -> int:
    """D, the same for keys and values. Raises: UnsupportedArchitecture when they differ."""
    if config.key_len != config.value_len or config.key_len_swa != config.value_len_swa:
        raise UnsupportedArchitecture(
            f"keys of {config.key_len} and values of {config.value_len} numbers per head "
            f"are not supported for {config.architecture}"
        )
    return config.key_len


def add_self_attention(builder: ProgramBuilder, layer: int, attention: SelfAttention) -> None:
    """x += post_norm(Wo attend(norm(x))), with one slot of its own."""
    config, block = builder.config, f"blk.{layer}"
    dim, heads, kv_heads = head_dim(config), config.heads[layer], config.kv_heads[layer]
    qkv = builder.register("qkv", (heads + 2 * kv_heads) * dim)
    add_qkv(builder, layer, qkv, (heads * dim, kv_heads * dim, kv_heads * dim))
    attended = builder.register("attended", heads * dim)
    builder.add(
        Attention(
            src=qkv,
            dst=attended,
            heads=heads,
            slot=builder.slot(kv_heads, dim, attention.window),
            scale=attention.scale,
            rope=attention.rope,
            q_norm=builder.norm(f"{block}.attn_q_norm.weight", dim)
            if attention.has_qk_norm
            else None,
            k_norm=builder.norm(f"{block}.attn_k_norm.weight", dim)
            if attention.has_qk_norm
            else None,
        )
    )
    add_attention_output(builder, layer, attended, heads * dim, attention.has_post_norm)


def add_qkv(builder: ProgramBuilder, layer: int, dst: Register, sizes: tuple[int, ...]) -> None:
    """dst = q | k | v of norm(x); `sizes` are the widths of the parts this layer has.

    A file may store the parts fused in one matrix, rows in the same order.
    """
    file, block, width = builder.file, f"blk.{layer}", builder.config.hidden_size
    names = [f"{block}.attn_{part}" for part in "qkv"[: len(sizes)]]
    if file.has_tensor(f"{block}.attn_qkv.weight"):
        names, sizes = [f"{block}.attn_qkv"], (sum(sizes),)
    weights = [
        file.weight(f"{name}.weight", (size, width))
        for name, size in zip(names, sizes, strict=True)
    ]
    biases = [
        file.optional_vector(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)
    ]
    builder.add(
        Project(
            src=builder.residual,
            dst=dst,
            weights=tuple(weights),
            norm=builder.residual_norm(layer, "attn_norm"),
            biases=None if all(bias is None for bias in biases) else tuple(biases),
        )
    )


def add_attention_output(
    builder: ProgramBuilder, layer: int, src: Register, size: int, has_post_norm: bool
) -> None:
    """x += post_norm(Wo src + bias)."""
    name, width = f"blk.{layer}.attn_output", builder.config.hidden_size
    builder.add(
        ProjectAdd(
            src=src,
            dst=builder.residual,
            weight=builder.file.weight(f"{name}.weight", (width, size)),
            bias=builder.file.optional_vector(f"{name}.bias", width),
            post_norm=builder.residual_norm(layer, "post_attention_norm")
            if has_post_norm
            else None,
        )
    )


def gated_ffn(
    builder: ProgramBuilder, layer: int, activation: Activation, post_norm: str | None = None
) -> GatedFfn:
    """The dense feed-forward block of a layer.

    Raises: UnsupportedArchitecture for biases, which no known file of these architectures has.
    """
    file, block = builder.file, f"blk.{layer}"
    width, ffn_len = builder.config.hidden_size, builder.config.ffn_len[layer]
    for part in ("gate", "up", "down"):
        if file.has_tensor(f"{block}.ffn_{part}.bias"):
            raise UnsupportedArchitecture(
                f"{block}.ffn_{part}.bias: biases there are not supported"
            )
    return GatedFfn(
        dst=builder.residual,
        norm=builder.residual_norm(layer, "ffn_norm"),
        gate=file.weight(f"{block}.ffn_gate.weight", (ffn_len, width)),
        up=file.weight(f"{block}.ffn_up.weight", (ffn_len, width)),
        down=file.weight(f"{block}.ffn_down.weight", (width, ffn_len)),
        activation=activation,
        post_norm=None if post_norm is None else builder.residual_norm(layer, post_norm),
    )


def expert_gate_up(builder: ProgramBuilder, layer: int) -> tuple[Weight, ...]:
    """The gate and up stacks of a layer's experts: one fused weight, or two.

    Raises: UnsupportedArchitecture where they carry a scale per expert (NVFP4 files).
    """
    file, block = builder.file, f"blk.{layer}"
    config = builder.config
    experts, ffn_len, width = config.num_experts, config.expert_ffn_len, config.hidden_size
    for part in ("gate_up", "gate", "up"):
        if file.has_tensor(f"{block}.ffn_{part}_exps.scale"):
            raise UnsupportedArchitecture(f"{block}.ffn_{part}_exps.scale is not supported")
    if file.has_tensor(f"{block}.ffn_gate_up_exps.weight"):
        return (file.weight(f"{block}.ffn_gate_up_exps.weight", (experts, 2 * ffn_len, width)),)
    return tuple(
        file.weight(f"{block}.ffn_{part}_exps.weight", (experts, ffn_len, width))
        for part in ("gate", "up")
    )


def add_moe_ffn(builder: ProgramBuilder, layer: int) -> None:
    """x += sum of the top experts of norm(x), SiLU-gated, weights renormalised to sum 1."""
    file, config, block = builder.file, builder.config, f"blk.{layer}"
    experts, width = config.num_experts, config.hidden_size
    builder.add(
        MoeFfn(
            dst=builder.residual,
            norm=builder.residual_norm(layer, "ffn_norm"),
            router=file.weight(f"{block}.ffn_gate_inp.weight", (experts, width)),
            gate_up=expert_gate_up(builder, layer),
            down=file.weight(
                f"{block}.ffn_down_exps.weight", (experts, width, config.expert_ffn_len)
            ),
            num_used=config.num_experts_used,
            activation="silu",
            expert_scale=file.optional_vector(f"{block}.ffn_down_exps.scale", experts),
        )
    )
