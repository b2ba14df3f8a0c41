"""Reads the header of a GGUF file out of its bytes. Every size is checked before it is used."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass

import numpy as np

from models.errors import BadGguf
from models.ggml_types import GGML_TYPES, GgmlType

Value = bool | int | float | str | list[str] | np.ndarray

_SUPPORTED_VERSIONS = (2, 3)
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"} | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Far above what exists (262k tokens, 600k merges, 30 MB of tokenizer json), far below what hurts.
_MAX_ARRAY_LEN = 1 << 24
_MAX_STRING_BYTES = 1 << 26
_MAX_NAME_LEN = 256
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it is."""

    name: str
    type: GgmlType
    """A type this program does not know has blocks of 0 bytes."""
    shape: tuple[int, ...]
    """Row-major: the reverse of the file's order."""
    offset: int
    """Bytes from the start of the tensor data."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the tensor data."""

    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    data_start: int
    """Bytes from the start of the file."""


def read_header(buffer: mmap.mmap | bytes, file_name: str) -> Header:
    """Parse magic, metadata and tensor table.

    Raises: BadGguf; no memory is taken on a size's word alone.
    """
    reader = _Reader(buffer, file_name)
    num_tensors, num_keys = reader.read_preamble()
    metadata = _read_metadata(reader, num_keys)
    tensors = _read_tensor_table(reader, num_tensors)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not _is_alignment(alignment):
        raise reader.bad(f"general.alignment is {alignment!r}, not a power of two")
    assert isinstance(alignment, int)
    data_start = -(-reader.pos // alignment) * alignment
    for info in tensors.values():
        if info.offset % alignment:
            raise reader.bad(
                f"tensor {info.name} is at byte {info.offset}, not a multiple of {alignment}"
            )
    return Header(metadata, tensors, data_start)


def _is_alignment(value: Value) -> bool:
    return isinstance(value, int) and 0 < value <= _MAX_ALIGNMENT and value & (value - 1) == 0


class _Reader:
    """A position in the header bytes that never moves past their end."""

    def __init__(self, buffer: mmap.mmap | bytes, file_name: str) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.pos = 0
        self.file_name = file_name
        self.part = "header"

    def bad(self, message: str) -> BadGguf:
        return BadGguf(f"{self.file_name}: {message}", hint="get the file again")

    def need(self, num_bytes: int) -> None:
        if num_bytes > self.size - self.pos:
            raise BadGguf(
                f"{self.file_name} is truncated in its {self.part}: {num_bytes} bytes wanted at "
                f"byte {self.pos}, {self.size - self.pos} present",
                hint="the download is incomplete or the file damaged; get it again",
            )

    def u32(self) -> int:
        self.need(4)
        (value,) = struct.unpack_from("<I", self.buffer, self.pos)
        self.pos += 4
        return int(value)

    def u64(self) -> int:
        self.need(8)
        (value,) = struct.unpack_from("<Q", self.buffer, self.pos)
        self.pos += 8
        return int(value)

    def read_preamble(self) -> tuple[int, int]:
        """Magic, version and the two counts: (tensors, metadata keys)."""
        magic = bytes(self.buffer[:4])
        if magic != b"GGUF":
            raise BadGguf(
                f"{self.file_name} is not a GGUF file (it starts with {magic!r})",
                hint="a download may have saved an error page; get the .gguf file again",
            )
        self.pos = 4
        version = self.u32()
        if version & 0xFFFF == 0:
            raise self.bad("big-endian GGUF files are not supported")
        if version not in _SUPPORTED_VERSIONS:
            raise self.bad(f"GGUF version {version} is not supported (2 and 3 are)")
        # Absurd counts need no check of their own: the first entry that is not there ends the read.
        return self.u64(), self.u64()

    def string(self) -> str:
        num_bytes = self.u64()
        if num_bytes > _MAX_STRING_BYTES:
            raise self.bad(f"a string of {num_bytes} bytes in its {self.part}")
        self.need(num_bytes)
        raw = self.buffer[self.pos : self.pos + num_bytes]
        self.pos += num_bytes
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad(f"a string in its {self.part} is not UTF-8: {raw[:40]!r}") from None

    def name(self) -> str:
        """A key or tensor name: printable and short, since it ends up in messages."""
        name = self.string()
        if not 0 < len(name) <= _MAX_NAME_LEN or not name.isprintable():
            raise self.bad(f"{name[:40]!r} is not a name, in its {self.part}")
        return name

    def scalar(self, type_id: int) -> Value:
        if type_id == _STRING:
            return self.string()
        return self.numbers(type_id, 1)[0].item()  # type: ignore[no-any-return]

    def numbers(self, type_id: int, count: int) -> np.ndarray:
        dtype = np.dtype("u1") if type_id == _BOOL else np.dtype(_SCALARS.get(type_id, "V0"))
        if dtype.itemsize == 0:
            raise self.bad(f"value type {type_id} is unknown in its {self.part}")
        self.need(count * dtype.itemsize)
        values = np.frombuffer(self.buffer, dtype, count, self.pos).copy()
        self.pos += count * dtype.itemsize
        return values != 0 if type_id == _BOOL else values

    def array(self) -> list[str] | np.ndarray:
        type_id, count = self.u32(), self.u64()
        if count > _MAX_ARRAY_LEN:
            raise self.bad(f"an array of {count} entries in its {self.part}")
        if type_id != _STRING:
            return self.numbers(type_id, count)
        self.need(count * 8)
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """Hot: 262k token texts in 0.1 s; the checks of `string`, without the calls."""
        buffer, size, pos = self.buffer, self.size, self.pos
        unpack = struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(count):
                (num_bytes,) = unpack(buffer, pos)
                pos += 8
                end = pos + num_bytes
                if end > size:
                    break
                texts.append(buffer[pos:end].decode())
                pos = end
        except (struct.error, UnicodeDecodeError):
            pass  # the entry is named below
        self.pos = pos
        if len(texts) < count:
            raise self.bad(
                f"truncated or damaged in its {self.part}, at entry {len(texts)} of {count}"
            )
        return texts


def _read_metadata(reader: _Reader, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        reader.part = "metadata"
        key = reader.name()
        if key in metadata:
            raise reader.bad(f"metadata key {key} appears twice")
        reader.part = f"metadata ({key})"
        type_id = reader.u32()
        metadata[key] = reader.array() if type_id == _ARRAY else reader.scalar(type_id)
    return metadata


def _read_tensor_table(reader: _Reader, num_tensors: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        reader.part = "tensor table"
        info = _read_tensor_info(reader)
        if info.name in tensors:
            raise reader.bad(f"tensor {info.name} appears twice")
        tensors[info.name] = info
    return tensors


def _read_tensor_info(reader: _Reader) -> TensorInfo:
    name = reader.name()
    num_dims = reader.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise reader.bad(f"tensor {name} has {num_dims} dimensions (1 to {_MAX_DIMS} expected)")
    shape = tuple(reader.u64() for _ in range(num_dims))[::-1]
    type_id, offset = reader.u32(), reader.u64()
    # New types come every few months: the file can still be described, only not computed.
    kind = GGML_TYPES.get(type_id, GgmlType(f"type {type_id}", 1, 0))
    if 0 in shape or shape[-1] % kind.block_len:
        raise reader.bad(
            f"tensor {name} of shape {shape} does not divide into {kind.name} blocks "
            f"of {kind.block_len}"
        )
    num_bytes = math.prod(shape) // kind.block_len * kind.block_bytes
    return TensorInfo(name, kind, shape, offset, num_bytes)
