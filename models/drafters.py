"""Whether a drafter file fits a target: decided by `general.architecture`, never by a file name.

Source: llama.cpp `common_speculative_are_compatible` for the vocabulary rule (same kind, same BOS
and EOS, sizes at most 128 apart, equal texts from id 5 on).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backends.base import Backend, Executable, LoadProgress
from backends.program import Program
from engine.speculative.draft_head import DraftHead
from models.architectures import ARCHITECTURES, DRAFTER_ARCHITECTURES, drafter_architecture
from models.config import DEFAULT_ROPE_BASE
from models.errors import DrafterMismatch, ModelError
from models.gguf_file import GgufFile
from models.vocabulary import Vocabulary

_ASSISTANT = "gemma4-assistant"
_MAX_SIZE_DIFFERENCE = 128
_FIRST_COMPARED_ID = 5


@dataclass(frozen=True, slots=True, eq=False)
class DrafterFile:
    """A drafter that fits, written as a program over its target's caches."""

    program: Program
    make_head: Callable[[Executable], DraftHead]

    def load(self, backend: Backend, target: Executable, progress: LoadProgress) -> DraftHead:
        """Place the weights. Raises: UnsupportedWeight, OutOfDeviceMemory."""
        return self.make_head(backend.compile(self.program, progress=progress, reads=target))


def open_drafter(
    path: Path, target: GgufFile, program: Program, target_refusal: str | None
) -> DrafterFile | str:
    """The drafter at `path`, or why it does not serve the target that `program` was built of.

    A target that refuses speculation refuses before the file is opened (ledger S09, S55).
    """
    if target_refusal is not None:
        return target_refusal
    try:
        drafter = GgufFile.open(path)
        check_drafter(drafter, target)
        if module := drafter_architecture(drafter.architecture):
            return DrafterFile(module.build(drafter, program, target.path.name), module.make_head)
    except ModelError as error:
        return f"{error}" + (f" ({error.hint})" if error.hint else "")
    return f"{path.name} fits, but drafters of kind {drafter.architecture} are not run here yet"


def check_drafter(drafter: GgufFile, target: GgufFile) -> None:
    """Raises: DrafterMismatch naming both files and the first difference; BadGguf."""
    kind = drafter.architecture
    if kind in ARCHITECTURES:
        raise DrafterMismatch(f"{drafter.path.name} is a whole {kind} model, not a drafter")
    if kind not in DRAFTER_ARCHITECTURES:
        raise DrafterMismatch(
            f"{drafter.path.name}: {kind!r} is not a known kind of drafter",
            hint=f"known are {', '.join(sorted(DRAFTER_ARCHITECTURES))}",
        )
    _check_hidden_size(drafter, target)
    if kind == _ASSISTANT:
        _check_shares_cache(drafter, target)
    if drafter.strings("tokenizer.ggml.tokens"):
        _check_vocabulary(drafter, target)


def _check_hidden_size(drafter: GgufFile, target: GgufFile) -> None:
    key = f"{drafter.architecture}.{DRAFTER_ARCHITECTURES[drafter.architecture]}"
    wanted = drafter.integer(key)
    found = target.integer(f"{target.architecture}.embedding_length")
    if wanted != found:
        raise _mismatch(drafter, target, "a hidden size", wanted, found)


def _check_shares_cache(drafter: GgufFile, target: GgufFile) -> None:
    """An assistant head reads its target's keys and values, so their shapes must be the same."""
    if target.architecture != "gemma4":
        raise DrafterMismatch(
            f"{drafter.path.name} drafts for gemma4, {target.path.name} is {target.architecture}"
        )
    for key in ("attention.key_length", "attention.key_length_swa", "attention.sliding_window"):
        wanted = drafter.optional_integer(f"{drafter.architecture}.{key}")
        found = target.optional_integer(f"{target.architecture}.{key}")
        if wanted is not None and wanted != found:
            raise _mismatch(drafter, target, key, wanted, found)
    for key in ("rope.freq_base", "rope.freq_base_swa"):
        base = target.number(f"{target.architecture}.{key}", DEFAULT_ROPE_BASE)
        own = drafter.number(f"{drafter.architecture}.{key}", base)
        if own != base:
            raise _mismatch(drafter, target, key, own, base)


def _check_vocabulary(drafter: GgufFile, target: GgufFile) -> None:
    mine, theirs = Vocabulary.from_gguf(drafter), Vocabulary.from_gguf(target)
    for what, wanted, found in (
        ("a tokenizer of kind", mine.model, theirs.model),
        ("the BOS id", mine.bos_id, theirs.bos_id),
        ("the EOS id", mine.eos_id, theirs.eos_id),
        ("a BOS added", mine.adds_bos, theirs.adds_bos),
    ):
        if wanted != found:
            raise _mismatch(drafter, target, what, wanted, found)
    # An assistant's ids are looked up in the target's own table.
    most = 0 if drafter.architecture == _ASSISTANT else _MAX_SIZE_DIFFERENCE
    if abs(len(mine) - len(theirs)) > most:
        raise _mismatch(drafter, target, "a vocabulary of", len(mine), len(theirs))
    for token_id in range(_FIRST_COMPARED_ID, min(len(mine), len(theirs))):
        if mine.texts[token_id] != theirs.texts[token_id]:
            raise _mismatch(
                drafter,
                target,
                f"token {token_id} as",
                mine.texts[token_id],
                theirs.texts[token_id],
            )


def _mismatch(
    drafter: GgufFile, target: GgufFile, what: str, wanted: object, found: object
) -> DrafterMismatch:
    return DrafterMismatch(
        f"{drafter.path.name} wants {what} {wanted!r}, {target.path.name} has {found!r}",
        hint="use the drafter made for this model",
    )
