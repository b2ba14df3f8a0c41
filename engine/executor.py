"""Carries out one plan: forwards rows, lets each turn draw from its own.

The failure of one turn ends that turn and no other. Knows no commands, no thread and no text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.base import BackendError, RowOutput, WantLogits
from engine.cache.holder import Holder, forward_holders
from engine.cache.holder_store import HolderStore
from engine.contracts import Clock, LoadedModel
from engine.errors import EngineError
from engine.planner import Plan
from engine.prompt import history_len
from engine.request import Request, RequestState
from engine.speculative.execution import DRAFTER_FAULTS, SpeculativeExecution
from engine.speculative.options import MAX_WINDOW
from engine.speculative.runtime import SpeculationRuntime
from engine.speculative.speculator import Decline
from engine.speculative.trunk import Trunk

log = logging.getLogger(__name__)

PREFILL_CHUNK = 256
"""Tokens of prompt per step. Chunks end at multiples of it, wherever a prompt begins and whoever
else runs, so that a chat gets the same stream alone and in company; a chunk bounds how long a
cancel or a neighbour's next token waits."""

_MOST_ROWS_PER_STEP = MAX_WINDOW + 1
"""Rows one decode step may append: the newest token and the widest window of drafts."""

TURN_ERRORS = (EngineError, BackendError, OSError, MemoryError)
"""What may end one turn; anything else is a bug and ends the engine."""


@dataclass(frozen=True, slots=True)
class ExecutorCallbacks:
    """Where the executor reports to."""

    fail: Callable[[Request, Exception], None]
    notice: Callable[[str], None]


