"""Checks of a model against itself: cold caches, row classes under teacher forcing, drafts.

Nothing here is on the path of a turn. Knows no algorithm by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.base import BackendCaps, Cache, Executable, Segment
from engine.cache.holder import Holder
from engine.contracts import LoadedModel
from engine.errors import EngineError
from engine.executor import PREFILL_CHUNK
from engine.speculative.draft_head import DraftHead, DraftHeadKind
from engine.speculative.options import DEFAULT_WINDOW
from engine.speculative.rollback import roll_back
from engine.speculative.trunk import Trunk

F32_TOLERANCE = 1e-4
"""Largest difference between a live cache and a one-piece prefill of an f32 model."""
KERNEL_TOLERANCE = 2e-2
"""The same against a cold cache where rows may differ by kernel (no promise of row independence):
half-precision kernels differ by a few of their ulps, a wrong position by whole numbers."""


def row_tolerance(caps: BackendCaps) -> float:
    """Largest difference of one row computed in two ways that the backend's promise allows."""
    return 0.0 if caps.is_row_independent else KERNEL_TOLERANCE


# -- a live cache against a cold one


def cold_check(
    model: LoadedModel, holder: Holder, prompt_ids: Sequence[int], emitted_ids: Sequence[int]
) -> bool:
    """Whether a chat's cache is what plain decoding of its tokens would have left.

    A fresh cache gets the same prompt in the same chunks, then the emitted tokens (all but the
    last, which is never cached) one row at a time. Lengths, positions, keys, values, recurrent
    states and the next logits must agree: to the bit where the backend promises row independence.
    An f32 model must also agree with a one-piece prefill within `F32_TOLERANCE`.
    State: unchanged.
    """
    if holder.token_ids != [*prompt_ids, *emitted_ids[:-1]]:
        return False
    next_id = emitted_ids[-1] if emitted_ids else prompt_ids[-1]
    if not cold_cache_agrees(holder, len(prompt_ids), next_id):
        return False
    return model.quantization != "F32" or _one_piece_agrees(holder, next_id)


def cold_cache_agrees(holder: Holder, prompt_len: int, next_id: int) -> bool:
    """Whether a fresh cache, the first `prompt_len` tokens prefilled, then row by row, agrees.

    `next_id` is the token whose logits are compared at the end. State: unchanged.
    """
    executable, ids = holder.executable, holder.token_ids
    if holder.cache.length != len(ids):
        return False
    cold = executable.new_cache()
    _prefill(executable, cold, ids[:prompt_len])
    for token_id in ids[prompt_len:]:
        _forward(executable, cold, [token_id])
    tolerance = row_tolerance(executable.caps)
    live = _contents(executable, holder.cache, next_id)
    return _agree(live, _contents(executable, cold, next_id), tolerance)


def _one_piece_agrees(holder: Holder, next_id: int) -> bool:
    whole = holder.executable.new_cache()
    _forward(holder.executable, whole, holder.token_ids)
    live = _contents(holder.executable, holder.cache, next_id)
    return _agree(live, _contents(holder.executable, whole, next_id), F32_TOLERANCE)


def _prefill(executable: Executable, cache: Cache, token_ids: Sequence[int]) -> None:
    """A prompt in the chunks the executor cuts: fixed multiples, see `Executor._chunk_end`."""
    caps = executable.caps
    size = min(PREFILL_CHUNK, caps.max_rows)
    last = len(token_ids) if caps.is_chunk_independent else len(token_ids) - 1
    for start in range(0, last, size):
        _forward(executable, cache, token_ids[start : min(start + size, last)])
    if last < len(token_ids):
        _forward(executable, cache, token_ids[last:])


