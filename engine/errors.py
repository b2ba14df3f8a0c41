"""What the engine raises. Each error is shown to a person as: message, then hint."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from engine.events import ErrorKind


class EngineError(Exception):
    """The engine could not do what was asked; `hint` says what a person can do."""

    kind: ClassVar[ErrorKind] = "failure"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ContextFull(EngineError):
    """A prompt does not fit the context; the message carries both numbers in tokens."""

    kind = "does_not_fit"


class NoModelLoaded(EngineError):
    """A turn was asked for before a model was loaded."""


class NoChatTemplate(EngineError):
    """A base model has no format for a conversation."""


class NotANumber(EngineError):
    """A row of logits is not finite; the cache behind it must not be used again."""


class LoadInterrupted(EngineError):
    """The engine was told to stop while a model was loading."""


class CheckpointUnsound(EngineError):
    """A stored prefix is damaged or belongs to another model; it has been removed."""


class HolderBroken(EngineError):
    """A backend left a cache that no longer matches its tokens; the holder must be dropped."""
