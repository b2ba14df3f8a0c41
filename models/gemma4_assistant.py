"""The `gemma4-assistant` drafter: a few query-only layers over its target's keys and values.

It owns no cache. Each pass takes a token and the target's hidden row behind it (or the drafter's
own, when chaining), stands at the position the token will have and sees every key before it; that
position stays the same along a chain, so nothing is written and nothing has to be taken back.
Source: llama.cpp `llm_build_gemma4_assistant`, Hugging Face transformers
`Gemma4AssistantForCausalLM`.
Dimension letters: E own hidden size, F the target's, H heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from backends.base import Executable, Segment
from backends.program import Attention, Embed, EmbedWithHidden, Program, Project
from engine.speculative.draft_head import DraftHead, DraftHeadKind, DraftStep, top_confidence
from engine.speculative.target import SpeculativeTarget
from models.config import ModelConfig
from models.errors import BadGguf, DrafterMismatch
from models.gemma4 import add_layer_scale
from models.gguf_file import GgufFile
from models.layers import ProgramBuilder, add_attention_output, add_qkv, gated_ffn

NAME = "gemma4-assistant"
"""`general.architecture` of the file."""


def build(file: GgufFile, target: Program, target_name: str) -> Program:
    """The drafter's pass over the caches of `target`.

    Raises: DrafterMismatch naming what differs; BadGguf.
    """
    # The keys of these two may be copied from the target's file; the drafter's rows have neither.
    config = replace(ModelConfig.from_gguf(file), logit_softcap=0.0, suppressed_ids=())
    donors = _donors(file, config, target, target_name)
    builder = ProgramBuilder(file, config)
    builder.slots.extend(target.slots)
    _add_input(builder, target)
    for layer, donor in enumerate(donors):
        _add_attention(builder, layer, donor, target)
        builder.add(gated_ffn(builder, layer, "gelu_tanh", post_norm="post_ffw_norm"))
        add_layer_scale(builder, layer)
    shape = (target.hidden_size, config.hidden_size)
    return builder.finish(file.weight("nextn.post_projection.weight", shape))


def _donors(
    file: GgufFile, config: ModelConfig, target: Program, target_name: str
) -> list[Attention]:
    """For each layer the target's last attention of its kind, whose slot and rotation it shares."""
    if config.window_pattern is None:
        raise BadGguf(f"{file.path.name}: {NAME}.attention.sliding_window_pattern is missing")
    last: dict[bool, Attention] = {}
    for op in target.ops:
        if isinstance(op, Attention):
            last[target.slots[op.slot].window is not None] = op
    donors = []
    for layer, is_windowed in enumerate(config.window_pattern):
        donor = last.get(is_windowed)
        kind = "windowed" if is_windowed else "full"
        if donor is None:
            raise DrafterMismatch(
                f"{file.path.name} wants a {kind} layer, {target_name} has none",
                hint="use the drafter made for this model",
            )
        slot = target.slots[donor.slot]
        found = (slot.kv_heads, slot.head_dim, slot.window)
        wanted = (
            config.kv_heads[layer],
            config.key_len_swa if is_windowed else config.key_len,
            config.window if is_windowed else None,
        )
        if wanted != found:
            raise DrafterMismatch(
                f"{file.path.name} wants {kind} keys of (kv heads, head dim, window) {wanted}, "
                f"{target_name} has {found}",
                hint="use the drafter made for this model",
            )
        donors.append(donor)
    return donors


def _add_input(builder: ProgramBuilder, target: Program) -> None:
    """x = pre_projection @ (target's embedding of the token | hidden row), no norm on either."""
    file, width = builder.file, 2 * target.hidden_size
    embed = next(op for op in target.ops if isinstance(op, Embed))
    if embed.table.shape[0] != builder.config.vocab_size:
        raise DrafterMismatch(
            f"{file.path.name} wants a vocabulary of {builder.config.vocab_size}, "
            f"the model has {embed.table.shape[0]}"
        )
    pair = builder.register("pair", width)
    shape = (builder.config.hidden_size, width)
    builder.add(EmbedWithHidden(embed.table, pair, embed.scale))
    builder.add(
        Project(pair, builder.residual, (file.weight("nextn.pre_projection.weight", shape),))
    )


def _add_attention(builder: ProgramBuilder, layer: int, donor: Attention, target: Program) -> None:
    dim, heads = target.slots[donor.slot].head_dim, builder.config.heads[layer]
    query = builder.register("query", heads * dim)
    attended = builder.register("attended", heads * dim)
    add_qkv(builder, layer, query, (heads * dim,))
    builder.add(
        Attention(
            src=query,
            dst=attended,
            heads=heads,
            slot=donor.slot,
            scale=donor.scale,
            rope=donor.rope,
            q_norm=builder.norm(f"blk.{layer}.attn_q_norm.weight", dim),
            writes_kv=False,
        )
    )
    add_attention_output(builder, layer, attended, heads * dim, has_post_norm=True)


@dataclass(slots=True)
class _ChatState:
    """One chat's target, and what the last pass on it said."""

    target: SpeculativeTarget
    logits: np.ndarray | None = None


class AssistantHead:
    """The drafter on a device, bound to the executable whose caches it looks at."""

    kind = DraftHeadKind.PER_TOKEN
    name = NAME
    block_size = 1
    resumes_after_gap = True
    supports_fused_catch_up = False

    def __init__(self, executable: Executable) -> None:
        self.executable = executable

    def new_state(self, target: SpeculativeTarget) -> object:
        """Nothing of its own: the keys are the target's (S32)."""
        return _ChatState(target)

    def draft_step(self, state: object, token_id: int, hidden: np.ndarray, pos: int) -> DraftStep:
        """One pass at the position behind the target's cache, wherever the chain has come to.

        State: none; the target's cache is only read.
        """
        assert isinstance(state, _ChatState), "a state of this head"
        output = self.executable.forward(
            [Segment((token_id,), state.target.cache)], want_hidden=True, hidden=hidden[None]
        )
        assert output.logits is not None, "logits were asked for"
        assert output.hidden is not None, "hidden rows were asked for"
        state.logits = output.logits
        logits = output.logits[0]
        best = int(np.argmax(logits) if output.argmax is None else output.argmax[0])
        return DraftStep(best, top_confidence(logits), output.hidden[0].copy())

    def draft_block(
        self, state: object, token_id: int, hidden: np.ndarray, pos: int, num: int
    ) -> tuple[list[int], list[float]]:
        """A block of one."""
        step = self.draft_step(state, token_id, hidden, pos)
        return [step.token_id], [step.confidence]

    def catch_up(
        self, state: object, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int
    ) -> None:
        """Nothing to learn: what landed in the target's cache is what it looks at."""

    def catch_up_and_step(
        self, state: object, token_ids: Sequence[int], hidden: np.ndarray, start_pos: int
    ) -> DraftStep:
        """The step alone."""
        return self.draft_step(state, token_ids[-1], hidden[-1], start_pos + len(token_ids) - 1)

    def last_logits(self, state: object) -> np.ndarray:
        """Logits [1, V] of the last pass, a copy."""
        assert isinstance(state, _ChatState), "a state of this head"
        assert state.logits is not None, "no pass was run on this chat"
        return state.logits.copy()

    def close(self) -> None:
        """Release the drafter's weights."""
        self.executable.close()


def make_head(executable: Executable) -> DraftHead:
    """The head over the placed pass."""
    return AssistantHead(executable)
