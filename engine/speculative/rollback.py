"""Takes the rejected rows of a verify back (S16). Draws nothing and decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from backends.base import BackendError
from engine.speculative.target import SpeculativeTarget

log = logging.getLogger(__name__)

WIDE_FORWARD_FAULTS = (BackendError, MemoryError, OSError)
"""What a forward of many rows may raise where one of a single row would still do."""


def roll_back(
    target: SpeculativeTarget, rows: Sequence[int], num_kept: int, snapshot: object
) -> None:
    """Keep the first `num_kept` >= 1 of the rows that the newest forward, a verify, appended.

    `snapshot` was taken before that forward and is used up.
    State: the cache is `len(rows) - num_kept` tokens shorter, as if these had never been there.
    """
    base = target.cached_len - len(rows)
    target.on_verify_resolved(len(rows), num_kept - 1)
    if num_kept == len(rows):
        return
    if target.traits.verify_persists_accepted_kv:
        target.rewind_to(base + num_kept)
        return
    target.restore_state(snapshot)
    _replay(target, rows[:num_kept])


def _replay(target: SpeculativeTarget, rows: Sequence[int]) -> None:
    """Forward the kept rows again: it rebuilds the state, the tokens are drawn already (B8)."""
    try:
        target.forward_rows(rows, want_logits="none")
    except WIDE_FORWARD_FAULTS:
        log.warning("%d rows are forwarded again one by one", len(rows), exc_info=True)
        for token_id in rows:
            target.forward_rows([token_id], want_logits="none")
