"""The model-specific adapter over trained drafter weights (ledger S04)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from engine.speculative.target import SpeculativeTarget

_CONFIDENCE_TOP = 10
_ROWS = 64


def top_confidence(logits: np.ndarray) -> float:
    """Top-1 probability within the softmax over the 10 largest logits (S14). Shapes: [V].

    Source: llama.cpp's drafting sampler, top-k 10.
    """
    # The ten largest lie in the ten columns with the largest maxima: 0.1 ms for a vocabulary of
    # 262k, where partitioning all of it takes 1 ms.
    num_columns = len(logits) // _ROWS
    if num_columns > _CONFIDENCE_TOP:
        table = logits[: _ROWS * num_columns].reshape(_ROWS, num_columns)
        order = np.argpartition(table.max(axis=0), -_CONFIDENCE_TOP)
        rest = logits[_ROWS * num_columns :]
        logits = np.concatenate([table[:, order[-_CONFIDENCE_TOP:]].ravel(), rest])
    best = np.sort(logits)[-_CONFIDENCE_TOP:]
    return float(1.0 / np.exp(best - best[-1]).sum())


class DraftHeadKind(Enum):
    """How a head drafts."""

    PER_TOKEN = "per_token"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One drafted token with what the next one chains from."""

    token_id: int
    confidence: float
    """Top-1 probability over the head's top-10 logits (S14)."""
    hidden: np.ndarray
    """float32 [F], the head's own output row."""


class DraftHead(Protocol):
    """Trained drafter weights bound to one target. Positions are absolute, in tokens."""

    @property
    def kind(self) -> DraftHeadKind:
        """Per token or per block."""

    @property
    def name(self) -> str:
        """The file's general.architecture, or `nextn` for a block inside the trunk's file."""

    @property
    def block_size(self) -> int:
        """Most drafts of one block; 1 for a per-token head."""

    @property
    def resumes_after_gap(self) -> bool:
        """Whether drafting can start at a position whose hidden rows were never seen (S25)."""

    @property
    def supports_fused_catch_up(self) -> bool:
        """Whether `catch_up_and_step` is one call on the device (S21)."""

    def new_state(self, target: SpeculativeTarget) -> object:
        """Private drafter state of one chat, bound to that chat's target."""

    def draft_step(self, state: object, token_id: int, hidden: np.ndarray, pos: int) -> DraftStep:
        """Draft the token after `token_id`, which stands at `pos`. State: drafter cache.

        `hidden` [F] is the row of position `pos - 1`: the target's, or the head's own of the last
        step when chaining. Rows drafted ahead are dropped by the next `catch_up` or first step.
        """

    def draft_block(
        self, state: object, token_id: int, hidden: np.ndarray, pos: int, num: int
    ) -> tuple[list[int], list[float]]:
        """Draft up to `num` tokens in one pass: ids and cumulative prefix probabilities.

        `token_id` stands at `pos`, `hidden` [F] is the target's row of position `pos - 1`.
        """

    def catch_up(
        self, state: object, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int
    ) -> None:
        """Tell the head what landed in the trunk: ids [n], their hidden rows [n, F] or None.

        `hidden[i]` is the target's row of `token_ids[i]`, at position `start_pos + i`. Whatever the
        head held at or after `start_pos` is replaced (with no ids: dropped); None is a gap (S31).
        """

    def catch_up_and_step(
        self, state: object, token_ids: Sequence[int], hidden: np.ndarray, start_pos: int
    ) -> DraftStep:
        """`catch_up` and the first `draft_step`, folded into one call.

        Shapes: token_ids [n + 1], hidden [n, F]: the last id is the newest token, which has no
                row yet; the call is `catch_up(token_ids[:n], hidden, start_pos)`, then
                `draft_step(token_ids[n], hidden[n - 1], start_pos + n)`.
        """

    def last_logits(self, state: object) -> np.ndarray:
        """Logits [n, V] behind the last `draft_step` (n = 1) or `draft_block`, for diagnosis."""

    def close(self) -> None:
        """Release the drafter's weights; using the head afterwards is a bug."""
