"""Which file writes which architecture: the only list, of trunks and of drafters.

Each is imported when it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from models.errors import UnsupportedArchitecture

if TYPE_CHECKING:  # the catalog asks for the names alone, and listing it shall not import numpy
    from backends.base import Executable
    from backends.program import Program
    from engine.speculative.draft_head import DraftHead
    from engine.speculative.target import TargetTraits
    from models.config import ModelConfig
    from models.gguf_file import GgufFile

ARCHITECTURES: dict[str, str] = {
    "llama": "models.llama",
    "qwen3": "models.qwen3",
    "qwen3moe": "models.qwen3moe",
    "gemma3": "models.gemma3",
    "gemma4": "models.gemma4",
}
"""`general.architecture` to module."""
DRAFTER_ARCHITECTURES: dict[str, str] = {
    "gemma4-assistant": "embedding_length_out",
    "dflash": "embedding_length",
    "eagle3": "target_hidden_size",
}
"""`general.architecture` of a drafter to the key that holds its target's hidden size."""


class RunDrafter(NamedTuple):
    """A kind of drafter that is run."""

    module: str
    kind: str
    """The catalog's word for it."""
    trunk: str
    """The architecture it serves."""


RUN_DRAFTERS: dict[str, RunDrafter] = {
    "gemma4-assistant": RunDrafter("models.gemma4_assistant", "mtp", "gemma4"),
}
"""`general.architecture` of the drafters that are run."""


class Architecture(Protocol):
    """What a trunk's module offers."""

    def build(self, file: GgufFile, config: ModelConfig) -> Program:
        """The forward pass. Raises: BadGguf, UnsupportedArchitecture."""

    def traits(self, config: ModelConfig) -> TargetTraits:
        """What the trunk says of itself towards speculation."""


class DrafterArchitecture(Protocol):
    """What a drafter's module offers."""

    def build(self, file: GgufFile, target: Program, target_name: str) -> Program:
        """The pass over the target's caches. Raises: DrafterMismatch, BadGguf."""

    def make_head(self, executable: Executable) -> DraftHead:
        """The head over the placed pass."""


def drafter_architecture(name: str) -> DrafterArchitecture | None:
    """The module that writes this drafter; None where it is not run."""
    drafter = RUN_DRAFTERS.get(name)
    return cast(DrafterArchitecture, import_module(drafter.module)) if drafter else None


def architecture_of(file: GgufFile) -> Architecture:
    """The module that writes this file's architecture.

    Raises: UnsupportedArchitecture listing the known ones.
    """
    name = file.architecture
    if name in DRAFTER_ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{file.path.name} is a drafter ({name}), not a model of its own",
            hint="load the model it drafts for, and name this file with --draft-model",
        )
    module = ARCHITECTURES.get(name)
    if module is None:
        raise UnsupportedArchitecture(
            f"{file.path.name}: architecture {name!r} is not supported",
            hint=f"supported are {', '.join(sorted(ARCHITECTURES))}",
        )
    return cast(Architecture, import_module(module))
