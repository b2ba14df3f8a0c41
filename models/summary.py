"""What a model file is and needs, from its header alone. Places no weight."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass

from backends.program import Program
from backends.weights import has_float32_cache
from models.gguf_file import GgufFile

# Source: llama.cpp `enum llama_ftype` (llama.h).
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    38: "MXFP4",
}
_HASHED_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What `foretell models show` prints."""

    architecture: str
    display_name: str
    """`general.name`, or the file name."""
    license: str | None
    """`general.license`."""
    num_parameters: int
    quantization: str
    context_len: int
    """Trained for, in tokens."""
    vocab_size: int
    has_chat_template: bool
    weight_types: tuple[tuple[str, int], ...]
    """Tensor type and number of tensors of it, most frequent first."""
    file_bytes: int
    weight_bytes: int
    cache_bytes_per_1k_tokens: int
    """For 1024 tokens in a row: growing slots, and windows as far as they fill."""
    preferred_window: int | None
    """Drafts per step the trunk states, which narrow the default; None states none."""
    unsupported: str | None
    """Why this program cannot run the model, or None."""


def num_parameters(file: GgufFile) -> int:
    """Numbers in all tensors."""
    return sum(math.prod(info.shape) for info in file.tensors.values())


def weight_bytes(file: GgufFile) -> int:
    """Bytes of all tensors, as they lie in the file."""
    return sum(info.num_bytes for info in file.tensors.values())


def weight_types(file: GgufFile) -> tuple[tuple[str, int], ...]:
    """Tensor types with their number of tensors, most frequent first."""
    return tuple(Counter(info.type.name for info in file.tensors.values()).most_common())


def quantization(file: GgufFile) -> str:
    """The name people know the file by (Q4_K_M), else the most frequent type of its matrices."""
    named = _FILE_TYPES.get(file.integer("general.file_type", -1))
    if named is not None:
        return named
    matrices = Counter(i.type.name for i in file.tensors.values() if len(i.shape) > 1)
    return matrices.most_common(1)[0][0] if matrices else "none"


def cache_bytes(program: Program, num_tokens: int) -> int:
    """Memory of one chat's keys and values at a length."""
    number_bytes = 4 if has_float32_cache(program) else 2
    return sum(
        2
        * number_bytes
        * slot.kv_heads
        * slot.head_dim
        * min(num_tokens, slot.window or num_tokens)
        for slot in program.slots
    )


def content_hash(file: GgufFile) -> str:
    """SHA-256 over size, header and 64 samples of the data: 5 ms where the whole takes seconds.

    Tells fine-tunes of one header apart, since training moves every weight; not a security hash.
    """
    digest = hashlib.sha256()
    for part in file.parts:
        start = part.header.data_start
        digest.update(part.data.size.to_bytes(8, "little"))
        digest.update(part.data[:start].data)
        for sample in range(_HASHED_SAMPLES):
            at = start + (part.data.size - start) * sample // _HASHED_SAMPLES
            digest.update(part.data[at : at + _SAMPLE_BYTES].data)
    return digest.hexdigest()
