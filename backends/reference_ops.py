"""Every operation of a program for one row, in numpy float64: the meaning the backends share.

One function per operation, written like its formula in `backends.program`; `OPS` finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backends.base import UnsupportedWeight
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

Floats = NDArray[np.float64]


def dequantize(weight: Weight) -> NDArray[np.float32]:
    """The file's values. Shapes: -> weight.shape, float32.

    Raises: UnsupportedWeight for a type whose block layout is not known.
    """
    from gguf import GGMLQuantizationType, quants  # deferred: it takes 0.24 s to import

    try:
        values = quants.dequantize(weight.data, GGMLQuantizationType[weight.type])
    except (KeyError, NotImplementedError) as error:
        raise UnsupportedWeight(f"{weight.name} has the unknown type {weight.type}") from error
    return np.asarray(values, np.float32).reshape(weight.shape)


def silu(x: Floats) -> Floats:
    """x * sigmoid(x)."""
    return x / (1.0 + np.exp(-x))


def gelu_tanh(x: Floats) -> Floats:
    """The tanh form of GELU. Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415)."""
    inner = np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * x * (1.0 + np.tanh(inner)))


ACTIVATIONS: dict[Activation, Callable[[Floats], Floats]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def softmax(scores: Floats) -> Floats:
    """Softmax over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def normed(norm: Norm | None, x: Floats) -> Floats:
    """RMS norm over the last axis; None passes x through."""
    if norm is None:
        return x
    y = np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + norm.eps))
    return y if norm.weight is None else y * norm.weight


def rotated(rope: Rope | None, x: Floats, position: int) -> Floats:
    """Rotate the leading dims of every head of x [H, D] by the angles of a position."""
    if rope is None:
        return x
    num_pairs = len(rope.inv_freq)
    angles = position * rope.inv_freq
    cos, sin = np.cos(angles) * rope.mscale, np.sin(angles) * rope.mscale
    first, second = slice(0, num_pairs), slice(num_pairs, 2 * num_pairs)
    if rope.interleaved:
        first, second = slice(0, 2 * num_pairs, 2), slice(1, 2 * num_pairs, 2)
    y = x.copy()
    y[:, first] = x[:, first] * cos - x[:, second] * sin
    y[:, second] = x[:, second] * cos + x[:, first] * sin
    return y


class Matrices:
    """The weights in float64, each dequantized when it is first used."""

    def __init__(self) -> None:
        self._dense: dict[int, Floats] = {}

    def __getitem__(self, weight: Weight) -> Floats:
        """Shapes: -> weight.shape."""
        dense = self._dense.get(id(weight))
        if dense is None:
            dense = self._dense[id(weight)] = dequantize(weight).astype(np.float64)
        return dense

    @property
    def num_bytes(self) -> int:
        """Memory the matrices used so far take."""
        return sum(dense.nbytes for dense in self._dense.values())

    def clear(self) -> None:
        """Forget every matrix. State: empty."""
        self._dense.clear()


@dataclass(slots=True)
class SlotRows:
    """Keys and values of one slot, one [G, D] array per position."""

    kv_heads: int
    head_dim: int
    window: int | None
    keys: list[Floats] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)


@dataclass(slots=True)
class RowState:
    """One row on its way through the operations."""

    token_id: int
    position: int
    slots: list[SlotRows]
    registers: list[Floats]
    wants_logits: bool
    given: Floats | None = None
    """The hidden row the caller gave."""
    hidden: Floats | None = None
    logits: Floats | None = None


def embed(op: Embed, row: RowState, matrices: Matrices) -> None:
    """Look the token up."""
    row.registers[op.dst] = matrices[op.table][row.token_id] * op.scale


def embed_with_hidden(op: EmbedWithHidden, row: RowState, matrices: Matrices) -> None:
    """Look the token up and put the given row beside it."""
    assert row.given is not None, "checked before the first row"
    embedding = matrices[op.table][row.token_id] * op.scale
    row.registers[op.dst] = np.concatenate([embedding, row.given])


def project(op: Project, row: RowState, matrices: Matrices) -> None:
    """Concatenate the products with every matrix."""
    x = normed(op.norm, row.registers[op.src])
    parts = [matrices[weight] @ x for weight in op.weights]
    for i, bias in enumerate(op.biases or ()):
        if bias is not None:
            parts[i] = parts[i] + bias
    row.registers[op.dst] = np.concatenate(parts)


