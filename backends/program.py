"""The forward pass of a model as data: a short list of coarse operations over registers.

A model file writes its layers once as a `Program`; each backend turns the program into an
`Executable` in its own way: the native backend hands the whole list to one C call per step, torch
runs it operation by operation (or captures it as a CUDA graph), the numpy reference runs it in
float64. Nothing here computes, and nothing here knows a device, a file or a chat.

A register is a row-wise activation buffer: register i holds `widths[i]` float32 numbers per row.
Dimension letters: R rows, E hidden, H heads, G kv heads, D head dim, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

Register = int
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One tensor as it lies in the file: quantized bytes, never dequantized here."""

    name: str
    """Name in the file, for error messages."""
    type: str
    """ggml type name: F32, F16, BF16, Q4_0, Q4_1, ..."""
    shape: tuple[int, ...]
    """Row-major logical shape: (out, in) for a matrix, (experts, out, in) for an expert stack."""
    data: np.ndarray
    """uint8 [rows, row_bytes] view of the memory-mapped file (rows = product of shape[:-1])."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm: y = x / sqrt(mean(x^2) + eps) * weight, in float32."""

    weight: np.ndarray | None
    """float32 [width], the final multiplier; None multiplies by one."""
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary embedding of the first `2 * len(inv_freq)` dims of each head.

    Angle of pair i at absolute position p: p * inv_freq[i]; cos and sin are multiplied by `mscale`.
    The model folds base, rope_freqs factors, linear and YaRN scaling into `inv_freq`.
    """

    inv_freq: np.ndarray
    """float64 [n_rot / 2], radians per token."""
    interleaved: bool
    """True pairs dims (2i, 2i+1) (ggml NORM); False pairs (i, i + n_rot/2) (NEOX)."""
    mscale: float = 1.0


@dataclass(frozen=True, slots=True)
class KvSlot:
    """One stored key/value cache: what a layer that owns its keys and values keeps per token."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    """Attention window in tokens, own token included; None keeps every position."""


@dataclass(frozen=True, slots=True, eq=False)
class Embed:
    """dst[r] = table[token_ids[r]] * scale. table (V, E)."""

    table: Weight
    dst: Register
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class EmbedWithHidden:
    """dst[r] = table[token_ids[r]] * scale | hidden[r]: a token beside the row it was drawn from.

    `hidden` are rows the caller gives to the forward. Starts a drafter: `table` is its target's.
    """

    table: Weight
    dst: Register
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Project:
    """dst = concat_i(weights[i] @ norm(src) + biases[i]); several matrices share one input."""

    src: Register
    dst: Register
    weights: tuple[Weight, ...]
    norm: Norm | None = None
    biases: tuple[np.ndarray | None, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Rotate q and k, append k and v to a slot, attend; dst [R, H * D].

    src row layout: q [H * D] | k [G * D] | v [G * D]; only q when `writes_kv` is false (the slot of
    a donor layer is read, fresh rows included); no v part when `v_from_k` (v is then the raw k
    projection, before norm and rotation). Norms are per head, before the rotation; keys are cached
    after it. Row at position p sees slot positions <= p, and > p - window where the slot has one.
    """

    src: Register
    dst: Register
    heads: int
    slot: int
    """Index into `Program.slots`."""
    scale: float
    rope: Rope | None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    writes_kv: bool = True
    v_from_k: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ProjectAdd:
    """dst += post_norm(weight @ src + bias)."""

    src: Register
    dst: Register
    weight: Weight
    bias: np.ndarray | None = None
    post_norm: Norm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GatedFfn:
    """dst += post_norm(down @ (act(gate @ n) * (up @ n))) with n = norm(dst)."""

    dst: Register
    norm: Norm
    gate: Weight
    up: Weight
    down: Weight
    activation: Activation
    post_norm: Norm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MoeFfn:
    """dst += post_norm(dense + sum_j w_j * down_j(act(gate_j n) * up_j n)) over the top k experts.

    Router: p = softmax(router @ r) over all experts in float32, top k, renormalised to sum 1, then
    multiplied by `expert_scale`. r is norm(dst), or router_norm(dst) * router_scale where given.
    `gate_up` stacks gate rows, then up rows (experts, 2F, E); `down` (experts, E, F).
    """

    dst: Register
    norm: Norm
    router: Weight
    gate_up: tuple[Weight, ...]
    """One fused (experts, 2F, E) weight, or (gate, up) of shape (experts, F, E) each."""
    down: Weight
    num_used: int
    activation: Activation
    router_norm: Norm | None = None
    router_scale: np.ndarray | None = None
    expert_scale: np.ndarray | None = None
    experts_post_norm: Norm | None = None
    dense: GatedFfn | None = None
    """A dense branch beside the experts (its `post_norm` applies to the branch, it adds nothing
    to dst by itself)."""
    post_norm: Norm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerInputs:
    """dst = (norm_P(projection @ src * proj_scale) + table[token_ids[r]] * table_scale) * scale.

    The inputs of all layers at once, L * P numbers per row, layer by layer. `norm` works on each
    layer's P numbers alone, with one shared weight [P]. Only the looked-up rows of `table`
    (V, L * P) are ever dequantized: it is as large as the rest of the model.
    """

    table: Weight
    src: Register
    dst: Register
    projection: Weight
    """(L * P, E)."""
    norm: Norm
    table_scale: float
    proj_scale: float
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerAdd:
    """dst += post_norm(proj @ (act(gate @ dst) * inputs[offset : offset + P]))."""

    dst: Register
    inputs: Register
    """The register a `PerLayerInputs` filled."""
    offset: int
    """First of this layer's P numbers in `inputs`."""
    gate: Weight
    """(P, E)."""
    proj: Weight
    """(E, P)."""
    activation: Activation
    post_norm: Norm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """dst *= factor."""

    dst: Register
    factor: float


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """hidden = norm(src); logits = softcap(weight @ hidden). Rows without wanted logits skip it."""

    src: Register
    norm: Norm
    weight: Weight
    softcap: float = 0.0
    """cap * tanh(logits / cap) where > 0."""
    suppressed_ids: tuple[int, ...] = ()
    """Ids whose logit is set to -inf on every row."""
    hidden_projection: Weight | None = None
    """Where given, the row handed out as hidden is this matrix times the normed one."""


Op = (
    Embed
    | EmbedWithHidden
    | Project
    | Attention
    | ProjectAdd
    | GatedFfn
    | MoeFfn
    | PerLayerInputs
    | PerLayerAdd
    | Scale
    | Head
)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A whole forward pass. `ops` run in order; the last one is the `Head`.

    A program none of whose attentions writes is a drafter that looks at its target's caches: a
    forward leaves them as they are, every row stands at the cache's length p and sees positions
    < p only (> p - window where the slot has one).
    """

    ops: tuple[Op, ...]
    widths: tuple[int, ...]
    """float32 numbers per row of each register."""
    slots: tuple[KvSlot, ...]
    vocab_size: int
    hidden_size: int
    """Width of the hidden rows handed out, which a draft head consumes."""

    @property
    def grows_cache(self) -> bool:
        """Whether a forward appends its rows to the caches."""
        attentions = [op for op in self.ops if isinstance(op, Attention)]
        return not attentions or any(op.writes_kv for op in attentions)

    @property
    def given_size(self) -> int:
        """Width of the hidden rows a forward has to be given; 0 where it takes none."""
        sizes = (
            self.widths[op.dst] - op.table.shape[1]
            for op in self.ops
            if isinstance(op, EmbedWithHidden)
        )
        return max(sizes, default=0)
