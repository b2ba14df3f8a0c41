"""Every operation of a program in torch, on whole batches of rows.

Activations are float32 on every device; only products with float16 weights and the attention over
a float16 cache round their inputs. Meaning of each operation: `backends.program`, and
`backends.reference_ops` for one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

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
from backends.torch_backend.batch import Batch, Part, SlotRows
from backends.torch_backend.matrix import (
    CPU_ROW_BLOCK,
    Matrix,
    multiply_at_once,
    multiply_in_blocks,
)

GPU_ROW_BLOCK = 16
"""What the matrix units of a GPU multiply at once."""


class Attend(Protocol):
    """How queries meet a slot."""

    def __call__(self, op: Attention, query: Tensor, part: Part, rows: SlotRows) -> Tensor:
        """Shapes: query [rows, H, D] float32 -> [rows, H, D] float32."""


@dataclass(slots=True)
class Device:
    """What operations need besides the rows: weights, constants, and the ways of this device."""

    device: torch.device
    matrices: dict[int, Matrix]
    """By id of the Weight."""
    row_block: int
    """Rows are padded to a multiple of it."""
    multiply: Callable[[Tensor, Tensor], Tensor]
    """x [P, in] float32, dense [out, in] -> x @ dense^T [P, out] float32."""
    attend: Attend
    constants: dict[int, Tensor] = field(default_factory=dict)

    def constant(self, array: np.ndarray) -> Tensor:
        """A small array of the program on the device, copied once."""
        held = self.constants.get(id(array))
        if held is None:
            held = self.constants[id(array)] = torch.tensor(array, device=self.device)
        return held

    def suppressed(self, op: Head) -> Tensor:
        """The ids a head suppresses, copied to the device once."""
        held = self.constants.get(id(op))
        if held is None:
            held = self.constants[id(op)] = torch.tensor(op.suppressed_ids, device=self.device)
        return held

    def product(self, weight: Weight, x: Tensor) -> Tensor:
        """weight @ every row. Shapes: x [P, in] -> [P, out]."""
        return self.multiply(x, self.matrices[id(weight)].dense())

    def norm(self, norm: Norm | None, x: Tensor) -> Tensor:
        """RMS norm over the last axis; None passes x through."""
        if norm is None:
            return x
        y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps)
        return y if norm.weight is None else y * self.constant(norm.weight)


def device_of(device: torch.device, matrices: dict[int, Matrix]) -> Device:
    """What operations need on a device: equal bits on the CPU, few large calls on a GPU."""
    if device.type == "cuda":
        return Device(device, matrices, GPU_ROW_BLOCK, multiply_at_once, attend_masked)
    return Device(device, matrices, CPU_ROW_BLOCK, multiply_in_blocks, attend_row_by_row)


@dataclass(slots=True)
class Rows:
    """A batch on its way through the operations."""

    batch: Batch
    registers: dict[int, Tensor]
    wanted: list[int] | slice
    """Rows whose logits are computed."""
    hidden: Tensor | None = None
    logits: Tensor | None = None


def activate(activation: Activation, x: Tensor) -> Tensor:
    """silu, or gelu in its tanh form."""
    return functional.silu(x) if activation == "silu" else functional.gelu(x, approximate="tanh")


def rotate(rope: Rope | None, x: Tensor, batch: Batch, device: Device) -> Tensor:
    """Rotate the leading dims of every head. Shapes: x [P, heads, D]."""
    if rope is None:
        return x
    if id(rope) not in batch.angles:
        angles = batch.positions.double()[:, None, None] * device.constant(rope.inv_freq)
        cos, sin = angles.cos() * rope.mscale, angles.sin() * rope.mscale
        batch.angles[id(rope)] = (cos.float(), sin.float())
    cos, sin = batch.angles[id(rope)]
    num_pairs = len(rope.inv_freq)
    turned, rest = x[..., : 2 * num_pairs], x[..., 2 * num_pairs :]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :num_pairs], turned[..., num_pairs:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def attend_row_by_row(op: Attention, query: Tensor, part: Part, rows: SlotRows) -> Tensor:
    """Each row reads exactly the keys it sees, in a call of its own.

    The shape of the call depends on the row's position alone, so its bits cannot depend on the
    rows beside it.
    """
    slot, out = rows.slot, torch.empty_like(query)
    heads_per_kv = op.heads // slot.spec.kv_heads
    for i in range(part.num_rows):
        position = part.position(i)
        end = position + int(part.is_appended)
        seen = slice(slot.first_visible(position) - slot.base, end - slot.base)
        attended = functional.scaled_dot_product_attention(
            query[i].view(1, slot.spec.kv_heads, heads_per_kv, -1),
            slot.keys[None, :, seen],
            slot.values[None, :, seen],
            scale=op.scale,
        )
        out[i] = attended.reshape(op.heads, -1)
    return out


def attend_masked(op: Attention, query: Tensor, part: Part, rows: SlotRows) -> Tensor:
    """All rows in one call, with a mask by position; shapes change only with `extent`."""
    slot, num_rows, dim = rows.slot, len(query), query.shape[-1]
    kv_heads, heads_per_kv = slot.spec.kv_heads, op.heads // slot.spec.kv_heads
    key_positions = rows.base + torch.arange(rows.extent, device=query.device)
    row_positions = rows.write_index + rows.base
    behind = row_positions[:, None] - key_positions[None, :]
    seen = behind >= int(not part.is_appended)
    if slot.spec.window is not None:
        seen &= behind < slot.spec.window
    by_kv = query.view(num_rows, kv_heads, heads_per_kv, dim).permute(1, 2, 0, 3)
    attended = functional.scaled_dot_product_attention(
        by_kv.reshape(1, kv_heads, heads_per_kv * num_rows, dim).to(slot.keys.dtype),
        slot.keys[None, :, : rows.extent],
        slot.values[None, :, : rows.extent],
        attn_mask=seen.repeat(heads_per_kv, 1),
        scale=op.scale,
    )
    by_row = attended.view(kv_heads, heads_per_kv, num_rows, dim).permute(2, 0, 1, 3)
    return by_row.reshape(num_rows, op.heads, dim).float()


def embed(op: Embed, rows: Rows, device: Device) -> None:
    """Start from the looked-up rows."""
    rows.registers[op.dst] = rows.batch.looked_up[id(op)] * op.scale


def embed_with_hidden(op: EmbedWithHidden, rows: Rows, device: Device) -> None:
    """Start from the looked-up rows with the given ones beside them."""
    assert rows.batch.given is not None, "checked before the batch was made"
    embeddings = rows.batch.looked_up[id(op)] * op.scale
    rows.registers[op.dst] = torch.cat((embeddings, rows.batch.given), dim=1)


def project(op: Project, rows: Rows, device: Device) -> None:
    """Concatenate the products with every matrix."""
    x = device.norm(op.norm, rows.registers[op.src])
    parts = [device.product(weight, x) for weight in op.weights]
    for i, bias in enumerate(op.biases or ()):
        if bias is not None:
            parts[i] = parts[i] + device.constant(bias)
    rows.registers[op.dst] = torch.cat(parts, dim=1)


def attention(op: Attention, rows: Rows, device: Device) -> None:
    """Write every part's keys and values, then let its queries look."""
    batch = rows.batch
    spec = batch.parts[0].slots[op.slot].slot.spec
    heads = rows.registers[op.src].view(len(batch.positions), -1, spec.head_dim)
    query = rotate(op.rope, device.norm(op.q_norm, heads[:, : op.heads]), batch, device)
    if op.writes_kv:
        end_of_keys = op.heads + spec.kv_heads
        raw_key = heads[:, op.heads : end_of_keys]
        key = rotate(op.rope, device.norm(op.k_norm, raw_key), batch, device)
        value = device.norm(op.v_norm, raw_key if op.v_from_k else heads[:, end_of_keys:])
        for part in batch.parts:
            part.slots[op.slot].write(key[part.rows], value[part.rows])
    attended = torch.zeros_like(query)
    for part in batch.parts:
        attended[part.rows] = device.attend(op, query[part.rows], part, part.slots[op.slot])
    rows.registers[op.dst] = attended.flatten(1)


