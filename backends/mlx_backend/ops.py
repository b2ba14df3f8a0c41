"""Every operation of a program in MLX, on whole batches of rows.

Activations are float32; products with float16 weights and the attention over a float16 cache
round their inputs. Meaning of each operation: `backends.program`, and `backends.reference_ops` for
one row. Everything is lazy until the executable evaluates its results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from backends.mlx_backend.kv_cache import MlxCache, SlotBuffer
from backends.mlx_backend.matrix import Matrix
from backends.program import (
    Activation,
    Attention,
    Embed,
    EmbedWithHidden,
    GatedFfn,
    Head,
    MoeFfn,
    Norm,
    PerLayerAdd,
    PerLayerInputs,
    Project,
    ProjectAdd,
    Rope,
    Scale,
    Weight,
)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one chat, contiguous in the batch and in position."""

    cache: MlxCache
    rows: slice
    """Its rows of the batch."""
    start: int
    """Position of the first row."""
    is_appended: bool = True
    """False for a drafter's rows: all stand at the cache's length and see what is before it."""

    @property
    def positions(self) -> np.ndarray:
        """Where each row stands. Shapes: -> int64 [n]."""
        return self.start + np.arange(self.num_rows) * int(self.is_appended)

    @property
    def num_rows(self) -> int:
        """Rows of this chat."""
        return int(self.rows.stop - self.rows.start)


@dataclass(slots=True)
class Weights:
    """Matrices and small arrays of a program."""

    matrices: dict[int, Matrix]
    """By id of the Weight."""
    constants: dict[int, mx.array] = field(default_factory=dict)

    def constant(self, array: np.ndarray) -> mx.array:
        """A small array of the program, converted once."""
        held = self.constants.get(id(array))
        if held is None:
            held = self.constants[id(array)] = mx.array(array)
        return held

    def product(self, weight: Weight, x: mx.array) -> mx.array:
        """weight @ every row."""
        return self.matrices[id(weight)].multiply(x)

    def norm(self, norm: Norm | None, x: mx.array) -> mx.array:
        """RMS norm over the last axis; None passes x through."""
        if norm is None:
            return x
        return mx.fast.rms_norm(
            x, None if norm.weight is None else self.constant(norm.weight), norm.eps
        )


@dataclass(slots=True)
class Rows:
    """A batch on its way through the operations."""

    positions: np.ndarray
    """int64 [R]."""
    parts: list[Part]
    looked_up: dict[int, mx.array]
    """Table rows float32 [R, width], by id of the operation that asks for them."""
    wanted: list[int]
    """Rows whose logits are computed."""
    given: mx.array | None = None
    """Hidden rows float32 [R, given], for a drafter."""
    registers: dict[int, mx.array] = field(default_factory=dict)
    angles: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)
    """cos and sin float32 [R, 1, pairs], by id of the Rope."""
    hidden: mx.array | None = None
    logits: mx.array | None = None


def activate(activation: Activation, x: mx.array) -> mx.array:
    """silu, or gelu in its tanh form."""
    if activation == "silu":
        return x * mx.sigmoid(x)
    return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def rotate(rope: Rope | None, x: mx.array, rows: Rows) -> mx.array:
    """Rotate the leading dims of every head. Shapes: x [R, heads, D]."""
    if rope is None:
        return x
    if id(rope) not in rows.angles:
        # On the host in float64: MLX has no float64 on a GPU, float32 angles lose long contexts.
        angles = rows.positions[:, None, None] * rope.inv_freq
        tables = (np.cos(angles) * rope.mscale, np.sin(angles) * rope.mscale)
        cos, sin = (mx.array(table.astype(np.float32)) for table in tables)
        rows.angles[id(rope)] = (cos, sin)
    cos, sin = rows.angles[id(rope)]
    num_pairs = len(rope.inv_freq)
    turned, rest = x[..., : 2 * num_pairs], x[..., 2 * num_pairs :]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).flatten(-2)
    else:
        a, b = turned[..., :num_pairs], turned[..., num_pairs:]
        turned = mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return mx.concatenate([turned, rest], axis=-1)


