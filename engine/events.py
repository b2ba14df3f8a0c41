"""Facts the engine thread reports. Frozen, no arrays; delivered to one callback, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.bench_rows import RowCost
from engine.speculative.options import SpeculationOptions

FinishReason = Literal["stop", "length", "context", "repetition", "cancelled"]
"""stop: end token, stop id or stop string. length: max_tokens. context: the context is full."""

ErrorKind = Literal["failure", "missing", "bad_model", "does_not_fit"]
"""Exit codes 1, 3, 4, 5 of the command line."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as a person reads it: what happened, and what to do next."""

    kind: ErrorKind
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the screen shows of the loaded model."""

    name: str
    architecture: str
    quantization: str
    """Most frequent weight type, for example Q4_1."""
    num_parameters: int
    context_len: int
    """Most tokens a chat may hold."""
    vocab_size: int
    has_chat_template: bool
    has_thinking_switch: bool
    """Whether `SubmitTurn.think` changes anything."""
    backend: str
    device: str
    weight_bytes: int
    cache_bytes_per_token: int
    load_ms: float
    algorithms: tuple[str, ...] = ()
    """Speculation algorithms that can serve this model, `auto` resolved first."""
    algorithm: str | None = None
    """The one that serves under the options the model was loaded with, or None."""
    declined: str | None = None
    """Why nothing drafts under those options, or None."""
    refusal: str | None = None
    """Why this model does not speculate, or None."""
    content_hash: str = ""
    """Identifies the file's bytes, so that stored figures stay comparable."""


@dataclass(frozen=True, slots=True)
class TurnStats:
    """Counters of one turn. 0 <= draft_n_accepted <= draft_n; only emitted tokens count."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens that were already in the holder."""
    completion_tokens: int = 0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    """From the submit to the first emitted token."""
    decode_ms: float = 0.0
    """From the first emitted token to the last."""
    draft_n: int = 0
    draft_n_accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    verify_steps: int = 0
    plain_steps: int = 0
    parked_steps: int = 0
    phase_ms: dict[str, float] = field(default_factory=dict)
    """draft, verify, rollback, snapshot, catch_up, plain, sample (ledger S64)."""
    governor: str = ""
    """`plain=15.3ms/tok spec=29.1ms/tok wins=0 losses=2 parked=96` (S40); "" when off."""
    governor_state: Literal["off", "probing", "holding", "parked"] = "off"
    algorithm: str | None = None
    """The drafter that served the turn, or None."""

    @property
    def decode_tok_s(self) -> float:
        """Emitted tokens per second after the first one; 0 before there are two."""
        if self.completion_tokens < 2 or self.decode_ms <= 0.0:
            return 0.0
        return (self.completion_tokens - 1) / self.decode_ms * 1e3

    @property
    def prefill_tok_s(self) -> float:
        """Forwarded prompt tokens per second."""
        fresh = self.prompt_tokens - self.reused_tokens
        return fresh / self.prefill_ms * 1e3 if self.prefill_ms > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The thread runs and the backend is imported; models can be loaded."""

    backend: str


@dataclass(frozen=True, slots=True)
class ModelLoading:
    """Progress of a load."""

    name: str
    stage: str
    fraction: float
    """0 to 1."""


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """The model answers from now on."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """The load failed."""

    name: str
    error: ErrorInfo
    kept: ModelInfo | None = None
    """The model from before, which goes on answering; None when there is no model now."""


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """The prompt is tokenized and matched against the chat's holder."""

    request_id: str
    chat_id: str
    prompt_tokens: int
    reused_tokens: int
    dropped_messages: int = 0
    """Oldest messages left out because the context is full."""
    prompt_tail: str = ""
    """The prompt's end from its last tag on: a template may open a thought (`<think>`) there."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens forwarded so far, reused ones included."""

    request_id: str
    chat_id: str
    num_done: int
    num_total: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More answer text, coalesced to at most 20 per second; always whole characters."""

    request_id: str
    chat_id: str
    text: str
    stats: TurnStats
    context_used: int
    """Tokens in the chat's holder."""


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """The answer is whole. `text` is everything the deltas carried, joined."""

    request_id: str
    chat_id: str
    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    stats: TurnStats
    context_used: int


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """The turn could not go on; `text` is what had been emitted before."""

    request_id: str
    chat_id: str
    error: ErrorInfo
    text: str = ""


@dataclass(frozen=True, slots=True)
class SpeculationChanged:
    """An UpdateSpeculation took effect; `declined` says why nothing drafts, if so."""

    options: SpeculationOptions
    algorithm: str | None
    declined: str | None


@dataclass(frozen=True, slots=True)
class RowsMeasured:
    """What a forward costs at each row count, in answer to MeasureRows.

    Without costs when they could not be measured; a Notice says why.
    """

    costs: tuple[RowCost, ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """One line for the person: a drafter was dropped, a setting narrowed."""

    text: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """A bug ended the engine thread; nothing runs any more."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class EngineStopped:
    """The thread ended after a Stop."""


EngineEvent = (
    EngineReady
    | ModelLoading
    | ModelLoaded
    | ModelFailed
    | TurnStarted
    | PrefillProgress
    | TextDelta
    | TurnFinished
    | TurnFailed
    | SpeculationChanged
    | RowsMeasured
    | Notice
    | EngineFailed
    | EngineStopped
)
