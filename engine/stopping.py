"""Decides, token by token, whether an answer ends here and which of its bytes may be shown.

It is asked inside the verify loop, before a draft past the stop could be accepted (ledger S19), so
it answers the same whatever was drafted. Knows nothing of sampling, caches or drafting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from engine.events import FinishReason

MAX_CYCLE_LEN = 8
MAX_CYCLE_REPEATS = 64
"""A cycle of 1 to 8 tokens may be repeated this often; tables and rules stay below it."""


class StopStrings:
    """Finds stop strings in bytes that come in pieces, and holds back what may become one.

    Bytes, not characters: UTF-8 never matches in the middle of a character, and a stop string may
    begin or end inside a token.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        # A lone surrogate (from an argument that was not UTF-8) can match nothing a model says.
        self._needles = [text.encode(errors="replace") for text in strings if text]
        self._pending = b""

    def push(self, piece: bytes) -> tuple[bytes, bool]:
        """Bytes that may be shown now, and whether a stop string is complete (they end before it).

        Of several strings complete in one piece the one that starts first wins.
        """
        if not self._needles:
            return piece, False
        self._pending += piece
        starts = [at for needle in self._needles if (at := self._pending.find(needle)) >= 0]
        if starts:
            shown, self._pending = self._pending[: min(starts)], b""
            return shown, True
        held = max(_overlap(self._pending, needle) for needle in self._needles)
        cut = len(self._pending) - held
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown, False

    def flush(self) -> bytes:
        """What was held back, now that the answer ends otherwise. State: nothing is held."""
        held, self._pending = self._pending, b""
        return held


def _overlap(text: bytes, needle: bytes) -> int:
    """Bytes at the end of `text` that a needle may begin with."""
    longest = min(len(text), len(needle) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(needle[:n])), 0)


class RepetitionGuard:
    """Fires when the same 1 to 8 tokens have come round more than 64 times in a row."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=MAX_CYCLE_LEN)
        self._run_len = [0] * (MAX_CYCLE_LEN + 1)

    def push(self, token_id: int) -> bool:
        """Whether this token completes a hopeless loop."""
        recent = self._recent
        is_loop = False
        for period in range(1, len(recent) + 1):
            repeats = recent[-period] == token_id
            self._run_len[period] = self._run_len[period] + 1 if repeats else 0
            is_loop |= self._run_len[period] >= period * MAX_CYCLE_REPEATS
        recent.append(token_id)
        return is_loop


class StopRule:
    """Every way one answer can end, except cancelling it."""

    def __init__(
        self,
        *,
        end_ids: frozenset[int],
        stop: Sequence[str],
        max_tokens: int,
        finish_at_max: FinishReason,
        piece: Callable[[int], bytes],
        guards_repetition: bool = False,
    ) -> None:
        self._end_ids = end_ids
        self._strings = StopStrings(stop)
        self._remaining = max_tokens
        self._finish_at_max = finish_at_max
        self._piece = piece
        self._guard = RepetitionGuard() if guards_repetition else None
        self.finish_reason: FinishReason | None = "length" if max_tokens <= 0 else None

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted; 0 once the answer has ended."""
        return 0 if self.finish_reason else self._remaining

    def push(self, token_id: int) -> bytes:
        """Take one emitted token; bytes of the answer that may be shown because of it.

        An end token has no bytes. State: `finish_reason` is set when the answer ends with it.
        """
        self._remaining -= 1
        if token_id in self._end_ids:
            return self._end("stop")
        shown, is_stop = self._strings.push(self._piece(token_id))
        if is_stop:
            self.finish_reason = "stop"
            return shown
        if self._guard and self._guard.push(token_id):
            return shown + self._end("repetition")
        if self._remaining <= 0:
            return shown + self._end(self._finish_at_max)
        return shown

    def flush(self) -> bytes:
        """Held-back bytes of an answer that ends from outside (cancelled, failed)."""
        return self._strings.flush()

    def _end(self, reason: FinishReason) -> bytes:
        self.finish_reason = reason
        return self._strings.flush()
