"""Turns a `Program` into the array of op structs the native library runs, checking every size.

The kernels trust what they are given, so whatever does not fit (a matrix against its registers, a
norm against its row, heads against a slot) is refused here, before a pointer is taken.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backends.base import UnsupportedWeight
from backends.native.library import Matrix, NormSpec, OpSpec, ProgramSpec, RopeSpec, SlotSpec
from backends.native.weights import WeightPacker
from backends.program import (
    Activation,
    Attention,
    Embed,
    EmbedWithHidden,
    GatedFfn,
    Head,
    MoeFfn,
    Norm,
    Op,
    PerLayerAdd,
    PerLayerInputs,
    Program,
    Project,
    ProjectAdd,
    Rope,
    Scale,
    Weight,
)
from backends.weights import matrix_weights

KINDS: dict[type, int] = {
    Embed: 0,
    Project: 1,
    Attention: 2,
    ProjectAdd: 3,
    GatedFfn: 4,
    MoeFfn: 5,
    Scale: 6,
    Head: 7,
    PerLayerInputs: 8,
    PerLayerAdd: 9,
    EmbedWithHidden: 10,
}
"""Operation -> ft_op_kind."""
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
MAX_DIM = 1 << 24
"""Most rows or columns of anything; products of two stay far inside 64 bits."""


def require(condition: bool, what: str) -> None:
    """Raises: UnsupportedWeight with `what` unless the condition holds."""
    if not condition:
        raise UnsupportedWeight(f"the model's operations do not fit together: {what}")


FLOAT_TYPES = ("F32", "F16", "BF16")
MOST_HEAD_SHARE = 0.5
"""Largest share of all weights a head may be to be multiplied with what int8 lost, too. A third of
SmolLM2: a step costs 6 % more, mean KL falls from 0.0023 to 0.0016. Seven tenths of Gemma 3 270M: a
fifth more for 0.0014 to 0.0012, which was better than llama.cpp's 0.0030 before."""


