"""Encodes segments by merging characters: SentencePiece-style BPE, by score or by merge list.

Written out here instead of through `tokenizers`: for a vocabulary of 262k that library needs every
possible merge spelled out (513k of them, 5 s to build, 1 s from a cache), while looking the
concatenation up takes no building at all.

Source: llama.cpp `llm_tokenizer_spm_session` (best score first, then leftmost) and
`llm_tokenizer_bpe_session` (best rank first, then leftmost).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable

from models.errors import BadGguf
from models.vocabulary import TokenKind, Vocabulary, byte_value

_SPACE = "▁"
# Words repeat: 4 in 5 come from here in prose. Emptied when full, 50k words are about 10 MB.
_MAX_CACHED_WORDS = 50_000
_MAX_CACHED_LEN = 64

MergeRank = Callable[[str, str], float | None]
"""How early two neighbours merge, smaller is earlier; None when they do not."""


class MergeEncoder:
    """Text without special tokens to ids, for the vocabulary kinds `llama` and `gemma4`."""

    def __init__(self, vocabulary: Vocabulary, file_name: str) -> None:
        self._ids = vocabulary.ids_of(TokenKind.NORMAL, TokenKind.USER_DEFINED)
        self._byte_ids = _byte_ids(vocabulary)
        if not self._byte_ids and vocabulary.unknown_id is None:
            raise BadGguf(f"{file_name}: the vocabulary has neither byte tokens nor an unknown one")
        self._unknown_id = vocabulary.unknown_id
        self._prefix = _SPACE if vocabulary.adds_space_prefix else ""
        self._is_gemma4 = vocabulary.model == "gemma4"
        self._rank = _rank_by_merges(vocabulary) if self._is_gemma4 else _rank_by_score(vocabulary)
        self._word_start = _word_start(self._ids)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of one segment, the space prefix included where the vocabulary wants one."""
        ids: list[int] = []
        for line in _lines(text) if self._is_gemma4 else (text,):
            # llama.cpp takes a run of newlines that is a token as it is.
            if self._is_gemma4 and line[0] == "\n" and line in self._ids:
                ids.append(self._ids[line])
                continue
            for word in self._word_start.split(self._prefix + line.replace(" ", _SPACE)):
                ids += self._encode_word(word)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        ids = self._cache.get(word)
        if ids is None:
            ids = [i for symbol in merge(word, self._rank) for i in self._ids_of_symbol(symbol)]
            if len(word) <= _MAX_CACHED_LEN:
                if len(self._cache) >= _MAX_CACHED_WORDS:
                    self._cache.clear()
                self._cache[word] = ids
        return ids

    def _ids_of_symbol(self, symbol: str) -> list[int]:
        token_id = self._ids.get(symbol)
        if token_id is not None:
            return [token_id]
        if self._byte_ids:
            return [self._byte_ids[byte] for byte in symbol.encode()]
        assert self._unknown_id is not None, "checked when the encoder was built"
        return [self._unknown_id]


def merge(text: str, rank: MergeRank) -> list[str]:
    """Merge neighbouring characters, best rank first, leftmost among equals, until none merge."""
    symbols: list[str] = list(text)
    before = list(range(-1, len(symbols) - 1))
    after = list(range(1, len(symbols) + 1))
    queue: list[tuple[float, int, str, str]] = []

    def push(left: int, right: int) -> None:
        if left >= 0 and right < len(symbols):
            order = rank(symbols[left], symbols[right])
            if order is not None:
                heapq.heappush(queue, (order, left, symbols[left], symbols[right]))

    for right in range(1, len(symbols)):
        push(right - 1, right)
    while queue:
        _, left, left_text, right_text = heapq.heappop(queue)
        right = after[left]
        if symbols[left] != left_text or right >= len(symbols) or symbols[right] != right_text:
            continue  # one of the two has merged elsewhere in the meantime
        symbols[left] += right_text
        symbols[right] = ""
        after[left] = after[right]
        if after[left] < len(symbols):
            before[after[left]] = left
        push(before[left], left)
        push(left, after[left])
    return [symbol for symbol in symbols if symbol]


def _rank_by_score(vocabulary: Vocabulary) -> MergeRank:
    ids = vocabulary.ids_of(TokenKind.NORMAL)
    ranks = dict(zip(ids, (-vocabulary.scores[list(ids.values())]).tolist(), strict=True))
    get = ranks.get
    return lambda left, right: get(left + right)


def _rank_by_merges(vocabulary: Vocabulary) -> MergeRank:
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(vocabulary.merges)))}
    get = ranks.get
    return lambda left, right: get(f"{left} {right}")


def _byte_ids(vocabulary: Vocabulary) -> dict[int, int]:
    """Byte value to id; all 256 or none."""
    ids = {
        byte: token_id
        for text, token_id in vocabulary.ids_of(TokenKind.BYTE).items()
        if (byte := byte_value(text)) is not None
    }
    return ids if len(ids) == 256 else {}


def _word_start(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches (nothing, at) the places before a space mark that no token reaches over.

    No merge crosses such a place, so the words between them are independent and can be cached.
    Gemma 3 has one token with a space mark inside (`>▁</`), so no cut follows a `>`.
    """
    joining = set(re.findall(f"([^{_SPACE}]){_SPACE}", "\0".join(texts))) - {"\0"}
    kept = "".join(re.escape(char) for char in sorted(joining | {_SPACE}))
    return re.compile(f"(?<=[^{kept}])(?={_SPACE})")


def _lines(text: str) -> list[str]:
    """Runs of newlines and runs of anything else, in order."""
    return re.findall(r"\n+|[^\n]+", text)
