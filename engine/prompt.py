"""From what a turn asks to prompt ids that fit the context. Pure; knows no cache and no thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from engine.cache.holder import common_prefix_len
from engine.commands import Message, SubmitTurn
from engine.contracts import LoadedModel
from engine.errors import ContextFull, EngineError, NoChatTemplate

_TAIL_TOKENS = 8
"""Enough for a tag that is no token of its own."""
MIN_ANSWER_SHARE = 4
"""Dropping oldest turns leaves a quarter of the context for the answer, unless it wants less."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model gets it."""

    token_ids: tuple[int, ...]
    dropped_messages: int = 0
    """Oldest messages left out because the context is full."""
    kept_messages: tuple[Message, ...] = ()
    """The messages that were rendered; empty for a raw prompt."""
    think: bool | None = None
    """How they were rendered, see `SubmitTurn.think`."""
    tail: str = ""
    """The prompt's end from its last tag on, see `TurnStarted.prompt_tail`."""


def build_prompt(
    turn: SubmitTurn, model: LoadedModel, context_len: int, held_ids: Sequence[int] = ()
) -> Prompt:
    """Render, encode and fit a turn's prompt.

    `held_ids` are the tokens in the chat's cache: an answer that goes on is taken from there.
    Units:  context_len in tokens; a prompt leaves room for one more, unless none is asked for.
    Raises: ContextFull with both numbers; EngineError for an empty prompt or an invalid id.
    """
    if turn.max_tokens is not None and turn.max_tokens < 0:
        raise EngineError(f"max-tokens {turn.max_tokens} is out of range", hint="use 0 or more")
    prompt = _encode(turn, model, context_len, held_ids)
    if not prompt.token_ids:
        raise EngineError("the prompt is empty", hint="write a message first")
    num_answer = 0 if turn.max_tokens == 0 else 1
    if len(prompt.token_ids) + num_answer > context_len:
        raise ContextFull(
            f"the prompt has {len(prompt.token_ids)} tokens, the context holds {context_len}"
            + " with the answer" * num_answer,
            hint="shorten the message or load the model with a larger context",
        )
    return replace(prompt, tail=_tail(prompt.token_ids, model))


def _encode(
    turn: SubmitTurn, model: LoadedModel, context_len: int, held_ids: Sequence[int]
) -> Prompt:
    prompt = turn.prompt
    if isinstance(prompt, str):
        return Prompt(tuple(encode_raw(prompt, model)))
    if prompt and isinstance(prompt[0], Message):
        messages = [message for message in prompt if isinstance(message, Message)]
        return _fit_messages(turn, messages, model, context_len, held_ids)
    token_ids = tuple(token_id for token_id in prompt if isinstance(token_id, int))
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise EngineError(
                f"token id {token_id} is not in the vocabulary",
                hint=f"use 0 to {model.vocab_size - 1}",
            )
    return Prompt(token_ids)


def encode_raw(text: str, model: LoadedModel) -> list[int]:
    """Ids of a text without a template, with the first token the model wants exactly once."""
    token_ids = model.tokenizer.encode(text)
    bos_id = model.tokenizer.bos_id
    if model.tokenizer.adds_bos and bos_id is not None and token_ids[:1] != [bos_id]:
        token_ids = [bos_id, *token_ids]
    return token_ids


