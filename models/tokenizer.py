"""Token ids <-> text, from the vocabulary in the model file. Knows no chat format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.contracts import Tokenizer
from models.errors import ModelError
from models.gguf_file import GgufFile
from models.special_text import SpecialTexts
from models.tokenizer_bpe import ByteLevelEncoder, byte_alphabet
from models.tokenizer_spm import MergeEncoder
from models.vocabulary import TokenKind, Vocabulary, byte_value


class SegmentEncoder(Protocol):
    """Encodes text that holds no special token."""

    def encode(self, text: str) -> list[int]:
        """Ids of one segment."""


class GgufTokenizer:
    """The tokenizer a model file describes.

    Control tokens exist only in `encode(..., with_control=True)`: the encoders underneath do not
    have them, so no user text can become one.
    """

    def __init__(self, vocabulary: Vocabulary, encoder: SegmentEncoder) -> None:
        self.vocabulary = vocabulary
        self._encoder = encoder
        self._special_ids = vocabulary.ids_of(
            TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED
        )
        user_defined = vocabulary.ids_of(TokenKind.USER_DEFINED)
        self._user_defined = SpecialTexts(user_defined)
        self._special = SpecialTexts(self._special_ids)
        self.control = SpecialTexts(self._special_ids.keys() - user_defined.keys())
        """Texts that end turns, open roles and the like."""
        self._alphabet = byte_alphabet()
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, file: GgufFile) -> GgufTokenizer:
        """Build from the metadata.

        Raises: BadGguf; ModelError for a byte-level vocabulary whose word pattern is not known.
        """
        vocabulary = Vocabulary.from_gguf(file)
        return cls(vocabulary, _encoder_for(vocabulary, file.path.name))

    @property
    def eog_ids(self) -> frozenset[int]:
        """Every id that ends a generation."""
        return self.vocabulary.eog_ids

    @property
    def bos_id(self) -> int | None:
        """The id a sequence starts with, where the model wants one."""
        return self.vocabulary.bos_id

    @property
    def adds_bos(self) -> bool:
        """Whether raw prompts start with `bos_id`."""
        return self.vocabulary.adds_bos

    def encode(self, text: str, *, with_control: bool = False) -> list[int]:
        """Ids of a text, no BOS added. USER_DEFINED tokens are always matched, on the raw text."""
        return self.encode_parts(self.split(text, with_control=with_control))

    def split(self, text: str, *, with_control: bool) -> list[tuple[str, bool]]:
        """The text in parts (text, is a token as it stands)."""
        specials = self._special if with_control else self._user_defined
        return list(specials.split(_without_surrogates(text)))

    def encode_parts(self, parts: list[tuple[str, bool]]) -> list[int]:
        """Ids of the parts of `split`."""
        ids: list[int] = []
        for part, is_special in parts:
            if is_special:
                ids.append(self._special_ids[part])
            else:
                ids += self._encoder.encode(part)
        return ids

    def piece(self, token_id: int, *, with_control: bool = False) -> bytes:
        """Raw bytes of one token. CONTROL and UNKNOWN tokens are b"" unless `with_control`."""
        if not 0 <= token_id < len(self.vocabulary):
            return b""  # a model without a vocabulary still emits ids
        if with_control:
            return self._piece(token_id, with_control=True)
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id, with_control=False)
        return piece

    def _piece(self, token_id: int, *, with_control: bool) -> bytes:
        text, kind = self.vocabulary.texts[token_id], self.vocabulary.kinds[token_id]
        byte = byte_value(text)
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN) and not with_control:
            return b""
        if kind == TokenKind.UNUSED:
            return b""
        if kind == TokenKind.BYTE and byte is not None:
            return bytes([byte])
        if kind == TokenKind.NORMAL and self.vocabulary.model == "gpt2":
            return b"".join(
                bytes([self._alphabet[char]]) if char in self._alphabet else char.encode()
                for char in text
            )
        if kind == TokenKind.NORMAL and self.vocabulary.model in ("llama", "gemma4"):
            return text.replace("▁", " ").encode()
        return text.encode()


class _IdsOnlyEncoder:
    """Stands in for a vocabulary kind nobody wrote an encoder for: the model still takes ids."""

    def __init__(self, vocabulary: Vocabulary, file_name: str) -> None:
        self._message = f"{file_name}: its tokenizer {vocabulary.model!r} is not supported"

    def encode(self, text: str) -> list[int]:
        raise ModelError(self._message, hint="only token ids work with this model (--tokens)")


def _encoder_for(vocabulary: Vocabulary, file_name: str) -> SegmentEncoder:
    match vocabulary.model:
        case "gpt2":
            return ByteLevelEncoder(vocabulary, file_name)
        case "llama" | "gemma4":
            return MergeEncoder(vocabulary, file_name)
        case _:
            return _IdsOnlyEncoder(vocabulary, file_name)


def _without_surrogates(text: str) -> str:
    """Lone surrogates (undecodable bytes of a terminal or a file name) become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


if TYPE_CHECKING:
    _: type[Tokenizer] = GgufTokenizer
