"""Encodes segments with a byte-level BPE vocabulary (`gpt2`), through the `tokenizers` library."""

from __future__ import annotations

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from models.errors import ModelError
from models.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from models.vocabulary import TokenKind, Vocabulary


class ByteLevelEncoder:
    """Text without special tokens to ids. Control tokens are not even in its vocabulary."""

    def __init__(self, vocabulary: Vocabulary, file_name: str) -> None:
        pre = PRE_TOKENIZERS.get(vocabulary.pre)
        if pre is None:
            named = repr(vocabulary.pre) if vocabulary.pre else "(none named)"
            raise ModelError(
                f"{file_name}: its pre-tokenizer {named} is not known here",
                hint="get a newer conversion of the model, or another model",
            )
        ids = vocabulary.ids_of(TokenKind.NORMAL, TokenKind.USER_DEFINED)
        merges: list[tuple[str, str]] = []
        for entry in vocabulary.merges:
            # A token holds no space of its own: the byte alphabet writes it U+0120.
            left, _, right = entry.partition(" ")
            if left in ids and right in ids and left + right in ids:
                merges.append((left, right))
        self._tokenizer = tokenizers.Tokenizer(
            models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignores_merges)
        )
        self._tokenizer.pre_tokenizer = word_cutter(pre)

    def encode(self, text: str) -> list[int]:
        """Ids of one segment."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def word_cutter(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Cuts words and writes them in the byte alphabet."""
    stages: list[pre_tokenizers.PreTokenizer] = []
    if pre.splits_digits:
        stages.append(pre_tokenizers.Digits(individual_digits=True))
    stages += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.uses_gpt2_pattern))
    return pre_tokenizers.Sequence(stages)


def byte_alphabet() -> dict[str, int]:
    """Character to byte of the printable alphabet byte-level vocabularies are written in.

    Source: GPT-2 `bytes_to_unicode`: printable Latin-1 is itself, the rest starts at U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}
