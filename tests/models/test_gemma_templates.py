"""Gemma 3 and Gemma 4 conversations: systems, strict roles, thoughts that are dropped later.

The templates here are written for these tests; they give what the models' own ones give for text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from app.thinking import split_thinking
from engine.cache.holder import common_prefix_len
from engine.commands import Message
from models.chat_template import GgufChatTemplate
from models.gguf_file import GgufFile
from models.tokenizer import GgufTokenizer
from tests.models.make_gguf import made

GEMMA3 = """{{ bos_token }}
{%- set opening = namespace(text='') -%}
{%- if messages[0].role == 'system' -%}
    {%- set opening.text = messages[0].content ~ '\n\n' -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and assistant must take turns') }}
    {%- endif -%}
    {{ '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' }}
    {{- (opening.text if loop.first else '') ~ (message.content | trim) ~ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}
"""
GEMMA4 = """{{ bos_token }}
{%- macro without_thoughts(text) -%}
    {%- set said = namespace(text='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- set said.text = said.text ~ part.split('<|channel>')[0] -%}
    {%- endfor -%}
    {{- said.text | trim -}}
{%- endmacro -%}
{%- set has_system = messages[0].role == 'system' -%}
{%- if enable_thinking or has_system -%}
    {{ '<|turn>system\n' ~ ('<|think|>' if enable_thinking else '') }}
    {{- (messages[0].content | trim if has_system else '') ~ '<turn|>\n' }}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
    {{ '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' }}
    {%- if message.role == 'assistant' -%}
        {{ without_thoughts(message.content) }}
    {%- else -%}
        {{ message.content | trim }}
    {%- endif -%}
    {{ '<turn|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|turn>model\n' ~ ('' if enable_thinking else '<|channel>thought\n<channel|>') }}
{%- endif -%}
"""
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|think|>"]
CONTROL += ["<start_of_turn>", "<end_of_turn>"]
CHANNELS = ["<|channel>", "<channel|>"]
ANSWER = "<|channel>thought\nWhere? Paris.\n<channel|>It is Paris."


@pytest.fixture
def tokenizer(tmp_path: Path) -> GgufTokenizer:
    """A token per byte; turn marks are control tokens, channel marks are user-defined ones."""
    tokens = [*CONTROL, *CHANNELS, "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [4] * 2 + [1] + [6] * 256,
        "tokenizer.ggml.merges": ["▁ ▁"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    return GgufTokenizer.from_gguf(GgufFile.open(made(metadata).write(tmp_path / "toy.gguf")))


def shown(tokenizer: GgufTokenizer, ids: Sequence[int]) -> str:
    return b"".join(tokenizer.piece(i, with_control=True) for i in ids).decode()


def template_of(tokenizer: GgufTokenizer, source: str) -> GgufChatTemplate:
    return GgufChatTemplate(source, tokenizer, model_name="toy.gguf")


def rendered(tokenizer: GgufTokenizer, source: str, *turns: tuple[str, str], **extra: bool) -> str:
    messages = [Message(role, content) for role, content in turns]  # type: ignore[arg-type]
    return shown(tokenizer, template_of(tokenizer, source).encode(messages, extra=extra))


def test_gemma3_puts_the_system_prompt_into_the_first_user_turn(tokenizer: GgufTokenizer) -> None:
    assert rendered(tokenizer, GEMMA3, ("system", "Be brief."), ("user", " hi ")) == (
        "<bos><start_of_turn>user\nBe brief.\n\nhi<end_of_turn>\n<start_of_turn>model\n"
    )


def test_gemma3_goes_on_after_a_turn_cancelled_before_its_first_token(
    tokenizer: GgufTokenizer,
) -> None:
    """Its template refuses two user messages in a row; they become one."""
    turns = [("system", "S"), ("user", "A"), ("assistant", ""), ("user", "B")]
    assert rendered(tokenizer, GEMMA3, *turns) == (
        "<bos><start_of_turn>user\nS\n\nA\n\nB<end_of_turn>\n<start_of_turn>model\n"
    )


def test_gemma3_goes_on_after_a_turn_cancelled_in_its_middle(tokenizer: GgufTokenizer) -> None:
    turns = [("user", "A"), ("assistant", "half an ans"), ("user", "B")]
    assert rendered(tokenizer, GEMMA3, *turns) == (
        "<bos><start_of_turn>user\nA<end_of_turn>\n<start_of_turn>model\nhalf an ans<end_of_turn>\n"
        "<start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n"
    )


def test_gemma4_renders_as_published(tokenizer: GgufTokenizer) -> None:
    assert rendered(tokenizer, GEMMA4, ("system", "Be brief."), ("user", "hi")) == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nhi<turn|>\n"
        "<|turn>model\n<|channel>thought\n<channel|>"
    )
    thinking = rendered(tokenizer, GEMMA4, ("user", "hi"), enable_thinking=True)
    assert (
        thinking == "<bos><|turn>system\n<|think|><turn|>\n<|turn>user\nhi<turn|>\n<|turn>model\n"
    )


def test_gemma4_goes_on_after_a_cancelled_turn(tokenizer: GgufTokenizer) -> None:
    turns = [("user", "A"), ("assistant", "<|channel>thought\nhm"), ("user", "B")]
    assert "<|turn>model\n<turn|>\n<|turn>user\nB<turn|>" in rendered(tokenizer, GEMMA4, *turns)
    empty = [("user", "A"), ("assistant", ""), ("user", "B")]
    assert "user\nA<turn|>\n<|turn>user\nB<turn|>" in rendered(tokenizer, GEMMA4, *empty)


def test_gemma4_thoughts_are_shown_apart_and_left_out_of_the_next_prompt(
    tokenizer: GgufTokenizer,
) -> None:
    """The channel marks are text to the screen, and reach the template as it looks for them."""
    ids = tokenizer.encode(ANSWER)
    assert tokenizer.vocabulary.texts[ids[0]] == "<|channel>"
    text = b"".join(tokenizer.piece(token_id) for token_id in ids).decode()
    split = split_thinking(text)
    assert (split.thinking, split.answer) == ("Where? Paris.", "It is Paris.")
    turns = [("user", "Capital?"), ("assistant", text), ("user", "Sure?")]
    prompt = rendered(tokenizer, GEMMA4, *turns)
    assert "<|turn>model\nIt is Paris.<turn|>\n<|turn>user\nSure?<turn|>" in prompt
    assert "Where?" not in prompt


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_gemma4_dropping_a_thought_keeps_every_token_before_that_answer(
    tokenizer: GgufTokenizer, *, enable_thinking: bool
) -> None:
    """What the cache holds after turn one and turn two's prompt part where the answer begins."""
    template = template_of(tokenizer, GEMMA4)
    extra = {"enable_thinking": enable_thinking}
    asked = [Message("system", "S"), Message("user", "Capital?")]
    held = template.encode(asked, extra=extra) + tokenizer.encode(ANSWER)
    answered = [*asked, Message("assistant", ANSWER), Message("user", "Sure?")]
    following = template.encode(answered, extra=extra)
    kept = shown(tokenizer, held[: common_prefix_len(held, following)])
    assert kept.endswith("user\nCapital?<turn|>\n<|turn>model\n")


def test_gemma4_an_answer_without_a_thought_is_reused_whole_while_thinking_is_on(
    tokenizer: GgufTokenizer,
) -> None:
    template, extra = template_of(tokenizer, GEMMA4), {"enable_thinking": True}
    asked = [Message("user", "Capital?")]
    held = template.encode(asked, extra=extra) + tokenizer.encode("Paris.")
    answered = [*asked, Message("assistant", "Paris."), Message("user", "Sure?")]
    assert template.encode(answered, extra=extra)[: len(held)] == held
