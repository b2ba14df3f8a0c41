"""What a program does with its weights: which are multiplied, which only looked up.

Shared by backends that place weights one by one; knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

from backends.program import Embed, EmbedWithHidden, PerLayerInputs, Program, Weight

_MUCH_MORE = 1.5
"""Weights that take this many times their bytes in the file are worth a notice."""


def matrix_weights(program: Program) -> Iterator[Weight]:
    """Every weight that rows are multiplied with, once; tables that are only looked up are not."""
    seen: set[int] = set()
    for op in program.ops:
        for weight in _weights_in(op):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield weight


def has_float32_cache(program: Program) -> bool:
    """Whether keys and values are kept in float32 rather than half precision.

    Files of F32 matrices are fixtures and references: their cache must not round.
    """
    return all(weight.type == "F32" for weight in matrix_weights(program))


def tables(program: Program) -> list[Weight]:
    """Every table that tokens are looked up in, also where rows are multiplied with it."""
    ops = (op for op in program.ops if isinstance(op, (Embed, EmbedWithHidden, PerLayerInputs)))
    return [op.table for op in ops]


def growth_notices(
    grown: Iterable[Weight], in_file: int, placed: int, *, is_head_exact: bool = False
) -> list[str]:
    """That weights take much more memory than room in the file, because of the `grown` ones.

    `is_head_exact`: the head grew too, so that logits are not rounded.
    Units: `in_file` and `placed` are bytes of all weights.
    """
    if placed < _MUCH_MORE * in_file:
        return []
    types = ", ".join(sorted({weight.type for weight in grown}))
    reasons = [f"there are no kernels for {types}"] if types else []
    reasons += ["the head is kept exact"] if is_head_exact else []
    return [
        f"the weights take {placed / 1e9:.1f} GB, {in_file / 1e9:.1f} GB in the file: "
        f"{', '.join(reasons)}"
    ]


def _weights_in(node: object) -> Iterator[Weight]:
    if isinstance(node, Weight):
        yield node
    elif isinstance(node, tuple):
        for item in node:
            yield from _weights_in(item)
    elif is_dataclass(node):
        for part in fields(node):
            if part.name != "table":
                yield from _weights_in(getattr(node, part.name))
