"""Orders to the engine thread. Frozen, no arrays; applied between two steps, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.sampling_params import SamplingParams
from engine.speculative.options import SpeculationOptions

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation as the chat template sees it."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Load a model file, replacing the loaded one. Answered by ModelLoaded or ModelFailed."""

    path: Path
    name: str
    """What the file is called towards people (catalog name or file stem)."""
    context_len: int | None = None
    """Most tokens a chat may hold; None takes the model's own, bounded by memory."""
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    system_prompt: str = ""
    """Forwarded while nothing else is asked, so that a new chat starts behind it (S49)."""
    think: bool | None = None
    """How new chats will be asked, see `SubmitTurn.think`."""


@dataclass(frozen=True, slots=True)
class SubmitTurn:
    """Answer a prompt. Answered by TurnStarted ... TurnFinished or TurnFailed, once each."""

    request_id: str
    chat_id: str
    """Key of the holder that is continued and kept; equal ids share cached tokens."""
    prompt: tuple[Message, ...] | str | tuple[int, ...]
    """Messages go through the chat template, a string is encoded raw, ids are used as they are."""
    sampling: SamplingParams
    max_tokens: int | None = None
    """Most tokens to emit; None goes on to the end of the context."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the text is cut before them."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer, beside the model's own end-of-generation ids."""
    attempt: int = 0
    """Regenerating the same turn is a new attempt: another random stream, same seed."""
    context_policy: Literal["drop_oldest", "fail"] = "drop_oldest"
    """What to do with messages that do not fit: drop oldest turns, or TurnFailed."""
    stop_on_repetition: bool = False
    """End an answer that repeats the same 1 to 8 tokens more than 64 times in a row."""
    think: bool | None = None
    """The template's `enable_thinking`; None leaves it to the template."""
    answer_start: str = ""
    """Text the answer begins with: it goes on from there. For a prompt of messages."""


@dataclass(frozen=True, slots=True)
class CancelTurn:
    """Stop a turn at the next step, in prefill too; what was emitted is kept."""

    request_id: str


@dataclass(frozen=True, slots=True)
class UpdateSpeculation:
    """Switch speculation between two steps, without a reload (ledger S42)."""

    options: SpeculationOptions


@dataclass(frozen=True, slots=True)
class ForgetChat:
    """Release a chat's holder (the chat was deleted)."""

    chat_id: str


@dataclass(frozen=True, slots=True)
class MeasureRows:
    """Time forwards of each row count on the loaded model. Answered by RowsMeasured."""

    row_counts: tuple[int, ...]
    rounds: int
    context_len: int = 256
    """Tokens in the cache while it is measured."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine thread; running turns are cancelled first."""


Command = LoadModel | SubmitTurn | CancelTurn | UpdateSpeculation | ForgetChat | MeasureRows | Stop