class Translator:
    """Builds the struct array; keeps every array alive that a struct points to."""

    def __init__(self, program: Program, packer: WeightPacker, rings: Sequence[int]) -> None:
        """`rings`: positions of each slot's full ring, 0 for a linear slot."""
        self._program = program
        self._packer = packer
        self._rings = rings
        self._multiplied = {id(weight) for weight in matrix_weights(program)}
        self._keep: list[object] = []
        self._ropes: dict[int, int] = {}
        self._rope_specs: list[RopeSpec] = []

    def spec(self, *, is_f32_cache: bool) -> ProgramSpec:
        """The program as one struct. Raises: UnsupportedWeight, OutOfDeviceMemory."""
        program = self._program
        self._check_shape()
        ops = self._array(OpSpec, [self._op(op) for op in program.ops])
        slots = [
            SlotSpec(slot.kv_heads, slot.head_dim, slot.window or 0, ring)
            for slot, ring in zip(program.slots, self._rings, strict=True)
        ]
        widths = self._kept(np.array(program.widths, np.int32))
        return ProgramSpec(
            ops,
            widths,
            self._array(SlotSpec, slots),
            self._array(RopeSpec, self._rope_specs),
            len(program.ops),
            len(program.widths),
            len(slots),
            len(self._rope_specs),
            program.vocab_size,
            program.hidden_size,
            int(is_f32_cache),
            int(program.grows_cache),
        )

    @property
    def kept(self) -> list[object]:
        """What must live as long as the struct is used."""
        return self._keep

    # Checks ---------------------------------------------------------------------------------

    def _check_shape(self) -> None:
        program = self._program
        require(len(program.ops) > 0, "there are none")
        require(isinstance(program.ops[-1], Head), "the last one is not the head")
        for width in (*program.widths, program.vocab_size, program.hidden_size):
            require(0 < width < MAX_DIM, f"a width of {width}")
        for slot in program.slots:
            require(0 < slot.head_dim <= 4096, f"a head of {slot.head_dim} numbers")
            require(slot.kv_heads > 0, f"{slot.kv_heads} kv heads")
            least = 1 if program.grows_cache else 2
            require(slot.window is None or slot.window >= least, f"a window of {slot.window}")

    def _width(self, register: int) -> int:
        require(0 <= register < len(self._program.widths), f"register {register} does not exist")
        return self._program.widths[register]

    def _fits(self, weight: Weight, shape: tuple[int, ...]) -> None:
        require(weight.shape == shape, f"{weight.name} has shape {weight.shape}, not {shape}")

    def _floats(self, values: np.ndarray | None, width: int, what: str) -> int | None:
        if values is None:
            return None
        require(values.shape == (width,), f"{what} has shape {values.shape}, not ({width},)")
        return self._kept(np.array(values, np.float32, order="C"))

    # Pieces ---------------------------------------------------------------------------------

    def _kept(self, array: np.ndarray) -> int:
        self._keep.append(array)
        return int(array.ctypes.data)

    # Any: the pointer type is made at run time.
    def _array(self, kind: type[ctypes.Structure], items: Sequence[ctypes.Structure]) -> Any:
        array = (kind * max(1, len(items)))(*items)
        self._keep.append(array)
        return ctypes.cast(array, ctypes.POINTER(kind))

    def _norm(self, norm: Norm | None, width: int) -> NormSpec:
        if norm is None:
            return NormSpec()
        return NormSpec(self._floats(norm.weight, width, "a norm"), norm.eps, 1)

    def _rope(self, rope: Rope | None, head_dim: int) -> int:
        if rope is None:
            return -1
        if id(rope) not in self._ropes:
            pairs = len(rope.inv_freq)
            require(2 * pairs <= head_dim, f"{pairs} rotated pairs in a head of {head_dim}")
            data = self._kept(np.array(rope.inv_freq, np.float64, order="C"))
            self._keep.append(rope)
            self._ropes[id(rope)] = len(self._rope_specs)
            self._rope_specs.append(RopeSpec(data, pairs, int(rope.interleaved), rope.mscale))
        return self._ropes[id(rope)]

    def _table(self, weight: Weight) -> Matrix:
        if id(weight) in self._multiplied:
            return self._packer.matrix(weight)
        self._keep.append(weight)
        return self._packer.table(weight)

    def _matrices(self, spec: OpSpec, matrices: Sequence[Matrix]) -> None:
        spec.num_matrices = len(matrices)
        spec.matrices = self._array(Matrix, matrices)

    def _biases(self, spec: OpSpec, biases: Sequence[np.ndarray | None], rows: list[int]) -> None:
        if all(bias is None for bias in biases):
            return
        require(len(biases) == len(rows), f"{len(biases)} biases for {len(rows)} matrices")
        pointers = [self._floats(b, n, "a bias") for b, n in zip(biases, rows, strict=True)]
        array = (ctypes.c_void_p * len(pointers))(*pointers)
        self._keep.append(array)
        spec.biases = ctypes.cast(array, ctypes.POINTER(ctypes.c_void_p))

    # Operations -----------------------------------------------------------------------------

    def _op(self, op: Op) -> OpSpec:
        fill = FILLERS.get(type(op))
        require(fill is not None, f"no native kernel for {type(op).__name__}")
        assert fill is not None, "required above"
        spec = OpSpec(kind=KINDS[type(op)], rope=-1, factor=1.0)
        fill(self, op, spec)
        return spec

    def _embed(self, op: Embed, spec: OpSpec) -> None:
        self._fits(op.table, (self._program.vocab_size, self._width(op.dst)))
        self._matrices(spec, [self._table(op.table)])
        spec.dst, spec.factor = op.dst, op.scale

    def _embed_with_hidden(self, op: EmbedWithHidden, spec: OpSpec) -> None:
        vocab, cols = self._program.vocab_size, op.table.shape[-1]
        self._fits(op.table, (vocab, cols))
        given = self._width(op.dst) - cols
        require(0 < given == self._program.given_size, f"{given} given numbers per row")
        self._matrices(spec, [self._table(op.table)])
        spec.dst, spec.factor = op.dst, op.scale

    def _project(self, op: Project, spec: OpSpec) -> None:
        cols = self._width(op.src)
        for weight in op.weights:
            self._fits(weight, (weight.shape[0], cols))
        rows = [weight.shape[0] for weight in op.weights]
        require(op.src != op.dst, "a projection into its own input")
        require(sum(rows) == self._width(op.dst), f"{rows} rows into {self._width(op.dst)}")
        self._matrices(spec, [self._packer.matrix(weight) for weight in op.weights])
        self._biases(spec, op.biases or [None] * len(rows), rows)
        spec.src, spec.dst, spec.norm = op.src, op.dst, self._norm(op.norm, cols)

    def _attention(self, op: Attention, spec: OpSpec) -> None:
        require(0 <= op.slot < len(self._program.slots), f"slot {op.slot} does not exist")
        slot = self._program.slots[op.slot]
        dim = slot.head_dim
        require(op.heads > 0 and op.heads % slot.kv_heads == 0, f"{op.heads} heads on a slot")
        parts = (2 - int(op.v_from_k)) * int(op.writes_kv)
        width = (op.heads + parts * slot.kv_heads) * dim
        require(self._width(op.src) == width, f"attention input {self._width(op.src)}, not {width}")
        require(self._width(op.dst) == op.heads * dim, "attention output width")
        spec.src, spec.dst, spec.slot, spec.heads = op.src, op.dst, op.slot, op.heads
        spec.factor, spec.rope = op.scale, self._rope(op.rope, dim)
        spec.writes_kv, spec.v_from_k = int(op.writes_kv), int(op.v_from_k)
        spec.q_norm = self._norm(op.q_norm, dim)
        spec.k_norm = self._norm(op.k_norm, dim)
        spec.v_norm = self._norm(op.v_norm, dim)

    def _project_add(self, op: ProjectAdd, spec: OpSpec) -> None:
        rows = self._width(op.dst)
        self._fits(op.weight, (rows, self._width(op.src)))
        self._matrices(spec, [self._packer.matrix(op.weight)])
        self._biases(spec, [op.bias], [rows])
        spec.src, spec.dst, spec.post_norm = op.src, op.dst, self._norm(op.post_norm, rows)

    def _gated_ffn(self, op: GatedFfn, spec: OpSpec) -> None:
        width, inner = self._width(op.dst), op.gate.shape[0]
        self._fits(op.gate, (inner, width))
        self._fits(op.up, (inner, width))
        self._fits(op.down, (width, inner))
        self._matrices(spec, [self._packer.matrix(w) for w in (op.gate, op.up, op.down)])
        spec.dst, spec.activation = op.dst, ACTIVATIONS[op.activation]
        spec.norm = self._norm(op.norm, width)
        spec.post_norm = self._norm(op.post_norm, width)

    def _moe_ffn(self, op: MoeFfn, spec: OpSpec) -> None:
        width, experts, inner = self._width(op.dst), op.router.shape[0], op.down.shape[-1]
        self._fits(op.router, (experts, width))
        self._fits(op.down, (experts, width, inner))
        is_fused = len(op.gate_up) == 1
        for weight in op.gate_up:
            self._fits(weight, (experts, inner * (2 if is_fused else 1), width))
        require(len(op.gate_up) in (1, 2), f"{len(op.gate_up)} gate and up stacks")
        require(0 < op.num_used <= experts, f"{op.num_used} of {experts} experts")
        matrices = [self._packer.matrix(op.router)]
        for weight in (*op.gate_up, op.down):
            matrices += self._packer.experts(weight)
        self._matrices(spec, matrices)
        spec.num_experts, spec.num_used, spec.is_fused = experts, op.num_used, int(is_fused)
        spec.dst, spec.activation = op.dst, ACTIVATIONS[op.activation]
        spec.norm = self._norm(op.norm, width)
        spec.router_norm = self._norm(op.router_norm, width)
        spec.experts_post_norm = self._norm(op.experts_post_norm, width)
        spec.post_norm = self._norm(op.post_norm, width)
        spec.router_scale = self._floats(op.router_scale, width, "the router scale")
        spec.expert_scale = self._floats(op.expert_scale, experts, "the expert scale")
        if op.dense is not None:
            require(op.dense.dst == op.dst, "a dense branch of another register")
            spec.dense = self._array(OpSpec, [self._op(op.dense)])

    def _per_layer_inputs(self, op: PerLayerInputs, spec: OpSpec) -> None:
        width = self._width(op.dst)
        require(op.norm.weight is not None, "a per-layer norm without weight")
        assert op.norm.weight is not None, "required above"
        part = len(op.norm.weight)
        require(part > 0 and width % part == 0, f"{width} per-layer inputs of {part} numbers")
        self._fits(op.projection, (width, self._width(op.src)))
        self._fits(op.table, (self._program.vocab_size, width))
        self._matrices(spec, [self._packer.matrix(op.projection), self._table(op.table)])
        spec.src, spec.dst, spec.part = op.src, op.dst, part
        spec.norm = self._norm(op.norm, part)
        spec.table_factor, spec.proj_factor, spec.factor = op.table_scale, op.proj_scale, op.scale

    def _per_layer_add(self, op: PerLayerAdd, spec: OpSpec) -> None:
        width, part = self._width(op.dst), op.gate.shape[0]
        self._fits(op.gate, (part, width))
        self._fits(op.proj, (width, part))
        require(0 <= op.offset <= self._width(op.inputs) - part, f"offset {op.offset}")
        self._matrices(spec, [self._packer.matrix(w) for w in (op.gate, op.proj)])
        spec.src, spec.dst, spec.part, spec.offset = op.inputs, op.dst, part, op.offset
        spec.activation = ACTIVATIONS[op.activation]
        spec.post_norm = self._norm(op.post_norm, width)

    def _scale(self, op: Scale, spec: OpSpec) -> None:
        self._width(op.dst)
        spec.dst, spec.factor = op.dst, op.factor

    def _head(self, op: Head, spec: OpSpec) -> None:
        width, vocab, out = self._width(op.src), self._program.vocab_size, self._program.hidden_size
        self._fits(op.weight, (vocab, width))
        matrices = [self._packer.matrix(op.weight)]
        if op.hidden_projection is not None:
            self._fits(op.hidden_projection, (out, width))
            matrices.append(self._packer.matrix(op.hidden_projection))
        else:
            require(width == out, "the head reads another width than the hidden size")
        self._matrices(spec, matrices)
        spec.src, spec.norm, spec.factor = op.src, self._norm(op.norm, width), op.softcap
        total_bytes = sum(weight.data.nbytes for weight in matrix_weights(self._program))
        is_small = op.weight.data.nbytes < MOST_HEAD_SHARE * total_bytes
        spec.takes_errors = is_small and op.weight.type not in FLOAT_TYPES
        ids = np.unique(np.array(op.suppressed_ids, np.int32))
        require(bool(np.all((ids >= 0) & (ids < vocab))), "a suppressed id outside the vocabulary")
        spec.suppressed, spec.num_suppressed = self._kept(ids), len(ids)


# Any: a table keyed by the operation's type cannot say that key and parameter agree.
FILLERS: dict[type, Callable[[Translator, Any, OpSpec], None]] = {
    Embed: Translator._embed,
    EmbedWithHidden: Translator._embed_with_hidden,
    Project: Translator._project,
    Attention: Translator._attention,
    ProjectAdd: Translator._project_add,
    GatedFfn: Translator._gated_ffn,
    MoeFfn: Translator._moe_ffn,
    PerLayerInputs: Translator._per_layer_inputs,
    PerLayerAdd: Translator._per_layer_add,
    Scale: Translator._scale,
    Head: Translator._head,
}
