"""The vocabulary of a model file: token texts, kinds, special ids and flags. Encodes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from models.errors import BadGguf
from models.gguf_file import GgufFile


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`. Source: llama.cpp `enum llama_token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """What the file says of its tokens. Ids are indices into `texts`."""

    model: str
    """`tokenizer.ggml.model`: gpt2, llama, gemma4; anything else is only good for ids."""
    pre: str
    """`tokenizer.ggml.pre`: the pre-tokenizer of a gpt2 vocabulary."""
    texts: Sequence[str]
    """`tokenizer.ggml.tokens`."""
    kinds: np.ndarray
    """`tokenizer.ggml.token_type` [V]; all NORMAL where absent."""
    scores: np.ndarray
    """`tokenizer.ggml.scores` [V]; all 0 where absent."""
    merges: Sequence[str]
    """`tokenizer.ggml.merges`, "left right", best first."""
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    padding_id: int | None
    eog_ids: frozenset[int]
    """Every id that ends a generation."""
    adds_bos: bool
    """Whether a sequence starts with `bos_id`."""
    adds_space_prefix: bool
    """Whether text after a special token (and at the start) gets a space in front."""

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Vocabulary:
        """Read and validate.

        Raises: BadGguf when arrays differ in length or an id is outside the vocabulary.
        """
        model = file.text("tokenizer.ggml.model", "none")
        texts = file.strings("tokenizer.ggml.tokens")
        pre = file.text("tokenizer.ggml.pre", "")
        bos_id = _special_id(file, "bos", texts, 1 if model == "llama" else None)
        eos_id = _special_id(file, "eos", texts, 2 if model == "llama" else None)
        return cls(
            model=model,
            pre=pre,
            texts=texts,
            kinds=_entries(file, "token_type", "iu", np.full(len(texts), int(TokenKind.NORMAL))),
            scores=_entries(file, "scores", "f", np.zeros(len(texts))),
            merges=file.strings("tokenizer.ggml.merges"),
            bos_id=bos_id,
            eos_id=eos_id,
            unknown_id=_special_id(file, "unknown", texts, 0 if model == "llama" else None),
            padding_id=_special_id(file, "padding", texts, None),
            eog_ids=_eog_ids(file, texts, eos_id),
            adds_bos=bos_id is not None and _adds_bos(file, model, pre),
            adds_space_prefix=file.flag("tokenizer.ggml.add_space_prefix", model == "llama"),
        )

    def __len__(self) -> int:
        """Number of tokens (V)."""
        return len(self.texts)

    def text_of(self, token_id: int | None) -> str:
        """Text of a special token; "" where there is none."""
        return "" if token_id is None else self.texts[token_id]

    def ids_of(self, *kinds: TokenKind) -> dict[str, int]:
        """Text to id of every token of these kinds. Of equal texts the last one counts.

        Source: llama.cpp fills `token_to_id` in order, later entries overwrite.
        """
        ids = np.flatnonzero(np.isin(self.kinds, [int(kind) for kind in kinds])).tolist()
        texts = self.texts
        return {texts[token_id]: token_id for token_id in ids}


def _entries(file: GgufFile, name: str, kinds: str, default: np.ndarray) -> np.ndarray:
    """One entry per token."""
    key = f"tokenizer.ggml.{name}"
    array = file.array(key, kinds)
    if array is None:
        return default
    if len(array) != len(default):
        raise BadGguf(
            f"{file.path.name}: {key} has {len(array)} entries for {len(default)} tokens",
            hint="get the file again",
        )
    return array


def _special_id(file: GgufFile, role: str, texts: Sequence[str], default: int | None) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token_id = file.optional_integer(key)
    if token_id is None:
        return default if default is not None and default < len(texts) else None
    # Converters write 0xFFFFFFFF for "none".
    if token_id == 0xFFFFFFFF:
        return None
    if not 0 <= token_id < len(texts):
        raise BadGguf(f"{file.path.name}: {key} is {token_id}, the vocabulary has {len(texts)}")
    return token_id


# Source: llama.cpp `llama_vocab::impl::load`: these families want a BOS unless the file says no.
_PRE_WITH_BOS = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
    | {"tekken", "chameleon"}
)


def _adds_bos(file: GgufFile, model: str, pre: str) -> bool:
    if model == "gemma4":
        return True  # llama.cpp forces it: early files carried a wrong "false"
    default = model == "llama" or pre in _PRE_WITH_BOS
    return file.flag("tokenizer.ggml.add_bos_token", default)


# Texts that end a generation whatever the file's ids say.
# Source: llama.cpp `llama_vocab::impl::load`, special_eog_ids and the fim_* searches before it.
_EOG_TEXTS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
    ]
)
_FIM_TEXTS = {
    "fim_pad": ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    "fim_rep": ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    "fim_sep": ["<|file_sep|>"],
}


def _eog_ids(file: GgufFile, texts: Sequence[str], eos_id: int | None) -> frozenset[int]:
    """The union of every way a file can name an end: one list never replaces another."""
    ids = {eos_id, *(_special_id(file, role, texts, None) for role in ("eot", "eom"))}
    by_text = {text: i for i, text in enumerate(texts) if text in _ALL_END_TEXTS}
    ids |= {by_text[text] for text in _EOG_TEXTS & by_text.keys()}
    for role, candidates in _FIM_TEXTS.items():
        fim_id = _special_id(file, role, texts, None)
        found = [by_text[text] for text in candidates if text in by_text]
        ids.add(fim_id if fim_id is not None else found[0] if found else None)
    if by_text.keys() & {"<|return|>"} and by_text.keys() & {"<|call|>"}:
        ids.discard(by_text.get("<|end|>"))
    if by_text.keys() >= {"<|calls|>", "<|flush|>"}:
        ids.discard(by_text.get("<|end|>"))
    if "<|tool_response>" in by_text:
        ids.discard(by_text.get("</s>"))
    return frozenset(token_id for token_id in ids if token_id is not None)


_ALL_END_TEXTS = _EOG_TEXTS.union(*_FIM_TEXTS.values())
_BYTE_TEXT = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_value(text: str) -> int | None:
    """The byte a BYTE token such as `<0x0A>` stands for; None for any other text."""
    match = _BYTE_TEXT.fullmatch(text)
    return int(match[1], 16) if match else None
