"""A scripted engine: it records commands and says exactly the events a test tells it to.

It refuses what the real one refuses: a second turn with the same id, a turn without a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from engine.commands import (
    CancelTurn,
    Command,
    LoadModel,
    Stop,
    SubmitTurn,
    UpdateSpeculation,
)
from engine.events import (
    EngineEvent,
    EngineReady,
    EngineStopped,
    ErrorInfo,
    FinishReason,
    ModelFailed,
    ModelInfo,
    ModelLoaded,
    ModelLoading,
    PrefillProgress,
    SpeculationChanged,
    TextDelta,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    TurnStats,
)


def make_model_info(name: str = "smollm2-135m", **changes: object) -> ModelInfo:
    info = ModelInfo(
        name=name,
        architecture="llama",
        quantization="Q4_1",
        num_parameters=134_515_008,
        context_len=8192,
        vocab_size=49_152,
        has_chat_template=True,
        has_thinking_switch=True,
        backend="native",
        device="cpu",
        weight_bytes=98_000_000,
        cache_bytes_per_token=23_040,
        load_ms=120.0,
        algorithms=("ngram",),
        algorithm="ngram",
    )
    return dataclasses.replace(info, **changes)


class FakeEngine:
    """Stands where the engine thread stands; `emit` is its callback."""

    def __init__(self, *, loads_by_itself: bool = True) -> None:
        self.commands: list[Command] = []
        self.turns: dict[str, SubmitTurn] = {}
        self.texts: dict[str, str] = {}
        self.stats: dict[str, TurnStats] = {}
        self.loads_by_itself = loads_by_itself
        self.has_model = False
        self.is_stopped = False
        self.emit: Callable[[EngineEvent], None] = lambda event: None

    def start(self, on_event: Callable[[EngineEvent], None]) -> FakeEngine:
        self.emit = on_event
        self.emit(EngineReady(backend="native"))
        return self

    def submit(self, command: Command) -> None:
        self.commands.append(command)
        match command:
            case LoadModel():
                self.emit(ModelLoading(command.name, "reading", 0.0))
                if self.loads_by_itself:
                    self.finish_load(command.name)
            case SubmitTurn():
                assert self.has_model, "a turn was submitted before a model was loaded"
                assert command.request_id not in self.turns, "request ids are unique"
                self.turns[command.request_id] = command
                self.texts[command.request_id] = ""
                self.stats[command.request_id] = TurnStats()
            case CancelTurn():
                if command.request_id in self.turns:
                    self.finish("cancelled", request_id=command.request_id)
            case UpdateSpeculation():
                algorithm = "ngram" if command.options.is_enabled else None
                self.emit(SpeculationChanged(command.options, algorithm, None))
            case Stop():
                self.is_stopped = True
                self.emit(EngineStopped())

    def join(self, timeout_s: float) -> bool:
        return self.is_stopped

    # -- what a test makes the engine say --------------------------------------

    def finish_load(self, name: str = "smollm2-135m", **changes: object) -> None:
        self.has_model = True
        self.emit(ModelLoaded(make_model_info(name, **changes)))

    def fail_load(self, message: str, hint: str = "", name: str = "smollm2-135m") -> None:
        self.emit(ModelFailed(name, ErrorInfo("bad_model", message, hint)))

    def request(self, request_id: str | None = None) -> SubmitTurn:
        return self.turns[request_id or list(self.turns)[-1]]

    def begin(
        self, *, prompt_tokens: int = 40, dropped: int = 0, request_id: str | None = None
    ) -> None:
        turn = self.request(request_id)
        self.emit(TurnStarted(turn.request_id, turn.chat_id, prompt_tokens, 0, dropped))

    def prefill(self, num_done: int, num_total: int, request_id: str | None = None) -> None:
        turn = self.request(request_id)
        self.emit(PrefillProgress(turn.request_id, turn.chat_id, num_done, num_total))

    def say(self, text: str, request_id: str | None = None, **counters: object) -> None:
        turn = self.request(request_id)
        key = turn.request_id
        self.texts[key] += text
        tokens = self.stats[key].completion_tokens + max(1, len(text.split()))
        fixed = {"completion_tokens": tokens, "decode_ms": tokens * 20.0, "prompt_tokens": 40}
        self.stats[key] = dataclasses.replace(self.stats[key], **{**fixed, **counters})
        self.emit(TextDelta(key, turn.chat_id, text, self.stats[key], 40 + tokens))

    def finish(self, reason: FinishReason = "stop", request_id: str | None = None) -> None:
        turn = self.turns.pop(self.request(request_id).request_id)
        key = turn.request_id
        stats = self.stats[key]
        used = 40 + stats.completion_tokens
        self.emit(TurnFinished(key, turn.chat_id, reason, self.texts[key], (), stats, used))

    def fail(self, message: str, hint: str = "", request_id: str | None = None) -> None:
        turn = self.turns.pop(self.request(request_id).request_id)
        error = ErrorInfo("failure", message, hint)
        self.emit(TurnFailed(turn.request_id, turn.chat_id, error, self.texts[turn.request_id]))

    def answer(self, text: str, request_id: str | None = None) -> None:
        """A whole turn: begin, one delta, finish."""
        self.begin(request_id=request_id)
        self.say(text, request_id)
        self.finish(request_id=request_id)

    def sent(self, kind: type) -> list:
        return [command for command in self.commands if isinstance(command, kind)]
