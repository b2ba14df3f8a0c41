"""One loaded model at work: its holders, its turns, its steps. Knows no thread and no queue."""

from __future__ import annotations

import logging
from pathlib import Path

from engine.cache.checkpoint import CheckpointFolder
from engine.cache.holder import Holder
from engine.cache.holder_store import HolderStore
from engine.commands import Message, SubmitTurn
from engine.contracts import Clock, LoadedModel
from engine.errors import EngineError, NotANumber
from engine.events import ErrorInfo, FinishReason, Notice
from engine.executor import PREFILL_CHUNK, TURN_ERRORS, Executor, ExecutorCallbacks
from engine.options import EngineOptions
from engine.planner import plan
from engine.prefix_keeper import PrefixKeeper
from engine.prompt import build_prompt, shared_prefix, system_messages
from engine.request import EmitEvent, Request, RequestState
from engine.scheduler import Scheduler
from engine.speculative.options import SpeculationOptions
from engine.speculative.runtime import SpeculationRuntime

log = logging.getLogger(__name__)

ROOM_FOR_ANSWER = 256
"""Tokens of answer a turn must find memory for before it starts beside others."""


class ModelSession:
    """Everything that lives as long as one loaded model."""

    def __init__(
        self,
        model: LoadedModel,
        speculation: SpeculationRuntime,
        *,
        context_len: int,
        budget_bytes: int,
        options: EngineOptions,
        clock: Clock,
        emit: EmitEvent,
    ) -> None:
        self.model = model
        self.speculation = speculation
        self.context_len = context_len
        caps = model.executable.caps
        chunk_len = min(PREFILL_CHUNK, caps.max_rows)
        self._share_unit = 1 if caps.is_chunk_independent else chunk_len
        self.store = HolderStore(
            model.executable, budget_bytes=budget_bytes, share_unit=self._share_unit
        )
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._emit = emit
        self._scheduler = Scheduler(max_running=min(options.max_running, caps.max_rows))
        self._executor = Executor(
            model,
            self.store,
            speculation,
            context_len=context_len,
            clock=clock,
            callbacks=ExecutorCallbacks(fail=self._fail, notice=lambda t: emit(Notice(t))),
        )
        self._keeper = PrefixKeeper(
            model.executable,
            self.store,
            _checkpoint_folder(model, options.checkpoint_dir),
            chunk_len=chunk_len,
            notice=lambda text: emit(Notice(text)),
        )
        self._prefixes: dict[tuple[tuple[Message, ...], bool | None], tuple[int, ...]] = {}
        self._has_told_no_template = False

    @property
    def num_bytes(self) -> int:
        """Memory of weights and caches."""
        return self.model.executable.weight_bytes + self.store.num_bytes

    def submit(self, turn: SubmitTurn) -> None:
        """Queue a turn. Raises: EngineError when its prompt cannot be made or does not fit."""
        held = self.store.get(turn.chat_id)
        held_ids = held.token_ids if held else ()
        prompt = build_prompt(turn, self.model, self.context_len, held_ids)
        if prompt.kept_messages and self.model.template is None and not self._has_told_no_template:
            self._has_told_no_template = True
            self._emit(Notice(f"{self.model.name} has no chat template: it continues raw text"))
        request = Request(
            turn,
            prompt,
            self.model,
            context_len=self.context_len,
            clock=self._clock,
            emit=self._emit,
        )
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """End a turn as it stands; unknown and ended ones are none of our business."""
        if request := self._scheduler.find(request_id):
            self._end(request, "cancelled")

    def cancel_all(self) -> None:
        """End every turn as it stands."""
        for request in self._scheduler.requests:
            self._end(request, "cancelled")

    def update_speculation(self, options: SpeculationOptions) -> None:
        """Drop armed drafters; turns arm again under the new policy (S42)."""
        self.speculation.set_options(options)
        self.store.drop_executions()
        for request in self._scheduler.requests:
            request.drop_execution()

    def forget(self, chat_id: str) -> None:
        """Release a chat's holder; a turn that still runs on it is cancelled."""
        for request in self._scheduler.requests:
            if request.turn.chat_id == chat_id:
                self._end(request, "cancelled")
        self.store.discard(chat_id)

    def step(self) -> bool:
        """Let every turn move on by one step; False when there is none."""
        if self._scheduler.is_idle:
            return False
        self._start_waiting()
        may_speculate = self.speculation.options.is_enabled
        self._executor.execute(plan(self._scheduler, may_speculate=may_speculate))
        for request in self._scheduler.requests:
            request.poll_text()
            if request.is_complete and request.state is RequestState.DECODING:
                self._end(request)
        return True

    def work_in_background(self) -> bool:
        """One piece of work on shared prefixes; False when none is left or turns are waiting."""
        return self._scheduler.is_idle and self._keeper.step()

    def close(self) -> None:
        """Release caches and weights; answers nobody: turns have been ended before.

        The caches go now, whoever still refers to it: the next model needs their memory.
        """
        self._keeper.close()
        self.store.clear()
        self.model.close()

    def holder(self, chat_id: str) -> Holder | None:
        """The cache a chat keeps, or None."""
        return self.store.get(chat_id)

    def _start_waiting(self) -> None:
        while request := self._scheduler.next_to_start(self._has_room):
            try:
                self._start(request)
            except TURN_ERRORS as error:
                log.warning("turn %s could not start", request.turn.request_id, exc_info=error)
                self.store.discard(request.turn.chat_id)
                self._fail(request, error)

    def _start(self, request: Request) -> None:
        system = system_messages(request.prompt.kept_messages)
        prefix = self._system_prefix(system, request.turn.think)
        own = self.store.get(request.turn.chat_id)
        if own is None or own.common_len(prefix) < len(prefix):
            self._keeper.restore(prefix)
        self._keeper.want(prefix)
        holder = self.store.acquire(request.turn.chat_id, request.prompt.token_ids)
        # Behind `acquire`: room made before it would evict a long chat's own cache.
        self.store.make_room(max(0, self._bytes_needed(request) - holder.num_bytes))
        self._executor.begin(request, holder)

    def _has_room(self, request: Request) -> bool:
        """Whether a turn fits beside the running ones, once everything idle is evicted."""
        running = [r for r in self._scheduler.requests if r.state is not RequestState.WAITING]
        needed = sum(max(r.holder.num_bytes, self._bytes_needed(r)) for r in running)
        return needed + self._bytes_needed(request) <= self._budget_bytes

    def _bytes_needed(self, request: Request) -> int:
        """Memory a turn may take soon: its prompt, what it has said, and some more answer."""
        num_tokens = len(request.prompt.token_ids) + len(request.token_ids)
        num_tokens += min(request.num_remaining, ROOM_FOR_ANSWER)
        return num_tokens * self.model.executable.cache_bytes_per_token

    def warm(self, system_prompt: str, think: bool | None) -> None:
        """Forward a system prompt while nothing else is asked (S49)."""
        self._keeper.want(self._system_prefix((Message("system", system_prompt),), think))

    def _system_prefix(self, system: tuple[Message, ...], think: bool | None) -> tuple[int, ...]:
        """Ids of a system prompt that can be shared between chats."""
        if not system:
            return ()
        key = (system, think)  # a template may say in the system message whether to think
        if key not in self._prefixes:
            try:
                prefix = shared_prefix(system, self.model, think)
            except EngineError as error:
                log.info("no shared prefix: %s", error)
                prefix = ()
            self._prefixes[key] = prefix[: len(prefix) - len(prefix) % self._share_unit]
        return self._prefixes[key]

    def _end(self, request: Request, reason: FinishReason | None = None) -> None:
        self._leave(request)
        log.info("turn %s", request.summary)
        request.finish(reason)

    def _fail(self, request: Request, error: Exception) -> None:
        self._leave(request)
        if isinstance(error, NotANumber):
            # Every turn that went on from this cache would fail alike.
            self.store.discard(request.turn.chat_id)
        request.fail(describe_error(error))

    def _leave(self, request: Request) -> None:
        """Take a turn out of the schedule. State: its holder is idle, or dropped when broken."""
        self._scheduler.remove(request)
        if request.state is RequestState.WAITING:
            return
        if request.holder.is_intact:
            self.store.release(request.turn.chat_id)
        else:
            self.store.discard(request.turn.chat_id)


def _checkpoint_folder(model: LoadedModel, folder: Path | None) -> CheckpointFolder | None:
    if folder is None:
        return None
    return CheckpointFolder(folder, model.content_hash, model.executable.caps.arithmetic)


def describe_error(error: BaseException) -> ErrorInfo:
    """An error as a person reads it."""
    if isinstance(error, FileNotFoundError):
        return ErrorInfo("missing", f"there is no file {error.filename}")
    if isinstance(error, MemoryError):
        return ErrorInfo("does_not_fit", "memory is full", "close other programs and try again")
    message = str(error) or type(error).__name__
    return ErrorInfo(getattr(error, "kind", "failure"), message, getattr(error, "hint", ""))