def _forward(executable: Executable, cache: Cache, token_ids: Sequence[int]) -> np.ndarray:
    """Append tokens, in pieces if there are more than fit one pass; logits [V] of the last row."""
    row = np.zeros(0, dtype=np.float32)
    for start in range(0, len(token_ids), executable.caps.max_rows):
        piece = token_ids[start : start + executable.caps.max_rows]
        logits = executable.forward([Segment(piece, cache)], want_logits="last").logits
        assert logits is not None, "logits were asked for"
        row = logits[-1]
    return row.copy()


def _contents(executable: Executable, cache: Cache, next_id: int) -> dict[str, np.ndarray]:
    """Everything that decides the future: exported state, and the logits after one more token."""
    state = dict(_copied(cache.export_state()))
    state["next_logits"] = _forward(executable, cache.clone(), [next_id])
    return state


def _copied(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: np.array(value) for key, value in state.items()}


def _agree(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], tolerance: float) -> bool:
    if a.keys() != b.keys():
        return False
    return all(_arrays_agree(a[key], b[key], tolerance) for key in a)


def _arrays_agree(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if tolerance == 0.0 or a.dtype.kind in "iu":
        return a.tobytes() == b.tobytes()
    return bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=0, atol=tolerance))


# -- row classes under teacher forcing (ledger S62)


@dataclass(frozen=True, slots=True)
class Flip:
    """A row whose argmax differs from plain decoding's."""

    position: int
    plain_id: int
    other_id: int
    margin: float
    """Plain decoding's gap between its two best logits there: below twice the error it is a tie."""


@dataclass(slots=True)
class RowClass:
    """All rows that were computed in one way, compared with one-row decoding of the same prefix."""

    name: str
    """`row 2 of 8`, `after rollback`."""
    errors: list[float] = field(default_factory=list)
    """Largest logit difference of each row."""
    flips: list[Flip] = field(default_factory=list)

    @property
    def max_error(self) -> float:
        """The worst row's; 0 before there is one, NaN where a row is not finite."""
        return float(np.max(self.errors, initial=0.0))

    def add(self, position: int, plain: np.ndarray, other: np.ndarray) -> None:
        """Compare one row. Shapes: [V], [V]."""
        self.errors.append(float(np.max(np.abs(plain - other))))
        plain_id, other_id = int(np.argmax(plain)), int(np.argmax(other))
        if plain_id != other_id:
            best_two = np.partition(plain, -2)[-2:]
            margin = float(best_two[1] - best_two[0])
            self.flips.append(Flip(position, plain_id, other_id, margin))


def plain_rows(model: LoadedModel, token_ids: Sequence[int]) -> np.ndarray:
    """Logits of one-row decoding. Shapes: token_ids [T] -> [T, V] float32."""
    cache = model.executable.new_cache()
    return np.stack([_forward(model.executable, cache, [token_id]) for token_id in token_ids])


def check_rows(
    model: LoadedModel, token_ids: Sequence[int], max_rows: int, plain: np.ndarray | None = None
) -> list[RowClass]:
    """Forward the text in windows of 1 .. `max_rows` rows; each row against one-row decoding.

    Every prefix is the text itself (teacher forcing), so each comparison is of the same prefix.
    """
    plain = plain_rows(model, token_ids) if plain is None else plain
    classes = []
    for num_rows in range(1, max_rows + 1):
        cache = model.executable.new_cache()
        by_row = [RowClass(f"row {row} of {num_rows}") for row in range(num_rows)]
        for start in range(0, len(token_ids) - num_rows + 1, num_rows):
            rows = _all_rows(model.executable, cache, token_ids[start : start + num_rows])
            for row, logits in enumerate(rows):
                by_row[row].add(start + row, plain[start + row], logits)
        classes.extend(by_row)
    return classes