def attend(op: Attention, query: mx.array, part: Part, slot: SlotBuffer) -> mx.array:
    """Shapes: query [n, H, D] -> [n, H * D] float32."""
    end = part.start + part.num_rows * int(part.is_appended)
    first = slot.first_visible(part.start)
    seen = slice(first - slot.base, end - slot.base)
    behind = part.positions[:, None] - np.arange(first, end)[None, :]
    mask = (behind >= 0) & (behind < (slot.spec.window or end + 1))
    attended = mx.fast.scaled_dot_product_attention(
        query.swapaxes(0, 1)[None].astype(slot.keys.dtype),
        slot.keys[None, :, seen],
        slot.values[None, :, seen],
        scale=op.scale,
        mask=None if mask.all() else mx.array(mask),
    )
    return attended[0].swapaxes(0, 1).flatten(1).astype(mx.float32)


def embed(op: Embed, rows: Rows, weights: Weights) -> None:
    """Start from the looked-up rows."""
    rows.registers[op.dst] = rows.looked_up[id(op)] * op.scale


def embed_with_hidden(op: EmbedWithHidden, rows: Rows, weights: Weights) -> None:
    """Start from the looked-up rows with the given ones beside them."""
    assert rows.given is not None, "checked before the rows were made"
    embeddings = rows.looked_up[id(op)] * op.scale
    rows.registers[op.dst] = mx.concatenate([embeddings, rows.given], axis=1)


def project(op: Project, rows: Rows, weights: Weights) -> None:
    """Concatenate the products with every matrix."""
    x = weights.norm(op.norm, rows.registers[op.src])
    parts = [weights.product(weight, x) for weight in op.weights]
    for i, bias in enumerate(op.biases or ()):
        if bias is not None:
            parts[i] = parts[i] + weights.constant(bias)
    rows.registers[op.dst] = mx.concatenate(parts, axis=1)


def attention(op: Attention, rows: Rows, weights: Weights) -> None:
    """Write every part's keys and values, then let its queries look."""
    spec = rows.parts[0].cache.slots[op.slot].spec
    heads = rows.registers[op.src].reshape(len(rows.positions), -1, spec.head_dim)
    query = rotate(op.rope, weights.norm(op.q_norm, heads[:, : op.heads]), rows)
    if op.writes_kv:
        end_of_keys = op.heads + spec.kv_heads
        raw_key = heads[:, op.heads : end_of_keys]
        key = rotate(op.rope, weights.norm(op.k_norm, raw_key), rows).swapaxes(0, 1)
        value = weights.norm(op.v_norm, raw_key if op.v_from_k else heads[:, end_of_keys:])
        value = value.swapaxes(0, 1)
        for part in rows.parts:
            slot = part.cache.slots[op.slot]
            slot.write(part.start, key[:, part.rows], value[:, part.rows])
    rows.registers[op.dst] = mx.concatenate(
        [attend(op, query[part.rows], part, part.cache.slots[op.slot]) for part in rows.parts]
    )


def project_add(op: ProjectAdd, rows: Rows, weights: Weights) -> None:
    """Add a projection to the residual."""
    y = weights.product(op.weight, rows.registers[op.src])
    if op.bias is not None:
        y = y + weights.constant(op.bias)
    rows.registers[op.dst] = rows.registers[op.dst] + weights.norm(op.post_norm, y)


def ffn_output(op: GatedFfn, x: mx.array, weights: Weights) -> mx.array:
    """post_norm(down @ (act(gate @ n) * (up @ n))) with n = norm(x)."""
    n = weights.norm(op.norm, x)
    gated = activate(op.activation, weights.product(op.gate, n)) * weights.product(op.up, n)
    return weights.norm(op.post_norm, weights.product(op.down, gated))


def gated_ffn(op: GatedFfn, rows: Rows, weights: Weights) -> None:
    """Add the feed-forward block to the residual."""
    x = rows.registers[op.dst]
    rows.registers[op.dst] = x + ffn_output(op, x, weights)