def project_add(op: ProjectAdd, rows: Rows, device: Device) -> None:
    """Add a projection to the residual."""
    y = device.product(op.weight, rows.registers[op.src])
    if op.bias is not None:
        y = y + device.constant(op.bias)
    rows.registers[op.dst] = rows.registers[op.dst] + device.norm(op.post_norm, y)


def ffn_output(op: GatedFfn, x: Tensor, device: Device) -> Tensor:
    """post_norm(down @ (act(gate @ n) * (up @ n))) with n = norm(x)."""
    n = device.norm(op.norm, x)
    gated = activate(op.activation, device.product(op.gate, n)) * device.product(op.up, n)
    return device.norm(op.post_norm, device.product(op.down, gated))


def gated_ffn(op: GatedFfn, rows: Rows, device: Device) -> None:
    """Add the feed-forward block to the residual."""
    x = rows.registers[op.dst]
    rows.registers[op.dst] = x + ffn_output(op, x, device)


def expert_weights(op: MoeFfn, x: Tensor, device: Device) -> Tensor:
    """How much each expert counts for each row, 0 where it is not used. Shapes: -> [P, experts]."""
    r = device.norm(op.router_norm or op.norm, x)
    if op.router_scale is not None:
        r = r * device.constant(op.router_scale)
    probs = device.product(op.router, r).softmax(dim=1)
    # A stable sort: topk leaves the order of equal values open.
    best, order = probs.sort(dim=1, descending=True, stable=True)
    best, order = best[:, : op.num_used], order[:, : op.num_used]
    weights = torch.zeros_like(probs).scatter(1, order, best / best.sum(dim=1, keepdim=True))
    return weights if op.expert_scale is None else weights * device.constant(op.expert_scale)


