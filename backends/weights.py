"""What a program does with its weights: which are multiplied, which only looked up.

Shared by backends that place weights one by one; knows no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from backends.program import Program, Weight


def matrix_weights(program: Program) -> Iterator[Weight]:
    """Every weight that rows are multiplied with, once; tables that are only looked up are not."""
    seen: set[int] = set()
    for op in program.ops:
        for weight in _weights_in(op):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield weight


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
