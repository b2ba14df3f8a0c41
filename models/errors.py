"""What goes wrong with a model file. Each error is one line: what, which value, what to do.

ModelError (an EngineError, so the engine can show it without knowing this package)
    ModelMissing              no such file
    BadGguf                   damaged, truncated or contradictory file
    UnsupportedArchitecture   a sound file of a kind nobody wrote here
    UnsupportedQuantization   a tensor type this program cannot read
    SplitFile                 a split model whose parts are not all here or not of one model
    DoesNotFit                the machine has not enough memory
    TemplateError             the model's chat template refuses or is broken
    DrafterMismatch           a drafter bound to another target
"""

from __future__ import annotations

from typing import ClassVar

from engine.errors import EngineError
from engine.events import ErrorKind


class ModelError(EngineError):
    """A model file could not be used; `kind` decides the exit code."""

    kind: ClassVar[ErrorKind] = "bad_model"


class ModelMissing(ModelError):
    """There is no such file."""

    kind = "missing"


class BadGguf(ModelError):
    """The file is damaged, truncated or contradicts itself."""


class UnsupportedArchitecture(ModelError):
    """The file is sound, but its architecture is not implemented here."""


class UnsupportedQuantization(ModelError):
    """A tensor has a type whose layout is not known here; names tensor and type."""


class SplitFile(ModelError):
    """A split model whose parts are not all here, or not of one model; names them."""


class DoesNotFit(ModelError):
    """Weights and cache need more memory than there is; carries both numbers."""

    kind = "does_not_fit"


class TemplateError(ModelError):
    """The chat template cannot be parsed, or refuses the messages."""

    kind = "failure"


class DrafterMismatch(ModelError):
    """A drafter does not fit its target; names both and the first difference."""
