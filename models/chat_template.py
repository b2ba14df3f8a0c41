"""Conversations to prompt ids, in the format the model file carries.

Message contents never become control tokens. The template is rendered with a mark set into every
place of a content that reads like a control token; the rendered text is cut at the control tokens
that are left, which are the template's own; then the marks are taken out and each part is encoded
as text. Where no content reads like a control token there is no mark, and the ids are those of the
whole rendered text, encoded in one go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2

from engine.commands import Message
from engine.contracts import ChatTemplate
from models.errors import TemplateError
from models.gguf_file import GgufFile
from models.template_sandbox import TemplateEnvironment, TemplateLimit
from models.tokenizer import GgufTokenizer

_SEPARATOR = "\n\n"
# What a template out of a file can raise: its own complaints, and those of the objects it handles.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
# Unicode noncharacters: meant for internal use, so a text hardly ever has one.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class GgufChatTemplate:
    """The template of one model, with its tokenizer."""

    def __init__(
        self,
        source: str,
        tokenizer: GgufTokenizer,
        *,
        model_name: str,
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._environment = TemplateEnvironment(clock=clock, now=now)
        self._compiled: jinja2.Template | None = None

    @classmethod
    def from_gguf(cls, file: GgufFile, tokenizer: GgufTokenizer) -> GgufChatTemplate | None:
        """The template of `tokenizer.chat_template`; None for a base model, which has none.

        A template that does not parse says so when it is first used: the model itself works.
        """
        source = file.text("tokenizer.chat_template", "")
        if not source.strip():
            return None
        return cls(source, tokenizer, model_name=file.path.name)

    @property
    def has_thinking_switch(self) -> bool:
        """Whether the template asks for `enable_thinking`."""
        return "enable_thinking" in self.source

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids, with one BOS where the model wants one.

        Empty assistant messages (cancelled before the first token) and empty system messages are
        left out. A template that refuses the messages is offered them in the stricter shapes of
        `_shapes`, in that order.
        Raises: TemplateError with the template's own reason when it refuses them all.
        """
        mark = self._unused_mark(messages)
        shield = self._tokenizer.control.shield
        shielded = [Message(m.role, shield(m.content, mark)) for m in messages if _has_content(m)]
        variables = {"add_generation_prompt": add_generation_prompt, **(extra or {})}
        rendered = self._render_first(shielded, variables)
        parts = [
            (part if is_token else part.replace(mark, ""), is_token)
            for part, is_token in self._tokenizer.split(rendered, with_control=True)
        ]
        return self._with_one_bos(self._tokenizer.encode_parts(parts))

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos_id = self._tokenizer.bos_id
        if bos_id is None:
            return ids
        num_bos = next((i for i, token_id in enumerate(ids) if token_id != bos_id), len(ids))
        wanted = min(num_bos, 1) if not self._tokenizer.adds_bos else 1
        return [bos_id] * wanted + ids[num_bos:]

    def _unused_mark(self, messages: Sequence[Message]) -> str:
        """A character that stands nowhere yet, so that taking it out restores the text."""
        used = {char for message in messages for char in message.content if char in _MARKS}
        used |= {char for char in self.source if char in _MARKS}
        free = [char for char in _MARKS if char not in used]
        if not free:
            raise TemplateError(
                "the messages contain every one of the 32 Unicode noncharacters U+FDD0 to U+FDEF",
                hint="remove one of them",
            )
        return free[0]

    def _render_first(self, messages: list[Message], variables: Mapping[str, Any]) -> str:
        reasons: list[str] = []
        for shape in _shapes(messages):
            try:
                rendered = self._render(shape, variables)
            except TemplateLimit as error:
                reasons.append(_reason(error))
                break
            except _TEMPLATE_FAILURES as error:
                reasons.append(_reason(error))
                continue
            if not _drops_system(shape, rendered):
                return rendered
            reasons.append("it leaves the system message out")
        raise TemplateError(
            f"the chat template of {self._model_name} failed: {reasons[0]}",
            hint="use --raw, or another file of this model",
        )

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        self._environment.reset(sum(len(message.content) for message in messages))
        if self._compiled is None:
            self._compiled = self._environment.from_string(self.source)
        vocabulary = self._tokenizer.vocabulary
        rendered = self._compiled.render(
            messages=[{"role": m.role, "content": m.content} for m in messages],
            tools=None,
            documents=None,
            bos_token=vocabulary.text_of(vocabulary.bos_id),
            eos_token=vocabulary.text_of(vocabulary.eos_id),
            unk_token=vocabulary.text_of(vocabulary.unknown_id),
            pad_token=vocabulary.text_of(vocabulary.padding_id),
            **variables,
        )
        self._environment.spend(0)
        return rendered


def _has_content(message: Message) -> bool:
    return message.role == "user" or bool(message.content.strip())


def _shapes(messages: list[Message]) -> Iterator[list[Message]]:
    """The conversation as it is, then as ever stricter templates want it.

    1. unchanged; 2. roles alternate: neighbours of one role are joined by an empty line, an
    opening assistant message gets an empty user message before it; 3. the same, with the system
    messages put in front of the first user message.
    """
    yield messages
    yield _alternating(messages)
    yield _alternating(_without_system(messages))


def _alternating(messages: list[Message]) -> list[Message]:
    result: list[Message] = []
    for message in messages:
        is_opening = message.role == "assistant" and all(m.role == "system" for m in result)
        if is_opening:
            result.append(Message("user", ""))
        if result and result[-1].role == message.role:
            joined = [m for m in (result[-1].content, message.content) if m]
            result[-1] = Message(message.role, _SEPARATOR.join(joined))
        else:
            result.append(message)
    return result


def _without_system(messages: list[Message]) -> list[Message]:
    system = [m.content for m in messages if m.role == "system"]
    others = [m for m in messages if m.role != "system"]
    if not system:
        return others
    if others and others[0].role == "user":
        system += [others[0].content] if others[0].content else []
        others = others[1:]
    return [Message("user", _SEPARATOR.join(system)), *others]


def _drops_system(messages: Sequence[Message], rendered: str) -> bool:
    """Whether a template silently ignored a system message: none of its lines shows."""
    return any(
        not any(line.strip() and line.strip() in rendered for line in message.content.splitlines())
        for message in messages
        if message.role == "system"
    )


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if isinstance(error, jinja2.TemplateSyntaxError) and line else ""
    return text[:300] + where


if TYPE_CHECKING:
    _: type[ChatTemplate] = GgufChatTemplate