def check_rollbacks(
    model: LoadedModel, token_ids: Sequence[int], window: int, plain: np.ndarray | None = None
) -> list[RowClass]:
    """Verify windows with wrong drafts of every accepted length, then decode on plainly.

    Returns: the kept rows of the verifies, the rows decoded right after a full acceptance and
             after a rollback; a cache that was not put back shows in the last.
    """
    plain = plain_rows(model, token_ids) if plain is None else plain
    kept, after_all, after_rollback = map(
        RowClass, ("kept verify rows", "after full acceptance", "after rollback")
    )
    trunk = _trunk(model)
    pos, num_right = 0, 0
    while pos + num_right + 2 <= len(token_ids):
        rows = list(token_ids[pos : pos + num_right + 1])
        wrong = [(token_ids[pos + num_right + 1] + 1) % model.vocab_size] * (window - num_right)
        snapshot = trunk.snapshot_state()
        logits = trunk.forward_rows([*rows, *wrong]).logits
        assert logits is not None, "logits were asked for"
        for row in range(len(rows)):
            kept.add(pos + row, plain[pos + row], logits[row])
        roll_back(trunk, [*rows, *wrong], len(rows), snapshot)
        pos += len(rows)
        target = after_rollback if wrong else after_all
        logits = trunk.forward_rows(token_ids[pos : pos + 1]).logits
        assert logits is not None, "logits were asked for"
        target.add(pos, plain[pos], logits[0])
        pos += 1
        num_right = (num_right + 1) % (window + 1)
    return [kept, after_all, after_rollback]


def _all_rows(executable: Executable, cache: Cache, token_ids: Sequence[int]) -> np.ndarray:
    logits = executable.forward([Segment(token_ids, cache)], want_logits="all").logits
    assert logits is not None, "logits were asked for"
    return logits.copy()


def _trunk(model: LoadedModel) -> Trunk:
    return Trunk(
        Holder(model.executable),
        model.traits,
        vocab_size=model.vocab_size,
        max_context_len=model.max_context_len,
    )


# -- what a trained drafter proposes


def draft_after(
    model: LoadedModel, token_ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drafts after a text whose last token is the newest one (not in the target's cache).

    Shapes: ids [n] int64, logits [n, V] float32, confidences [n] float32.
    Raises: EngineError when the model has no drafter or the text is too short.
    """
    head = model.draft_head
    if head is None:
        reason = model.draft_head_refusal or f"{model.name} holds no drafter"
        raise EngineError(reason, hint="name a drafter file with --draft-model")
    if len(token_ids) < 2:
        raise EngineError("one token is too short a text", hint="give at least two tokens")
    trunk = _trunk(model)
    state = head.new_state(trunk)
    known, last_id = list(token_ids[:-1]), token_ids[-1]
    hidden = _feed(trunk, head, state, known)
    if head.kind is DraftHeadKind.BLOCK:
        ids, probs = head.draft_block(state, last_id, hidden, len(known), head.block_size)
        return np.array(ids), head.last_logits(state), np.array(probs, dtype=np.float32)
    return _draft_chain(head, state, last_id, hidden, len(known))


def _feed(trunk: Trunk, head: DraftHead, state: object, token_ids: Sequence[int]) -> np.ndarray:
    """Prefill target and head; the hidden row [F] of the last token."""
    size = min(PREFILL_CHUNK, trunk.holder.executable.caps.max_rows)
    hidden = np.zeros((1, 0), dtype=np.float32)
    for start in range(0, len(token_ids), size):
        piece = token_ids[start : start + size]
        output = trunk.forward_rows(piece, want_hidden=True, want_logits="none")
        assert output.hidden is not None, "hidden rows were asked for"
        hidden = output.hidden.copy()
        head.catch_up(state, piece, hidden, start)
    row: np.ndarray = hidden[-1]
    return row


def _draft_chain(
    head: DraftHead, state: object, token_id: int, hidden: np.ndarray, pos: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, logits, confidences = [], [], []
    for offset in range(DEFAULT_WINDOW):
        step = head.draft_step(state, token_id, hidden, pos + offset)
        ids.append(step.token_id)
        confidences.append(step.confidence)
        logits.append(head.last_logits(state)[0])
        token_id, hidden = step.token_id, step.hidden
    return np.array(ids), np.stack(logits), np.array(confidences, dtype=np.float32)