def encode_messages(
    messages: Sequence[Message],
    model: LoadedModel,
    think: bool | None = None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Ids of a conversation in the model's own format.

    Raises: NoChatTemplate for a base model; EngineError when the template refuses.
    """
    if model.template is None:
        raise NoChatTemplate(f"{model.name} has no chat template")
    extra = {} if think is None else {"enable_thinking": think}
    return model.template.encode(messages, add_generation_prompt=add_generation_prompt, extra=extra)


def _fit_messages(
    turn: SubmitTurn,
    messages: Sequence[Message],
    model: LoadedModel,
    context_len: int,
    held_ids: Sequence[int],
) -> Prompt:
    """Drop oldest turns until the rest fits; the system prompt and the newest message stay."""

    def encode_without(num_turns: int) -> list[int]:
        kept = _without_oldest(messages, starts, num_turns)
        ids = _encode_conversation(kept, model, turn.think)
        return ids + encode_answer_start(turn.answer_start, ids, model, held_ids)

    starts = turn_starts(messages)
    token_ids = encode_without(0)
    limit = context_len - _answer_reserve(turn, model, context_len)
    num_dropped = 0
    if len(token_ids) > limit and turn.context_policy == "drop_oldest":
        num_dropped = _num_turns_to_drop(len(token_ids), limit, len(starts) - 1, encode_without)
        token_ids = encode_without(num_dropped)
    kept = tuple(_without_oldest(messages, starts, num_dropped))
    return Prompt(tuple(token_ids), len(messages) - len(kept), kept, turn.think)


def _encode_conversation(
    messages: Sequence[Message], model: LoadedModel, think: bool | None
) -> list[int]:
    if model.template is None:
        return encode_raw("\n\n".join(message.content for message in messages), model)
    return encode_messages(messages, model, think)


def encode_answer_start(
    text: str, prompt_ids: Sequence[int], model: LoadedModel, held_ids: Sequence[int] = ()
) -> list[int]:
    """Ids of an answer's beginning behind its prompt, those of the chat's cache where it has them.

    Another cut into tokens would read the same and be forwarded again, and the answer would go on
    differently from one that was never interrupted.
    """
    tail = _tail(prompt_ids, model)  # a thought the template opens is not opened twice
    rest = (text.removeprefix(tail) if tail else text).encode(errors="replace")
    ids: list[int] = []
    num = len(prompt_ids)
    if list(held_ids[:num]) == list(prompt_ids):
        for token_id in held_ids[num:]:
            piece = model.tokenizer.piece(token_id)
            # A control token's piece is empty: behind the beginning it belongs to the answer.
            if not rest or not rest.startswith(piece):
                break
            ids.append(token_id)
            rest = rest[len(piece) :]
    while rest and rest[0] & 0xC0 == 0x80:  # inside a character
        rest = model.tokenizer.piece(ids.pop()) + rest
    return ids + _encode_as_it_is(rest, model)


def _encode_as_it_is(text: bytes, model: LoadedModel) -> list[int]:
    """Ids whose pieces are exactly this text: without the space some vocabularies put in front."""
    plain = model.tokenizer.encode(text.decode())
    behind_a_line = model.tokenizer.encode("\n" + text.decode())
    for ids in (plain, *(behind_a_line[start:] for start in range(1, 4))):
        if b"".join(map(model.tokenizer.piece, ids)) == text:
            return ids
    return plain


def _tail(token_ids: Sequence[int], model: LoadedModel) -> str:
    pieces = (model.tokenizer.piece(i, with_control=True) for i in token_ids[-_TAIL_TOKENS:])
    text = b"".join(pieces).decode(errors="replace")
    return text[text.rfind("<") :] if "<" in text else ""


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """Where each turn begins: indices of the user messages, the first one after the system's."""
    starts = [i for i, message in enumerate(messages) if message.role == "user"]
    return starts or [len(messages) - 1]


def _without_oldest(
    messages: Sequence[Message], starts: Sequence[int], num_turns: int
) -> list[Message]:
    """The leading system messages and everything from turn `num_turns` on."""
    if num_turns == 0:
        return list(messages)
    return [*system_messages(messages), *messages[starts[num_turns] :]]


def _answer_reserve(turn: SubmitTurn, model: LoadedModel, context_len: int) -> int:
    num_written = len(model.tokenizer.encode(turn.answer_start)) if turn.answer_start else 0
    reserve = max(context_len // MIN_ANSWER_SHARE - num_written, 1)
    return reserve if turn.max_tokens is None else min(reserve, turn.max_tokens)


def _num_turns_to_drop(
    num_tokens: int, limit: int, most: int, encode_without: Callable[[int], list[int]]
) -> int:
    """Fewest turns to leave out; what is dropped grows in strides of a quarter.

    A stride keeps the cut, and so the cached prefix, in place for many turns: dropping just enough
    each time would forward the whole context again with every message.
    """
    stride = max(limit // 4, 1)
    to_drop = -(-(num_tokens - limit) // stride) * stride
    return bisect_left(
        range(most), True, key=lambda num: num_tokens - len(encode_without(num)) >= to_drop
    )


def history_len(prompt: Prompt, model: LoadedModel) -> int:
    """Leading prompt tokens that the next turn's prompt will surely begin with.

    A template may open the answer with text it leaves out of the history (an empty thinking
    block), so the generation prompt does not count. Always leaves a token to forward. A guess
    for keeping a copy, so a template that refuses to render without one ends no turn.
    """
    most = len(prompt.token_ids) - 1
    if not prompt.kept_messages or model.template is None:
        return most
    try:
        history = encode_messages(
            prompt.kept_messages, model, prompt.think, add_generation_prompt=False
        )
    except EngineError:
        return most
    return min(most, common_prefix_len(history, prompt.token_ids))


def system_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The leading system messages of a conversation."""
    return tuple(takewhile(lambda message: message.role == "system", messages))


def shared_prefix(
    system: Sequence[Message], model: LoadedModel, think: bool | None = None
) -> tuple[int, ...]:
    """Ids every conversation under these system messages begins with; empty without a template.

    Found by rendering two conversations that part at the first user character, so no template
    has to be understood. Raises: EngineError when the template refuses a system message.
    """
    if not system or model.template is None:
        return ()
    first, second = (
        encode_messages([*system, Message("user", text)], model, think) for text in ("A", "7")
    )
    return tuple(first[: common_prefix_len(first, second)])