def attention(op: Attention, row: RowState, matrices: Matrices) -> None:
    """Append to the slot, then look at every position the row may see."""
    slot = row.slots[op.slot]
    dim, src = slot.head_dim, row.registers[op.src]
    q_size, kv_size = op.heads * dim, slot.kv_heads * dim
    query = rotated(op.rope, normed(op.q_norm, src[:q_size].reshape(-1, dim)), row.position)
    if op.writes_kv:
        key = src[q_size : q_size + kv_size].reshape(-1, dim)
        value = key if op.v_from_k else src[q_size + kv_size :].reshape(-1, dim)
        slot.keys.append(rotated(op.rope, normed(op.k_norm, key), row.position))
        slot.values.append(normed(op.v_norm, value))
    first = 0 if slot.window is None else max(0, row.position - slot.window + 1)
    keys, values = np.array(slot.keys[first:]), np.array(slot.values[first:])
    heads_per_kv = op.heads // slot.kv_heads
    out = np.empty((op.heads, dim))
    for head in range(op.heads):
        kv_head = head // heads_per_kv
        out[head] = softmax(keys[:, kv_head] @ query[head] * op.scale) @ values[:, kv_head]
    row.registers[op.dst] = out.reshape(-1)


def project_add(op: ProjectAdd, row: RowState, matrices: Matrices) -> None:
    """Add a projection to the residual."""
    y = matrices[op.weight] @ row.registers[op.src]
    if op.bias is not None:
        y = y + op.bias
    row.registers[op.dst] = row.registers[op.dst] + normed(op.post_norm, y)


def ffn_output(op: GatedFfn, x: Floats, matrices: Matrices) -> Floats:
    """post_norm(down @ (act(gate @ n) * (up @ n))) with n = norm(x)."""
    n = normed(op.norm, x)
    gated = ACTIVATIONS[op.activation](matrices[op.gate] @ n) * (matrices[op.up] @ n)
    return normed(op.post_norm, matrices[op.down] @ gated)


def gated_ffn(op: GatedFfn, row: RowState, matrices: Matrices) -> None:
    """Add the feed-forward block to the residual."""
    x = row.registers[op.dst]
    row.registers[op.dst] = x + ffn_output(op, x, matrices)


def routed(op: MoeFfn, x: Floats, matrices: Matrices) -> tuple[NDArray[np.intp], Floats]:
    """The experts of a row and their weights."""
    r = normed(op.router_norm or op.norm, x)
    if op.router_scale is not None:
        r = r * op.router_scale
    probs = softmax(matrices[op.router] @ r)
    experts = np.argsort(-probs, kind="stable")[: op.num_used]
    weights = probs[experts] / probs[experts].sum()
    return experts, weights if op.expert_scale is None else weights * op.expert_scale[experts]


def expert_output(op: MoeFfn, expert: int, n: Floats, matrices: Matrices) -> Floats:
    """down_e(act(gate_e n) * up_e n)."""
    stacks = [matrices[weight][expert] for weight in op.gate_up]
    gate, up = stacks if len(stacks) == 2 else np.split(stacks[0], 2)
    gated = ACTIVATIONS[op.activation](gate @ n) * (up @ n)
    return np.asarray(matrices[op.down][expert] @ gated)


def moe_ffn(op: MoeFfn, row: RowState, matrices: Matrices) -> None:
    """Add the weighted experts, and the dense branch where there is one, to the residual."""
    x = row.registers[op.dst]
    n = normed(op.norm, x)
    mixed = np.zeros_like(x)
    for expert, weight in zip(*routed(op, x, matrices), strict=True):
        mixed = mixed + weight * expert_output(op, int(expert), n, matrices)
    mixed = normed(op.experts_post_norm, mixed)
    if op.dense is not None:
        mixed = mixed + ffn_output(op.dense, x, matrices)
    row.registers[op.dst] = x + normed(op.post_norm, mixed)


def per_layer_inputs(op: PerLayerInputs, row: RowState, matrices: Matrices) -> None:
    """Mix the per-layer table row with a projection of the embedding."""
    projected = matrices[op.projection] @ row.registers[op.src] * op.proj_scale
    assert op.norm.weight is not None, "the per-layer norm gives the width of a layer's input"
    by_layer = normed(op.norm, projected.reshape(-1, len(op.norm.weight))).reshape(-1)
    looked_up = matrices[op.table][row.token_id] * op.table_scale
    row.registers[op.dst] = (by_layer + looked_up) * op.scale


def per_layer_add(op: PerLayerAdd, row: RowState, matrices: Matrices) -> None:
    """Add a layer's gated own input to the residual."""
    x = row.registers[op.dst]
    gate = ACTIVATIONS[op.activation](matrices[op.gate] @ x)
    own = row.registers[op.inputs][op.offset : op.offset + len(gate)]
    row.registers[op.dst] = x + normed(op.post_norm, matrices[op.proj] @ (gate * own))


def scale(op: Scale, row: RowState, matrices: Matrices) -> None:
    """Scale the residual."""
    row.registers[op.dst] = row.registers[op.dst] * op.factor


def head(op: Head, row: RowState, matrices: Matrices) -> None:
    """The final norm, and the logits where they are wanted."""
    final = normed(op.norm, row.registers[op.src])
    projection = op.hidden_projection
    row.hidden = final if projection is None else matrices[projection] @ final
    if not row.wants_logits:
        return
    logits = matrices[op.weight] @ final
    if op.softcap > 0:
        logits = op.softcap * np.tanh(logits / op.softcap)
    logits[list(op.suppressed_ids)] = -np.inf
    row.logits = logits


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