class Executor:
    """Forwards and draws for one loaded model."""

    def __init__(
        self,
        model: LoadedModel,
        store: HolderStore,
        speculation: SpeculationRuntime,
        *,
        context_len: int,
        clock: Clock,
        callbacks: ExecutorCallbacks,
    ) -> None:
        self._model = model
        self._caps = model.executable.caps
        self._store = store
        self._speculation = speculation
        self._context_len = context_len
        self._clock = clock
        self._callbacks = callbacks

    def begin(self, request: Request, holder: Holder) -> None:
        """Start a turn on a holder. State: the chat's drafter stands on it too, used or not.

        It may be another one than last time: a copy, a resume point or an empty one, where the
        chat's own could not be cut back.
        """
        request.begin(holder)
        if kept := self._store.execution(request.turn.chat_id):
            assert isinstance(kept.target, Trunk), "armed by another hand"
            kept.target.holder = holder

    def execute(self, plan: Plan) -> None:
        """Carry out one step. State: the planned turns move on; failed ones are reported."""
        for request in (*plan.decode, *([plan.speculate] if plan.speculate else [])):
            self._save_resume_point(request)
        if plan.speculate:
            self._guard(plan.speculate, self._speculate)
        if plan.prefill:
            if plan.may_arm and plan.prefill.execution is None:
                self._arm(plan.prefill)
            self._guard(plan.prefill, self._prefill)
        if plan.decode:
            self._decode(plan.decode)

    def _guard(self, request: Request, action: Callable[[Request], None]) -> None:
        try:
            action(request)
        except TURN_ERRORS as error:
            log.warning("turn %s failed", request.turn.request_id, exc_info=error)
            self._callbacks.fail(request, error)

    # -- prefill

    def _prefill(self, request: Request) -> None:
        start, ids = request.holder.length, request.prompt.token_ids
        end = self._chunk_end(request)
        if start == request.resume_len and (copy := request.holder.try_clone()):
            self._store.set_resume_point(request.turn.chat_id, copy)
        is_last = end == len(ids) and not request.is_complete
        began = self._clock()
        output = self._forward_prompt(request, ids[start:end], is_last=is_last)
        request.report_prefill(self._clock() - began)
        if end == len(ids):
            request.state = RequestState.DECODING
        if is_last:
            assert output.logits is not None, "logits were asked for"
            if output.hidden is not None:
                request.prompt_row = output.hidden[-1].copy()
            request.draw(output.logits[-1], output.best_of(-1))

    def _forward_prompt(
        self, request: Request, token_ids: Sequence[int], *, is_last: bool
    ) -> RowOutput:
        execution = request.execution
        want_logits: WantLogits = "last" if is_last else "none"
        if execution is not None and execution.prefills_through_context:
            output = execution.prefill(token_ids, want_logits=want_logits)
            self._leave_dropped(request, execution)
            return output
        wants_row = is_last and execution is not None and execution.wants_prompts_last_row
        return self._store.with_room(
            lambda: request.holder.forward(
                token_ids, want_logits=want_logits, want_hidden=wants_row
            )
        )

    def _chunk_end(self, request: Request) -> int:
        """Where the next chunk ends: a fixed multiple, the prompt's end, or a place to resume at.

        Where rows depend on how they were cut, the prompt's last token is forwarded alone, as
        decoding would, so that answering again from the cache gives the same bits.
        """
        start, num = request.holder.length, len(request.prompt.token_ids)
        size = min(PREFILL_CHUNK, self._caps.max_rows)
        last = num if self._caps.is_chunk_independent or start == num - 1 else num - 1
        end = min(start - start % size + size, last)
        if end == last and request.resume_len is None and self._needs_resume_point(request):
            request.resume_len = history_len(request.prompt, self._model)
        if request.resume_len is not None and start < request.resume_len < end:
            return request.resume_len
        return end

    def _needs_resume_point(self, request: Request) -> bool:
        """Whether this cache could not be cut back to the prompt when the answer is redone."""
        holder = request.holder
        return holder.length > 1 and not holder.can_rewind_to(1)

    def _save_resume_point(self, request: Request) -> None:
        """Copy a ring that is about to lose what redoing this answer would need.

        Copied before it is lost, and only then: a chat whose cache rewinds anywhere, or whose
        prompt and answer stay inside the window, never pays for a copy.
        """
        holder, prompt_len = request.holder, len(request.prompt.token_ids)
        if request.resume_len is not None or holder.can_rewind_to(
            max(1, prompt_len - 1 - _MOST_ROWS_PER_STEP)
        ):
            return
        request.resume_len = history_len(request.prompt, self._model)
        copy = holder.try_clone() if holder.can_rewind_to(request.resume_len) else None
        if copy is not None and copy.can_rewind_to(request.resume_len):
            copy.rewind_to(request.resume_len)
            self._store.set_resume_point(request.turn.chat_id, copy)

    # -- plain decoding

    def _decode(self, requests: Sequence[Request]) -> None:
        """One row for each, in one forward; when that fails, each alone, to find who failed."""
        live = [request for request in requests if request.state is RequestState.DECODING]
        try:
            self._decode_together(live)
        except TURN_ERRORS as error:
            log.warning("a step of %d turns failed", len(live), exc_info=error)
            if len(live) == 1:
                self._callbacks.fail(live[0], error)
                return
            for request in live:
                self._guard(request, lambda alone: self._decode_together([alone]))

    def _decode_together(self, requests: Sequence[Request]) -> None:
        began = self._clock()
        inputs = [[request.last_token_id] for request in requests]
        holders = [request.holder for request in requests]
        output = self._store.with_room(lambda: forward_holders(holders, inputs, want_logits="last"))
        assert output.logits is not None, "logits were asked for"
        elapsed_s = self._clock() - began
        for row, request in enumerate(requests):
            self._note_interlude(request)
            request.count_plain_step(elapsed_s)
            drawn = output.logits[row], output.best_of(row)
            self._guard(request, lambda turn, drawn=drawn: turn.draw(*drawn))  # type: ignore[misc]

    def _note_interlude(self, request: Request) -> None:
        """A plain step beside others: the drafter learns of the token later, or is dropped."""
        if request.execution is None:
            return
        if request.execution.prefills_through_context:
            request.drop_execution(decline="the drafter missed hidden rows while others ran")
        else:
            request.interlude_ids.append(request.last_token_id)

    # -- speculation

    def _speculate(self, request: Request) -> None:
        if request.execution is None:
            self._arm(request)
        execution = request.execution
        if execution is None:
            self._decode([request])
            return
        if request.needs_seed:
            ids = request.holder.token_ids
            is_fresh = len(ids) == len(request.prompt.token_ids)
            execution.seed_committed(ids, request.prompt_row if is_fresh else None)
        elif request.interlude_ids:
            execution.catch_up(request.interlude_ids)
        request.needs_seed = False
        request.interlude_ids.clear()
        execution.step(request.last_token_id, request.num_remaining, request.draw_unless_complete)
        self._leave_dropped(request, execution)

    def _leave_dropped(self, request: Request, execution: SpeculativeExecution) -> None:
        """A drafter that erred is left behind with one line; the answer goes on plainly."""
        if execution.dropped:
            self._callbacks.notice(execution.dropped)
            self._store.keep_execution(request.turn.chat_id, None)
            request.drop_execution(decline=execution.dropped)

    def _arm(self, request: Request) -> None:
        """Arm the turn's own holder, or go on with the drafter kept with the chat (S25, S28).

        A drafter that needs no hidden rows is told the tokens at the first decode step, so that
        the prompt takes the plain path (S29). It stays with the chat from here on, so that a turn
        that never drafts (one token long, or always in company) loses nothing.
        """
        execution = self._kept_execution(request) or self._new_execution(request)
        if execution is not None:
            request.needs_seed = not execution.prefills_through_context
            self._store.keep_execution(request.turn.chat_id, execution)
        request.execution = execution

    def _kept_execution(self, request: Request) -> SpeculativeExecution | None:
        """The chat's drafter; None where it cannot go on behind what the holder holds."""
        kept = self._store.execution(request.turn.chat_id)
        if kept is None or request.num_remaining < 2:
            return None
        if not kept.can_continue(request.holder.token_ids):
            return None
        kept.begin_turn()
        return kept

    def _new_execution(self, request: Request) -> SpeculativeExecution | None:
        trunk = Trunk(
            request.holder,
            self._model.traits,
            vocab_size=self._model.vocab_size,
            max_context_len=self._context_len,
            with_room=self._store.with_room,
        )
        known_decline = self._speculation.decline
        try:
            armed = self._speculation.arm(
                trunk, max_tokens=request.num_remaining, committed_ids=request.holder.token_ids
            )
        except DRAFTER_FAULTS as error:
            log.warning("no drafter could be armed", exc_info=error)
            armed = Decline(f"the drafter failed to start: {error}")
            self._callbacks.notice(armed.reason)
        if isinstance(armed, Decline):
            request.decline = armed.reason
            if self._speculation.decline != known_decline:
                self._callbacks.notice(f"no drafting: {armed.reason}")
            return None
        return armed
