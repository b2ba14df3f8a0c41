"""Random small programs that use every operation, with weights of any type."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from backends.base import Backend, Cache, Executable, Segment
from backends.program import (
    Attention,
    Embed,
    EmbedWithHidden,
    GatedFfn,
    Head,
    KvSlot,
    MoeFfn,
    Norm,
    PerLayerAdd,
    PerLayerInputs,
    Program,
    Project,
    ProjectAdd,
    Rope,
    Scale,
    Weight,
)

WIDTH, HEADS, KV_HEADS, DIM, FFN, VOCAB, WINDOW = 256, 4, 2, 64, 512, 96, 12
EXPERTS, EXPERT_FFN, OWN = 6, 256, 256

_SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


class Maker:
    """Draws weights and norms from one seed."""

    def __init__(self, type_name: str, seed: int = 5) -> None:
        self.type_name = type_name
        self.rng = np.random.default_rng(seed)

    def weight(self, *shape: int, type_name: str | None = None) -> Weight:
        """A matrix with outputs about as large as its inputs."""
        kind = GGMLQuantizationType[type_name or self.type_name]
        rows = int(np.prod(shape[:-1]))
        if kind.name in _SCALES_AT:
            data = self._random_blocks(kind, rows, shape[-1])
        else:
            values = self.rng.standard_normal((rows, shape[-1]), np.float32) / np.sqrt(shape[-1])
            data = quants.quantize(values, kind).view(np.uint8)
        data.flags.writeable = False  # as a mapped file is
        return Weight(f"w{shape}", kind.name, shape, data)

    def _random_blocks(self, kind: GGMLQuantizationType, rows: int, cols: int) -> np.ndarray:
        block_len, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = self.rng.integers(0, 256, (rows * cols // block_len, block_bytes), np.uint8)
        for offset in _SCALES_AT[kind.name]:
            scales = self.rng.uniform(1e-5, 1e-4, (len(blocks), 1)).astype(np.float16)
            blocks[:, offset : offset + 2] = scales.view(np.uint8)
        return blocks.reshape(rows, -1)

    def vector(self, width: int) -> np.ndarray:
        """Numbers around 1."""
        return 1 + 0.2 * self.rng.standard_normal(width).astype(np.float32)

    def norm(self, width: int) -> Norm:
        """A norm with a weight."""
        return Norm(self.vector(width), 1e-6)


def everything(type_name: str) -> Program:
    """Window and full slots, a donor, v from k, biases, experts, per-layer inputs, softcap."""
    make = Maker(type_name)
    table = make.weight(VOCAB, WIDTH)
    q, kv = HEADS * DIM, KV_HEADS * DIM
    halves = Rope(0.5 ** np.arange(DIM // 2), interleaved=False, mscale=1.1)
    pairs = Rope(0.7 ** np.arange(DIM // 4), interleaved=True)
    dense = _ffn(make, post_norm=make.norm(WIDTH))
    ops = (
        Embed(table, 0, scale=2.0),
        PerLayerInputs(
            make.weight(VOCAB, 2 * OWN), 0, 4, make.weight(2 * OWN, WIDTH), make.norm(OWN), 3.0,
            0.1, 0.7,
        ),
        Project(
            0, 1, (make.weight(q, WIDTH), make.weight(kv, WIDTH), make.weight(kv, WIDTH)),
            make.norm(WIDTH), (0.1 * make.vector(q), None, 0.1 * make.vector(kv)),
        ),
        Attention(1, 2, HEADS, 0, DIM**-0.5, pairs),
        ProjectAdd(2, 0, make.weight(WIDTH, q), 0.1 * make.vector(WIDTH), make.norm(WIDTH)),
        _ffn(make),
        PerLayerAdd(
            0, 4, OWN, make.weight(OWN, WIDTH), make.weight(WIDTH, OWN), "gelu_tanh",
            make.norm(WIDTH),
        ),
        Project(0, 3, (make.weight(q + kv, WIDTH),), make.norm(WIDTH)),
        Attention(
            3, 2, HEADS, 1, 0.2, halves, make.norm(DIM), make.norm(DIM), Norm(None, 1e-6),
            v_from_k=True,
        ),
        ProjectAdd(2, 0, make.weight(WIDTH, q)),
        MoeFfn(
            0, make.norm(WIDTH), make.weight(EXPERTS, WIDTH, type_name="F32"),
            (make.weight(EXPERTS, 2 * EXPERT_FFN, WIDTH),),
            make.weight(EXPERTS, WIDTH, EXPERT_FFN), 2, "gelu_tanh", Norm(None, 1e-6),
            make.vector(WIDTH), make.vector(EXPERTS), make.norm(WIDTH), dense, make.norm(WIDTH),
        ),
        Project(0, 2, (make.weight(q, WIDTH),), make.norm(WIDTH)),
        Attention(2, 2, HEADS, 0, DIM**-0.5, pairs, writes_kv=False),
        ProjectAdd(2, 0, make.weight(WIDTH, q)),
        MoeFfn(
            0, make.norm(WIDTH), make.weight(EXPERTS, WIDTH, type_name="F32"),
            (make.weight(EXPERTS, EXPERT_FFN, WIDTH), make.weight(EXPERTS, EXPERT_FFN, WIDTH)),
            make.weight(EXPERTS, WIDTH, EXPERT_FFN), 3, "silu",
        ),
        Scale(0, 0.8),
        Head(0, make.norm(WIDTH), table, softcap=20.0, suppressed_ids=(3, 90)),
    )  # fmt: skip
    widths = (WIDTH, q + 2 * kv, q, q + kv, 2 * OWN)
    slots = (KvSlot(KV_HEADS, DIM, WINDOW), KvSlot(KV_HEADS, DIM))
    return Program(ops, widths, slots, VOCAB, WIDTH)


def drafter(type_name: str) -> Program:
    """Looks at the caches of `everything`, given a token and the hidden row before it."""
    make = Maker(type_name, seed=6)
    q, halves = HEADS * DIM, Rope(0.5 ** np.arange(DIM // 2), interleaved=False)
    ops = (
        EmbedWithHidden(make.weight(VOCAB, WIDTH), 1, scale=2.0),
        Project(1, 0, (make.weight(WIDTH, 2 * WIDTH),)),
        Project(0, 2, (make.weight(q, WIDTH),), make.norm(WIDTH)),
        Attention(2, 2, HEADS, 0, 0.2, halves, make.norm(DIM), writes_kv=False),
        ProjectAdd(2, 0, make.weight(WIDTH, q)),
        Project(0, 2, (make.weight(q, WIDTH),), make.norm(WIDTH)),
        Attention(2, 2, HEADS, 1, 0.2, halves, make.norm(DIM), writes_kv=False),
        ProjectAdd(2, 0, make.weight(WIDTH, q)),
        _ffn(make),
        Head(
            0,
            make.norm(WIDTH),
            make.weight(VOCAB, WIDTH),
            hidden_projection=make.weight(WIDTH, WIDTH),
        ),
    )
    slots = everything(type_name).slots
    return Program(ops, (WIDTH, 2 * WIDTH, q), slots, VOCAB, WIDTH)


def drafted(backend: Backend, type_name: str, prompt_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden of three draft rows of two chats, behind prompts of different length."""
    target, rng = backend.compile(everything(type_name)), np.random.default_rng(2)
    head = backend.compile(drafter(type_name), reads=target)
    chats = [target.new_cache(), target.new_cache()]
    logits_of(target, chats[0], random_ids(prompt_len))
    logits_of(target, chats[1], random_ids(5))
    segments = [Segment([7, 8], chats[0]), Segment([9], chats[1])]
    given = rng.standard_normal((3, WIDTH), np.float32)
    output = head.forward(segments, want_hidden=True, hidden=given)
    assert [chat.length for chat in chats] == [prompt_len, 5]
    assert output.logits is not None
    assert output.hidden is not None
    return output.logits.copy(), output.hidden.copy()


def _ffn(make: Maker, post_norm: Norm | None = None) -> GatedFfn:
    return GatedFfn(
        0,
        make.norm(WIDTH),
        make.weight(FFN, WIDTH),
        make.weight(FFN, WIDTH),
        make.weight(WIDTH, FFN),
        "silu",
        post_norm,
    )


def random_ids(num: int, seed: int = 1) -> list[int]:
    """Token ids of a made-up text."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, num)]


def logits_of(model: Executable, cache: Cache, token_ids: list[int]) -> np.ndarray:
    """One forward; a copy of every row's logits."""
    output = model.forward([Segment(token_ids, cache)])
    assert output.logits is not None
    return output.logits.copy()
