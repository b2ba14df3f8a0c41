"""The files a model lies in: one, or the numbered parts of a split model. Maps and checks them.

Source: llama.cpp `gguf-split`: names end in `-00001-of-00003.gguf` and count from 1, `split.no`
counts from 0, `split.count` is the number of parts (0 in merged files) and `split.tensors.count`
the number of tensors in all of them. Only the first part has the model's own metadata.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.errors import BadGguf, ModelError, ModelMissing, SplitFile
from models.gguf_header import Header, read_header

_PART_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True, eq=False)
class FilePart:
    """One mapped file with its header. The mapping is released when the last view is dropped."""

    path: Path
    header: Header
    data: np.ndarray
    """uint8 [file size], read-only view of the file."""


def open_parts(path: Path) -> list[FilePart]:
    """Every file of the model, first part first, whichever part `path` is.

    Raises: ModelMissing; SplitFile when parts are missing, renamed or of another model; BadGguf.
    """
    part = _open_part(path)
    count = part.header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return [part]
    parts = [part if other == path else _open_part(other) for other in _part_paths(path, count)]
    _check_belong_together(parts)
    return parts


def _open_part(path: Path) -> FilePart:
    mapped = _map_file(path)
    header = read_header(mapped, path.name)
    _check_tensor_data(header, len(mapped), path.name)
    return FilePart(path, header, np.frombuffer(mapped, np.uint8))


def _map_file(path: Path) -> mmap.mmap:
    if path.is_dir():
        raise ModelMissing(f"{path} is a folder", hint="name the .gguf file in it")
    if path.exists() and not path.is_file():
        raise BadGguf(f"{path} is not a regular file", hint="name a .gguf file")
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelMissing(
            f"there is no file {path}", hint="`foretell models list` shows what is installed"
        ) from None
    except ValueError:
        raise BadGguf(f"{path.name} is empty (0 bytes)", hint="get the file again") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None


def _check_tensor_data(header: Header, num_bytes: int, file_name: str) -> None:
    """Every tensor lies inside the file and none lies over another."""
    previous_end, previous_name = 0, ""
    for info in sorted(header.tensors.values(), key=lambda info: info.offset):
        end = info.offset + info.num_bytes
        if header.data_start + end > num_bytes:
            present = max(0, num_bytes - header.data_start - info.offset)
            raise BadGguf(
                f"{file_name} is truncated: tensor {info.name} needs {info.num_bytes} bytes, "
                f"{present} are present (file has {num_bytes})",
                hint="the download is incomplete; get the file again",
            )
        if info.offset < previous_end:
            raise BadGguf(f"{file_name}: tensors {previous_name} and {info.name} overlap")
        previous_end, previous_name = end, info.name


def _part_paths(path: Path, count: int) -> list[Path]:
    match = _PART_NAME.match(path.name)
    if match is None or int(match["total"]) != count:
        raise SplitFile(
            f"{path.name} is one of {count} parts of a model and was renamed",
            hint=f"give all parts their names, NAME-00001-of-{count:05d}.gguf and so on",
        )
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise SplitFile(
            f"{path.name} is part {int(match['number'])} of {count}, missing are "
            f"{', '.join(missing[:3])}{more}",
            hint="get the missing parts into the same folder",
        )
    return [path.parent / name for name in names]


def _check_belong_together(parts: list[FilePart]) -> None:
    """Numbers and counts agree, and together the parts have the tensors the first one promises."""
    first = parts[0].header.metadata
    for number, part in enumerate(parts):
        metadata = part.header.metadata
        if metadata.get("split.no") != number or metadata.get("split.count") != len(parts):
            raise SplitFile(
                f"{part.path.name} is not part {number + 1} of {len(parts)}, whatever its name "
                "says",
                hint="get the file again",
            )
    promised = first.get("split.tensors.count")
    found = len(set().union(*(part.header.tensors for part in parts)))
    if sum(len(part.header.tensors) for part in parts) != found or promised not in (None, found):
        raise SplitFile(
            f"the {len(parts)} parts of {parts[0].path.name} have {found} different tensors, "
            f"{promised} belong to the model",
            hint="a part is of another model; get all of them again",
        )
