"""A jinja2 environment in which a template out of a model file can neither reach out, hang nor
fill the memory. Knows nothing of messages or tokens.

The sandbox of jinja2 keeps attributes and builtins away; the budget here bounds what is left:
steps (every loop turn and macro call), characters produced, and single results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import filters, nodes, sandbox
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro

_MAX_STEPS = 50_000
# Of this thread's own time: a busy machine or a closed lid is not the template's fault.
_MAX_SECONDS = 3.0
_MAX_CHARS = 64 << 20
_MAX_RESULT_LEN = 16 << 20
_MAX_PARTS = 1 << 18
_MAX_BITS = 4096
_MAX_INDENT = 16

# What chat templates use. Others can build huge strings from small numbers (center, indent,
# format, wordwrap) or have no place in a prompt.
_FILTERS = [
    "abs",
    "attr",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "groupby",
    "int",
    "items",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "trim",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
]
# Methods that build something huge from something small, and those that lead to types with more.
_REFUSED_METHODS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "format_map", "translate"}
    | {"encode", "to_bytes"}
)
_WIDE_PERCENT = re.compile(r"%[^A-Za-z%]*(\d{4,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*(\d{4,}|\{)")


class TemplateLimit(jinja2.TemplateRuntimeError):
    """The template takes more steps, time or memory than any chat needs."""


class _BudgetedGenerator(CodeGenerator):
    """Puts a budget call at the start of every loop turn and macro call."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, _spend_node(node.body))
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> Any:
        node.body.insert(0, _spend_node(node.body))
        return super().macro_body(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._visit_bounded(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._visit_bounded(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._visit_bounded(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _visit_bounded(self, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.bounded(")
        visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")


def _spend_node(body: Iterable[nodes.Node]) -> nodes.Node:
    num_chars = sum(len(d.data) for part in body for d in part.find_all(nodes.TemplateData))
    spend = nodes.EnvironmentAttribute("spend")
    return nodes.ExprStmt(nodes.Call(spend, [nodes.Const(num_chars)], [], None, None))


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (the class attribute jinja2 reads)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """Renders chat templates as `transformers` does, within a budget.

    Source: transformers `chat_template_utils._compile_jinja_template` for options, globals and the
    `tojson` that escapes nothing.
    """

    code_generator_class = _BudgetedGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, clock: Callable[[], float], now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            finalize=self._spend_output,
        )
        self._clock = clock
        self.reset(0)
        self.filters = {name: self._bounded_filter(filters.FILTERS[name]) for name in _FILTERS}
        self.filters |= {"tojson": _to_json, "join": self._join, "replace": self._replace}
        self.globals = {
            "range": sandbox.safe_range,
            "dict": lambda *args, **kwargs: self.bounded(dict(*args, **kwargs)),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
        }

    def reset(self, content_len: int) -> None:
        """Start a new budget, for a render of `content_len` characters of messages."""
        self._steps_left = _MAX_STEPS
        self._chars_left = _MAX_CHARS + 8 * content_len
        self._result_limit = _MAX_RESULT_LEN + 2 * content_len
        self._deadline = self._clock() + _MAX_SECONDS

    def spend(self, num_chars: int) -> None:
        """One step that may write `num_chars`. Raises: TemplateLimit."""
        self._steps_left -= 1
        self._chars_left -= num_chars
        if self._steps_left < 0 or self._chars_left < 0 or self._clock() > self._deadline:
            raise TemplateLimit("the template loops without end or writes without end")

    def _spend_output(self, value: object) -> object:
        text = self._text(value)
        self._check(len(text))
        self._chars_left -= len(text)
        return text

    def _check(self, result_len: int) -> None:
        if result_len > self._result_limit or self._chars_left < 0:
            raise TemplateLimit(f"the template builds a text of {result_len} characters")

    def bounded(self, value: Any) -> Any:
        """The value, unless writing it out would take a huge text.

        Ten lists that each hold the one before twice are 40 objects and a text of 1024 parts, so
        every container is weighed when it is made. Raises: TemplateLimit.
        """
        if isinstance(value, str):
            self._check(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self._check(_weight(value))
        return value

    def _bounded_filter(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            return self.bounded(function(*args, **kwargs))

        return bounded

    def _text(self, value: object) -> str:
        return value if isinstance(value, str) else str(self.bounded(value))

    def join_texts(self, items: Sequence[object]) -> str:
        """The `~` operator."""
        texts = [self._text(item) for item in items]
        self._check(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+ * ** %`, refused before they build something huge."""
        if isinstance(left, str) and operator == "%":
            if _WIDE_PERCENT.search(left):
                raise TemplateLimit("the template formats to a huge width")
            self._check(len(left) + left.count("%") * _weight(right))
        if isinstance(left, int) and isinstance(right, int):
            _check_number(operator, left, right)
        elif operator == "*":
            times = next((n for n in (left, right) if isinstance(n, int)), 1)
            self._check(max(_weight(left), _weight(right)) * times)
        result = super().call_binop(context, operator, left, right)
        return self.bounded(result) if operator in "+%" else result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Keeps `__class__` and friends away, and methods that pad to a width."""
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, refused where it pads to a huge width."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        text = str(value.__self__)
        if _WIDE_BRACES.search(text):
            raise TemplateLimit("the template formats to a huge width")

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check(len(text) + text.count("{") * _weight((args, kwargs)))
            return str(formatted(*args, **kwargs))

        return bounded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template; text methods are checked for what they would build."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join":
                # Filters like `map` give generators, which can be walked through only once.
                args = tuple(map(list, args))
            __self._check_method(owner, __obj.__name__, args)
        if isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            __self.bounded((args, kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def _check_method(self, owner: str, name: str, args: tuple[Any, ...]) -> None:
        if name == "replace" and len(args) >= 2:
            self._check(len(owner) + owner.count(args[0]) * len(args[1]))
        elif name == "join" and args:
            self._check(sum(len(item) + len(owner) for item in args[0]))

    def _join(self, value: Iterable[object], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            value = map(filters.make_attrgetter(self, attribute), value)
        texts = [self._text(item) for item in value]
        self._check(sum(map(len, texts)) + len(texts) * len(d))
        return d.join(texts)

    def _replace(self, text: object, old: str, new: str, count: int = -1) -> str:
        text = self._text(text)
        self._check_method(text, "replace", (old, new))
        return text.replace(old, new, count)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)`; never written out with what is in it, which may be itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _weight(value: object) -> int:
    """Parts and characters of a value written out. Raises: TemplateLimit above so many parts."""
    num_parts, num_chars, stack = 0, 0, [value]
    while stack:
        item = stack.pop()
        num_parts += 1
        if num_parts > _MAX_PARTS:
            raise TemplateLimit("the template builds something of too many parts")
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            stack += item
    return num_parts + num_chars


def _check_number(operator: str, left: int, right: int) -> None:
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * abs(right)}
    if bits.get(operator, 0) > _MAX_BITS:
        raise TemplateLimit("the template computes a huge number")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and indent > _MAX_INDENT:
        raise TemplateLimit(f"the template indents by {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