def routed(op: MoeFfn, x: mx.array, weights: Weights) -> tuple[mx.array, mx.array]:
    """The experts of every row, uint32 [R, k], and their weights, float32 [R, k]."""
    r = weights.norm(op.router_norm or op.norm, x)
    if op.router_scale is not None:
        r = r * weights.constant(op.router_scale)
    probs = mx.softmax(weights.product(op.router, r), axis=-1)
    experts = mx.argsort(-probs, axis=-1)[:, : op.num_used]
    share = mx.take_along_axis(probs, experts, axis=-1)
    share = share / share.sum(axis=-1, keepdims=True)
    if op.expert_scale is not None:
        share = share * weights.constant(op.expert_scale)[experts]
    return experts, share


def moe_ffn(op: MoeFfn, rows: Rows, weights: Weights) -> None:
    """Add the weighted experts, and the dense branch where there is one, to the residual."""
    x = rows.registers[op.dst]
    experts, share = routed(op, x, weights)
    n = weights.norm(op.norm, x)[:, None, None, :]
    products = [weights.matrices[id(w)].multiply_experts(n, experts) for w in op.gate_up]
    gate, up = products if len(products) == 2 else mx.split(products[0], 2, axis=-1)
    down = weights.matrices[id(op.down)]
    each = down.multiply_experts(activate(op.activation, gate) * up, experts)[:, :, 0]
    mixed = weights.norm(op.experts_post_norm, (each * share[..., None]).sum(axis=1))
    if op.dense is not None:
        mixed = mixed + ffn_output(op.dense, x, weights)
    rows.registers[op.dst] = x + weights.norm(op.post_norm, mixed)


def per_layer_inputs(op: PerLayerInputs, rows: Rows, weights: Weights) -> None:
    """Mix the per-layer table rows with a projection of the embeddings."""
    projected = weights.product(op.projection, rows.registers[op.src]) * op.proj_scale
    assert op.norm.weight is not None, "the per-layer norm gives the width of a layer's input"
    by_layer = projected.reshape(len(rows.positions), -1, len(op.norm.weight))
    looked_up = rows.looked_up[id(op)] * op.table_scale
    rows.registers[op.dst] = (weights.norm(op.norm, by_layer).flatten(1) + looked_up) * op.scale


def per_layer_add(op: PerLayerAdd, rows: Rows, weights: Weights) -> None:
    """Add a layer's gated own input to the residual."""
    x = rows.registers[op.dst]
    gate = activate(op.activation, weights.product(op.gate, x))
    own = rows.registers[op.inputs][:, op.offset : op.offset + gate.shape[1]]
    y = weights.product(op.proj, gate * own)
    rows.registers[op.dst] = x + weights.norm(op.post_norm, y)


def scale(op: Scale, rows: Rows, weights: Weights) -> None:
    """Scale the residual."""
    rows.registers[op.dst] = rows.registers[op.dst] * op.factor


def head(op: Head, rows: Rows, weights: Weights) -> None:
    """The final norm of every row, and logits of the wanted ones."""
    final = weights.norm(op.norm, rows.registers[op.src])
    projection = op.hidden_projection
    rows.hidden = final if projection is None else weights.product(projection, final)
    if not rows.wanted:
        return
    logits = weights.product(op.weight, final[mx.array(rows.wanted)])
    if op.softcap > 0:
        logits = op.softcap * mx.tanh(logits / op.softcap)
    if op.suppressed_ids:
        logits[:, mx.array(op.suppressed_ids)] = -mx.inf
    rows.logits = logits


# Any: a table keyed by the operation's type cannot say that key and parameter agree.
OPS: dict[type, Callable[..., None]] = {
    Embed: embed,
    EmbedWithHidden: embed_with_hidden,
    Project: project,
    Attention: attention,
    ProjectAdd: project_add,
    GatedFfn: gated_ffn,
    MoeFfn: moe_ffn,
    PerLayerInputs: per_layer_inputs,
    PerLayerAdd: per_layer_add,
    Scale: scale,
    Head: head,
}
