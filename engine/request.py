"""One turn on its way through the engine: what was emitted, when, and what became of it.

Every token of an answer passes `Request.draw`, whoever forwarded its row; so text, stops, penalties
and counters cannot depend on drafting. Knows no scheduling and no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from engine.cache.holder import Holder
from engine.commands import SubmitTurn
from engine.contracts import Clock, LoadedModel
from engine.events import (
    EngineEvent,
    ErrorInfo,
    FinishReason,
    PrefillProgress,
    TextDelta,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    TurnStats,
)
from engine.prompt import Prompt
from engine.sampling import Sampler
from engine.stopping import StopRule
from engine.text_stream import TextStream
from engine.turn_counters import TurnCounters

if TYPE_CHECKING:
    from engine.speculative.execution import SpeculativeExecution

EmitEvent = Callable[[EngineEvent], None]


class RequestState(Enum):
    """Where a turn is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


class Request:
    """A submitted turn with everything it owns while it runs."""

    def __init__(
        self,
        turn: SubmitTurn,
        prompt: Prompt,
        model: LoadedModel,
        *,
        context_len: int,
        clock: Clock,
        emit: EmitEvent,
    ) -> None:
        self.turn = turn
        self.prompt = prompt
        self.state = RequestState.WAITING
        self.token_ids: list[int] = []
        self.execution: SpeculativeExecution | None = None
        self.needs_seed = False
        """Whether `execution` has yet to be told what the holder holds (S27)."""
        self.prompt_row: np.ndarray | None = None
        """Hidden row [F] of the prompt's last token, for a drafter that can start from it."""
        self.interlude_ids: list[int] = []
        """Tokens that went into the cache plainly since `execution` last saw it (S47)."""
        self.decline: str | None = None
        """Why this turn does not draft under the options in force."""
        self.resume_len: int | None = None
        """Where a cache that cannot rewind is copied, to redo the answer; None: not needed yet."""
        self._clock = clock
        self._emit = emit
        self._submitted_at = clock()
        self._counters = TurnCounters()
        self._holder: Holder | None = None
        self._sampler = Sampler(turn.sampling, prompt.token_ids, attempt=turn.attempt)
        room = context_len - len(prompt.token_ids)
        asked = room if turn.max_tokens is None else turn.max_tokens
        self._rule = StopRule(
            end_ids=model.tokenizer.eog_ids | frozenset(turn.stop_ids),
            stop=turn.stop,
            max_tokens=min(asked, room),
            finish_at_max="context" if turn.max_tokens is None or asked > room else "length",
            piece=model.tokenizer.piece,
            guards_repetition=turn.stop_on_repetition,
        )
        self._stream = TextStream(self._emit_delta, clock)

    @property
    def holder(self) -> Holder:
        """The cache this turn runs on, from `begin` on."""
        assert self._holder is not None, "the turn has not begun"
        return self._holder

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self._rule.num_remaining

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended by itself."""
        return self._rule.finish_reason is not None

    @property
    def last_token_id(self) -> int:
        """The newest emitted token, which the cache does not hold yet."""
        return self.token_ids[-1]

    @property
    def stats(self) -> TurnStats:
        """The counters so far."""
        return self._counters.to_stats(
            TurnStats(
                prompt_tokens=len(self.prompt.token_ids),
                completion_tokens=len(self.token_ids),
            ),
            self.execution,
        )

    @property
    def summary(self) -> str:
        """One line for the log."""
        stats = self.stats
        return (
            f"id={self.turn.request_id} prompt={stats.prompt_tokens} reused={stats.reused_tokens} "
            f"tokens={stats.completion_tokens} ttft_ms={stats.ttft_ms:.1f} "
            f"tok_s={stats.decode_tok_s:.1f} drafted={stats.draft_n} "
            f"accepted={stats.draft_n_accepted} governor {stats.governor or 'off'}"
        )

    def begin(self, holder: Holder) -> None:
        """Start on a holder that has the first tokens of the prompt."""
        self._holder = holder
        self.state = RequestState.PREFILLING
        self._counters.reused_tokens = holder.length
        self._emit(
            TurnStarted(
                request_id=self.turn.request_id,
                chat_id=self.turn.chat_id,
                prompt_tokens=len(self.prompt.token_ids),
                reused_tokens=holder.length,
                dropped_messages=self.prompt.dropped_messages,
                prompt_tail=self.prompt.tail,
            )
        )

    def report_prefill(self, elapsed_s: float) -> None:
        """A chunk of the prompt was forwarded."""
        self._counters.prefill_s += elapsed_s
        self._emit(
            PrefillProgress(
                self.turn.request_id,
                self.turn.chat_id,
                num_done=self.holder.length,
                num_total=len(self.prompt.token_ids),
            )
        )

    def draw(self, row: np.ndarray, argmax: int | None = None) -> int:
        """Draw the next token from its row and emit it; its argmax where it is known.

        Shapes: row [V] float32, valid during the call.
        State:  sampler, stop rule, text and counters take the token.
        Raises: NotANumber when the row is not finite; nothing is emitted then.
        """
        token_id = self._sampler.draw(row, argmax)
        self._sampler.accept(token_id)
        self.token_ids.append(token_id)
        self._stream.push(self._rule.push(token_id))
        self._counters.note_token(self._clock() - self._submitted_at)
        return token_id

    def draw_unless_complete(
        self, row: np.ndarray, position: int, argmax: int | None = None
    ) -> int | None:
        """`draw` for the verify loop: None once the answer has ended, so the rest is rejected."""
        if self.is_complete:
            return None
        assert position == self._sampler.position, f"{position} is not {self._sampler.position}"
        return self.draw(row, argmax)

    def count_plain_step(self, elapsed_s: float) -> None:
        """A decode step outside of speculation."""
        self._counters.plain_steps += 1
        self._counters.plain_s += elapsed_s

    def drop_execution(self, *, decline: str | None = None) -> None:
        """Forget the armed drafter, keeping its counters; None lets the turn arm again (S42)."""
        if self.execution:
            self._counters.absorb(self.execution)
        self.execution = None
        self.interlude_ids.clear()
        self.decline = decline

    def poll_text(self) -> None:
        """Emit a delta when one is due."""
        self._stream.poll()

    def finish(self, reason: FinishReason | None = None) -> None:
        """The answer is over: by itself, or for an outer reason. State: DONE."""
        text = self._end_text()
        self.state = RequestState.DONE
        self._emit(
            TurnFinished(
                request_id=self.turn.request_id,
                chat_id=self.turn.chat_id,
                finish_reason=reason or self._rule.finish_reason or "cancelled",
                text=text,
                token_ids=tuple(self.token_ids),
                stats=self.stats,
                context_used=self._context_used,
            )
        )
        self._release()

    def fail(self, error: ErrorInfo) -> None:
        """The turn cannot go on; what was emitted is kept. State: DONE."""
        text = self._end_text()
        self.state = RequestState.DONE
        self._emit(TurnFailed(self.turn.request_id, self.turn.chat_id, error, text))
        self._release()

    def _release(self) -> None:
        """Let go of the cache now: this and its text stream know each other, and would keep it
        until the collector runs, when it was evicted long before."""
        self._holder = self.execution = None

    @property
    def _context_used(self) -> int:
        return self._holder.length if self._holder else 0

    def _end_text(self) -> str:
        self._stream.push(self._rule.flush())
        return self._stream.finish()

    def _emit_delta(self, text: str) -> None:
        self._emit(
            TextDelta(
                self.turn.request_id,
                self.turn.chat_id,
                text,
                stats=self.stats,
                context_used=self._context_used,
            )
        )
