"""Writes small GGUF files byte by byte, sound ones and broken ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_INT, _FLOAT, _BOOL, _STRING, _ARRAY = 5, 6, 7, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> tuple[int, bytes]:
    """Type number and bytes of a metadata value."""
    match value:
        case bool():
            return _BOOL, struct.pack("<?", value)
        case int():
            return _INT, struct.pack("<i", value)
        case float():
            return _FLOAT, struct.pack("<f", value)
        case str() | bytes():
            return _STRING, text(value)
        case np.ndarray():
            items = [typed(item) for item in value.tolist()]
        case _:
            items = [typed(item) for item in value]
    kind = items[0][0] if items else _INT
    return _ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(item[1] for item in items)


@dataclass
class MadeTensor:
    name: str
    data: np.ndarray
    type_id: int = 0
    offset: int | None = None
    ne: Sequence[int] | None = None

    def info(self, offset: int) -> bytes:
        ne = self.ne if self.ne is not None else self.data.shape[::-1]
        offset = offset if self.offset is None else self.offset
        return (
            text(self.name)
            + struct.pack("<I", len(ne))
            + struct.pack(f"<{len(ne)}Q", *ne)
            + struct.pack("<IQ", self.type_id, offset)
        )


@dataclass
class MadeGguf:
    """The parts of a file; every one can be set to something no writer would write."""

    metadata: list[tuple[str, Any]] = field(default_factory=list)
    tensors: list[MadeTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None

    def to_bytes(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.metadata) if self.num_keys is None else self.num_keys
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_keys)
        for key, value in self.metadata:
            kind, raw = typed(value)
            head += text(key) + struct.pack("<I", kind) + raw
        body = b""
        for tensor in self.tensors:
            head += tensor.info(len(body))
            body += tensor.data.tobytes()
            body += b"\0" * (-len(body) % 32)
        return head + b"\0" * (-len(head) % 32) + body

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def made(metadata: Mapping[str, Any], **tensors: np.ndarray) -> MadeGguf:
    """A file of float32 tensors; `__` in a keyword stands for a dot in the name."""
    return MadeGguf(
        metadata=list(metadata.items()),
        tensors=[
            MadeTensor(name.replace("__", "."), np.asarray(data, "<f4"))
            for name, data in tensors.items()
        ],
    )