def expert_output(op: MoeFfn, expert: int, n: Tensor, device: Device) -> Tensor:
    """down_e(act(gate_e n) * up_e n) of rows padded to whole blocks."""

    def product(weight: Weight, x: Tensor) -> Tensor:
        out = weight.shape[1]
        part = slice(expert * out, (expert + 1) * out)
        return device.multiply(x, device.matrices[id(weight)].dense(part))

    products = [product(weight, n) for weight in op.gate_up]
    gate, up = products if len(products) == 2 else products[0].chunk(2, dim=1)
    return product(op.down, activate(op.activation, gate) * up)


def moe_ffn(op: MoeFfn, rows: Rows, device: Device) -> None:
    """Add the weighted experts, and the dense branch where there is one, to the residual.

    Experts run one after another in order of number, each over the rows that chose it: a row's
    sum then has the same order in any company.
    """
    x = rows.registers[op.dst]
    n = device.norm(op.norm, x)
    weights = expert_weights(op, x, device)
    used = weights[: rows.batch.num_rows] != 0
    mixed = torch.zeros_like(x)
    for expert in used.any(dim=0).nonzero().flatten().tolist():
        chosen = used[:, expert].nonzero().flatten()
        padded = functional.pad(n[chosen], (0, 0, 0, -len(chosen) % device.row_block))
        y = expert_output(op, expert, padded, device)[: len(chosen)]
        mixed.index_add_(0, chosen, y * weights[chosen, expert, None])
    mixed = device.norm(op.experts_post_norm, mixed)
    if op.dense is not None:
        mixed = mixed + ffn_output(op.dense, x, device)
    rows.registers[op.dst] = x + device.norm(op.post_norm, mixed)


def per_layer_inputs(op: PerLayerInputs, rows: Rows, device: Device) -> None:
    """Mix the per-layer table rows with a projection of the embeddings."""
    projected = device.product(op.projection, rows.registers[op.src]) * op.proj_scale
    assert op.norm.weight is not None, "the per-layer norm gives the width of a layer's input"
    by_layer = projected.view(len(projected), -1, len(op.norm.weight))
    looked_up = rows.batch.looked_up[id(op)] * op.table_scale
    rows.registers[op.dst] = (device.norm(op.norm, by_layer).flatten(1) + looked_up) * op.scale


def per_layer_add(op: PerLayerAdd, rows: Rows, device: Device) -> None:
    """Add a layer's gated own input to the residual."""
    x = rows.registers[op.dst]
    gate = activate(op.activation, device.product(op.gate, x))
    own = rows.registers[op.inputs][:, op.offset : op.offset + gate.shape[1]]
    y = device.product(op.proj, gate * own)
    rows.registers[op.dst] = x + device.norm(op.post_norm, y)


def scale(op: Scale, rows: Rows, device: Device) -> None:
    """Scale the residual."""
    rows.registers[op.dst] = rows.registers[op.dst] * op.factor


def head(op: Head, rows: Rows, device: Device) -> None:
    """The final norm of every row, and logits of the wanted ones."""
    final = device.norm(op.norm, rows.registers[op.src])
    projection = op.hidden_projection
    rows.hidden = final if projection is None else device.product(projection, final)
    wanted = final[rows.wanted]
    if len(wanted) == 0:
        return
    padded = functional.pad(wanted, (0, 0, 0, -len(wanted) % device.row_block))
    logits = device.product(op.weight, padded)[: len(wanted)]
    if op.softcap > 0:
        logits = op.softcap * torch.tanh(logits / op.softcap)
    if op.suppressed_ids:
        logits = logits.index_fill(1, device.suppressed(op), -torch.inf)
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
