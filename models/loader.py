"""Opens model files: checks, builds the program, places the weights. The engine is given one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import Backend, BackendError, Executable, OutOfDeviceMemory, check_room
from backends.program import Program
from engine.contracts import LEAST_CONTEXT_LEN, LoadedModel, ModelLoader
from engine.speculative.draft_head import DraftHead
from engine.speculative.options import SpeculationOptions
from engine.speculative.target import TargetTraits
from models.architectures import architecture_of
from models.chat_template import GgufChatTemplate
from models.config import ModelConfig
from models.drafters import DrafterFile, open_drafter
from models.errors import DoesNotFit, ModelError
from models.gguf_file import GgufFile
from models.summary import (
    ModelSummary,
    cache_bytes,
    content_hash,
    num_parameters,
    quantization,
    weight_bytes,
    weight_types,
)
from models.tokenizer import GgufTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class CheckedFile:
    """A model file that can run here: everything but its weights on the device."""

    name: str
    file: GgufFile
    config: ModelConfig
    tokenizer: GgufTokenizer
    template: GgufChatTemplate | None
    program: Program
    traits: TargetTraits
    drafter: DrafterFile | str | None
    """The named drafter, or why it is refused."""
    backend: Backend
    progress: Callable[[str, float], None]

    def place(self) -> LoadedModel:
        """Place the weights, a drafter's too. Raises: BackendError; nothing is held then."""
        self.progress("placing weights", 0.0)
        executable = self.backend.compile(
            self.program, progress=lambda fraction: self.progress("placing weights", fraction)
        )
        head, refusal = self._place_drafter(executable)
        return LoadedModel(
            name=self.name,
            architecture=self.config.architecture,
            quantization=quantization(self.file),
            num_parameters=num_parameters(self.file),
            content_hash=content_hash(self.file),
            executable=executable,
            traits=self.traits,
            tokenizer=self.tokenizer,
            template=self.template,
            max_context_len=self.config.context_len,
            vocab_size=self.config.vocab_size,
            draft_head=head,
            draft_head_refusal=refusal,
        )

    def _place_drafter(self, target: Executable) -> tuple[DraftHead | None, str | None]:
        """The head, or why there is none: the target then answers without it."""
        if not isinstance(self.drafter, DrafterFile):
            return None, self.drafter
        try:
            head = self.drafter.load(
                self.backend,
                target,
                lambda fraction: self.progress("placing the drafter", fraction),
            )
        except BackendError as error:
            return None, f"{error}" + (f" ({error.hint})" if error.hint else "")
        return head, None


class Loader:
    """Loads models on one backend, which is made when the first model is loaded."""

    def __init__(self, backend_factory: Callable[[], Backend]) -> None:
        self._backend_factory = backend_factory
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        """The backend, made on first use. Raises: BackendError."""
        if self._backend is None:
            self._backend = self._backend_factory()
        return self._backend

    def __call__(
        self,
        path: Path,
        *,
        name: str,
        speculation: SpeculationOptions,
        progress: Callable[[str, float], None],
    ) -> LoadedModel:
        """Check a file and place its weights. Raises: ModelError, BackendError, OSError."""
        return self.check(path, name=name, speculation=speculation, progress=progress).place()

    def check(
        self,
        path: Path,
        *,
        name: str,
        speculation: SpeculationOptions,
        progress: Callable[[str, float], None],
        freed_bytes: int = 0,
    ) -> CheckedFile:
        """Read and check everything but the weights; `progress(stage, fraction)` meanwhile.

        `freed_bytes`: memory that will be given back before the weights are placed.
        Raises: ModelError, BackendError, OSError.
        """
        progress("reading", 0.0)
        file = GgufFile.open(path)
        architecture = architecture_of(file)
        config = ModelConfig.from_gguf(file)
        tokenizer = GgufTokenizer.from_gguf(file)
        template = GgufChatTemplate.from_gguf(file, tokenizer)
        program = architecture.build(file, config)
        traits = architecture.traits(config)
        drafter: DrafterFile | str | None = None
        if speculation.drafter_path is not None:
            drafter = open_drafter(Path(speculation.drafter_path), file, program, traits.refusal)
        self._check_memory(file, program, config, freed_bytes)
        return CheckedFile(
            name=name,
            file=file,
            config=config,
            tokenizer=tokenizer,
            template=template,
            program=program,
            traits=traits,
            drafter=drafter,
            backend=self.backend,
            progress=progress,
        )

    def _check_memory(
        self, file: GgufFile, program: Program, config: ModelConfig, freed_bytes: int
    ) -> None:
        context_len = min(config.context_len, LEAST_CONTEXT_LEN)
        try:
            check_room(self.backend, program, cache_bytes(program, context_len), freed_bytes)
        except OutOfDeviceMemory as error:
            raise DoesNotFit(
                f"{file.path.name} does not fit with {context_len} tokens of context: {error}",
                hint=error.hint,
            ) from error


def inspect(path: Path) -> ModelSummary:
    """What a model file is and needs, without loading it.

    Raises: ModelError when the file cannot be read at all; a sound file that this program cannot
    run is described, with the reason in `unsupported`.
    """
    file = GgufFile.open(path)
    unsupported, slots_bytes, window = None, 0, None
    try:
        trunk, config = architecture_of(file), ModelConfig.from_gguf(file)
        slots_bytes = cache_bytes(trunk.build(file, config), 1024)
        window = trunk.traits(config).preferred_window
        GgufTokenizer.from_gguf(file)
    except ModelError as error:
        unsupported = str(error)
    architecture = file.architecture
    return ModelSummary(
        architecture=architecture,
        display_name=_shown(file, "general.name") or path.stem,
        license=_shown(file, "general.license"),
        num_parameters=num_parameters(file),
        quantization=quantization(file),
        context_len=file.integer(f"{architecture}.context_length", 0),
        vocab_size=len(file.strings("tokenizer.ggml.tokens")),
        has_chat_template=bool(file.text("tokenizer.chat_template", "").strip()),
        weight_types=weight_types(file),
        file_bytes=file.num_bytes,
        weight_bytes=weight_bytes(file),
        cache_bytes_per_1k_tokens=slots_bytes,
        preferred_window=window,
        unsupported=unsupported,
    )


def _shown(file: GgufFile, key: str) -> str | None:
    """A text that is only shown: whatever else stands there is no reason to refuse the file."""
    value = file.metadata.get(key)
    return value if isinstance(value, str) else None


if TYPE_CHECKING:
    _: type[ModelLoader] = Loader
