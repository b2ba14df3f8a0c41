"""How byte-level vocabularies cut a text into words, by the name the file gives (`pre`).

Source: llama.cpp `llm_tokenizer_bpe` (llama-vocab.cpp); the patterns are those of the models' own
tokenizers, which its rewritten ones are equivalent to.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _SPACES
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_CASED_2 = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_GPT4O = f"{_CASED}{_CONTRACTION}?|{_CASED_2}{_CONTRACTION}?|" + r"\p{N}{1,3}|" + _SYMBOLS + _SPACES
_TEKKEN = f"{_CASED}|{_CASED_2}|" + r"\p{N}|" + _SYMBOLS + _SPACES
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_SEED_CODER = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut words before the merges."""

    patterns: tuple[str, ...] = ()
    """Oniguruma patterns, applied one after the other; each match is a word of its own."""
    splits_digits: bool = False
    """Every digit is a word."""
    uses_gpt2_pattern: bool = False
    """GPT-2's own pattern comes last."""
    ignores_merges: bool = False
    """A word that is a token is taken whole, whatever the merges say."""


_GPT2 = PreTokenizer(uses_gpt2_pattern=True)
_DIGITS = PreTokenizer(splits_digits=True, uses_gpt2_pattern=True)

_BY_NAMES: tuple[tuple[str, PreTokenizer], ...] = (
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _DIGITS),
    ("gpt-2 phi-2 mellum a.x-4.0 modern-bert jina-es jina-de exaone4", _GPT2),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), ignores_merges=True),
    ),
    (
        "qwen2 deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignores_merges=True)),
    ("chatglm-bpe dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3)),
    ("tekken", PreTokenizer((_TEKKEN,), ignores_merges=True)),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre for names, pre in _BY_NAMES for name in names.split()
}
