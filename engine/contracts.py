"""What the engine needs from a loaded model and from time, speculation aside.

`models.loader.Loader` makes a `LoadedModel`; the engine never imports `models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from backends.base import Executable
from engine.commands import Message
from engine.speculative.draft_head import DraftHead
from engine.speculative.options import SpeculationOptions
from engine.speculative.target import TargetTraits

LEAST_CONTEXT_LEN = 2048
"""A model is only worth loading with room for this many tokens (or its whole context)."""


class Clock(Protocol):
    """Monotonic time; tests pass a fake."""

    def __call__(self) -> float:
        """Seconds since any fixed point."""


class Tokenizer(Protocol):
    """Token ids <-> text, from the model file."""

    @property
    def eog_ids(self) -> frozenset[int]:
        """Every id that ends a generation (eos, eot, eom, ...); may be empty."""

    @property
    def bos_id(self) -> int | None:
        """The id a sequence starts with, where the model wants one."""

    @property
    def adds_bos(self) -> bool:
        """Whether raw prompts start with `bos_id`."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no BOS added; no text becomes a control token."""

    def piece(self, token_id: int, *, with_control: bool = False) -> bytes:
        """Raw bytes of one token; a character may be split over tokens. Control: b"" by default."""


class ChatTemplate(Protocol):
    """The model's own chat format, rendered in a sandbox."""

    @property
    def has_thinking_switch(self) -> bool:
        """Whether `enable_thinking` in `extra` changes anything."""

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids. Message contents never become control tokens.

        Raises: EngineError when the template refuses the messages.
        """


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to forward. Whoever holds it must `close()` it."""

    name: str
    architecture: str
    quantization: str
    num_parameters: int
    content_hash: str
    """Identifies file and layout, for checkpoints on disk (not a security hash)."""
    executable: Executable
    traits: TargetTraits
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None for a base model: messages are then joined raw with a notice."""
    max_context_len: int
    """What the model was trained for, in tokens."""
    vocab_size: int
    """V, the width of a logits row."""
    draft_head: DraftHead | None = None
    """Drafter weights that came with the model or by `SpeculationOptions.drafter_path`."""
    draft_head_refusal: str | None = None
    """Why a named drafter was refused, or None."""

    def close(self) -> None:
        """Release the weights, a drafter's too; using the model afterwards is a bug."""
        if self.draft_head is not None:
            self.draft_head.close()
        self.executable.close()


class CheckedModel(Protocol):
    """A model file that was read and can run here; its weights are not placed yet."""

    def place(self) -> LoadedModel:
        """Place the weights on the device. Raises: BackendError; nothing is held then."""


class ModelLoader(Protocol):
    """Opens model files in two steps, so that a bad one costs nobody the model in use."""

    def check(
        self,
        path: Path,
        *,
        name: str,
        speculation: SpeculationOptions,
        progress: Callable[[str, float], None],
        freed_bytes: int = 0,
    ) -> CheckedModel:
        """Read and check everything but the weights; `progress(stage, fraction)` meanwhile.

        `freed_bytes`: memory that will be given back before the weights are placed.
        Raises: models.errors.ModelError, BackendError, OSError.
        """
