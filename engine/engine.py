"""The inference engine: commands in, events out, one step at a time, on whatever thread calls it.

`EngineHost` gives it a thread of its own; the command line calls it directly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from backends.base import Executable
from engine.bench_rows import RowCost, measure_rows
from engine.cache.holder import Holder
from engine.commands import (
    CancelTurn,
    Command,
    ForgetChat,
    LoadModel,
    MeasureRows,
    Stop,
    SubmitTurn,
    UpdateSpeculation,
)
from engine.contracts import LEAST_CONTEXT_LEN, Clock, LoadedModel, ModelLoader
from engine.errors import LoadInterrupted, NoModelLoaded
from engine.events import (
    EngineEvent,
    ModelFailed,
    ModelInfo,
    ModelLoaded,
    ModelLoading,
    Notice,
    RowsMeasured,
    SpeculationChanged,
    TurnFailed,
)
from engine.executor import TURN_ERRORS
from engine.options import EngineOptions
from engine.session import ModelSession, describe_error
from engine.speculative.options import AUTO
from engine.speculative.registry import SpeculatorRegistry, default_registry
from engine.speculative.runtime import SpeculationRuntime

log = logging.getLogger(__name__)

FREE_MEMORY_SHARE = 0.25
"""Of the free memory, for chat caches: other programs and the file cache need the rest."""


class InferenceEngine:
    """Owns the loaded model; `apply` commands between calls of `step`."""

    def __init__(
        self,
        loader: ModelLoader,
        on_event: Callable[[EngineEvent], None],
        *,
        clock: Clock = time.perf_counter,
        registry: SpeculatorRegistry | None = None,
        options: EngineOptions | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_stopping` is asked during a load, which is otherwise not interruptible."""
        self._loader = loader
        self._emit = on_event
        self._clock = clock
        self._registry = registry or default_registry()
        self._options = options or EngineOptions()
        self._is_stopping = is_stopping
        self._session: ModelSession | None = None
        self._load_ms = 0.0

    @property
    def model(self) -> LoadedModel | None:
        """The loaded model, or None."""
        return self._session.model if self._session else None

    def holder(self, chat_id: str) -> Holder | None:
        """The cache a chat keeps, or None."""
        return self._session.holder(chat_id) if self._session else None

    def apply(self, command: Command) -> None:
        """Carry out one command; what a person can cause is reported as an event, not raised."""
        match command:
            case LoadModel():
                self._load(command)
            case SubmitTurn():
                self._submit(command)
            case CancelTurn(request_id):
                if self._session:
                    self._session.cancel(request_id)
            case UpdateSpeculation():
                self._update_speculation(command)
            case ForgetChat(chat_id):
                if self._session:
                    self._session.forget(chat_id)
            case MeasureRows():
                self._measure_rows(command)
            case Stop():
                self._cancel_all()

    def step(self) -> bool:
        """Let every turn move on by one step; False when nothing is left to do."""
        return self._session is not None and self._session.step()

    def work_in_background(self) -> bool:
        """One piece of work for later turns, when none runs; False when nothing is left to do."""
        return self._session is not None and self._session.work_in_background()

    def close(self) -> None:
        """Release the model; answers no turn: after a failure their caller does."""
        session, self._session = self._session, None
        if session:
            session.close()

    def _submit(self, turn: SubmitTurn) -> None:
        try:
            if self._session is None:
                raise NoModelLoaded("no model is loaded", hint="load a model first")
            self._session.submit(turn)
        except TURN_ERRORS as error:
            self._emit(TurnFailed(turn.request_id, turn.chat_id, describe_error(error)))

    def _update_speculation(self, command: UpdateSpeculation) -> None:
        if self._session is None:
            self._emit(SpeculationChanged(command.options, None, "no model is loaded"))
            return
        speculation = self._session.speculation
        is_other_drafter = command.options.drafter_path != speculation.options.drafter_path
        self._session.update_speculation(command.options)
        self._emit(SpeculationChanged(command.options, speculation.algorithm, speculation.decline))
        if is_other_drafter:
            self._emit(Notice("a drafter file is read with the model: load the model again"))

    def _measure_rows(self, command: MeasureRows) -> None:
        try:
            costs = self._row_costs(command)
        except TURN_ERRORS as error:
            self._emit(Notice(f"rows were not measured: {describe_error(error).message}"))
            costs = []
        self._emit(RowsMeasured(tuple(costs)))

    def _row_costs(self, command: MeasureRows) -> list[RowCost]:
        if self._session is None:
            raise NoModelLoaded("no model is loaded")
        model = self._session.model
        # Any ids will do for a cost; these are spread over the embedding.
        ids = [i * 97 % model.vocab_size for i in range(command.context_len)]
        return measure_rows(
            model.executable,
            ids,
            row_counts=command.row_counts,
            rounds=command.rounds,
            clock=self._clock,
        )

    def _cancel_all(self) -> None:
        if self._session:
            self._session.cancel_all()

    def _load(self, command: LoadModel) -> None:
        began = self._clock()
        try:
            checked = self._loader.check(
                command.path,
                name=command.name,
                speculation=command.speculation,
                progress=lambda stage, share: self._report_load(command.name, stage, share),
                freed_bytes=self._session.num_bytes if self._session else 0,
            )
            # A bad file has left the old model alone; now it goes: two at once may not fit.
            self._cancel_all()
            self.close()
            model = checked.place()
        except TURN_ERRORS as error:
            log.warning("loading %s failed", command.path, exc_info=error)
            kept = self._model_info() if self._session else None
            self._emit(ModelFailed(command.name, describe_error(error), kept))
            return
        self._session = self._open_session(model, command)
        self._load_ms = (self._clock() - began) * 1e3
        self._emit(ModelLoaded(self._model_info()))
        self._tell_refusals(model, command)
        if command.system_prompt:
            self._session.warm(command.system_prompt, command.think)

    def _report_load(self, name: str, stage: str, fraction: float) -> None:
        if self._is_stopping():
            raise LoadInterrupted(f"loading {name} was interrupted")
        self._emit(ModelLoading(name, stage, fraction))

    def _open_session(self, model: LoadedModel, command: LoadModel) -> ModelSession:
        speculation = SpeculationRuntime(
            self._registry,
            model.traits,
            model.draft_head,
            options=command.speculation,
            clock=self._clock,
        )
        budget_bytes = self._options.holder_budget_bytes
        if budget_bytes is None:
            budget_bytes = _share_of_free(model.executable)
        return ModelSession(
            model,
            speculation,
            context_len=self._context_len(model, command.context_len, budget_bytes),
            budget_bytes=budget_bytes,
            options=self._options,
            clock=self._clock,
            emit=self._emit,
        )

    def _context_len(self, model: LoadedModel, asked: int | None, budget_bytes: int) -> int:
        """Tokens a chat may hold: what was asked for, at most what the model was trained for."""
        if asked is not None:
            if asked > model.max_context_len:
                self._emit(
                    Notice(f"context narrowed from {asked} to {model.max_context_len} tokens")
                )
            return max(1, min(asked, model.max_context_len))
        per_token = model.executable.cache_bytes_per_token
        fitting = budget_bytes // per_token if per_token else model.max_context_len
        return max(1, min(model.max_context_len, fitting))

    def _model_info(self) -> ModelInfo:
        assert self._session is not None, "called after a load"
        model, executable = self._session.model, self._session.model.executable
        speculation = self._session.speculation
        return ModelInfo(
            name=model.name,
            architecture=model.architecture,
            quantization=model.quantization,
            num_parameters=model.num_parameters,
            context_len=self._session.context_len,
            vocab_size=model.vocab_size,
            has_chat_template=model.template is not None,
            has_thinking_switch=bool(model.template and model.template.has_thinking_switch),
            backend=executable.caps.name,
            device=executable.caps.device,
            weight_bytes=executable.weight_bytes,
            cache_bytes_per_token=executable.cache_bytes_per_token,
            load_ms=self._load_ms,
            algorithms=speculation.algorithms,
            algorithm=speculation.algorithm,
            declined=speculation.decline,
            refusal=model.traits.refusal,
            content_hash=model.content_hash,
        )

    def _tell_refusals(self, model: LoadedModel, command: LoadModel) -> None:
        """One line for what the placing cost, and what was asked of speculation and is not had."""
        assert self._session is not None, "called after a load"
        for text in model.executable.notices:
            self._emit(Notice(text))
        options, decline = command.speculation, self._session.speculation.decline
        if model.draft_head_refusal:
            self._emit(Notice(f"drafter refused: {model.draft_head_refusal}"))
        if not options.is_enabled:
            return
        if model.traits.refusal:
            self._emit(Notice(f"{model.name} decodes plainly: {model.traits.refusal}"))
        elif decline and options.algorithm != AUTO and not model.draft_head_refusal:
            self._emit(Notice(f"no drafting: {decline}"))


def _share_of_free(executable: Executable) -> int:
    """Bytes for chat caches: a share of what is free, but enough for one useful chat."""
    free, least = executable.free_bytes, LEAST_CONTEXT_LEN * executable.cache_bytes_per_token
    return max(int(free * FREE_MEMORY_SHARE), min(free, least))
