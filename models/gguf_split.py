"""Recognises one part of a model that was cut in several files, and says how to merge them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from models.errors import SplitFile
from models.gguf_header import Value

_PART_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.gguf$")


def check_is_whole(path: Path, metadata: Mapping[str, Value]) -> None:
    """Raises: SplitFile naming the parts that are here, those that are not, and how to merge.

    Source: llama.cpp `gguf-split`: `split.count` is the number of parts, `split.no` counts from 0
    while file names count from 1; merged files carry `split.count` 0.
    """
    count = metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return
    match = _PART_NAME.match(path.name)
    if match is None or int(match["total"]) != count:
        raise SplitFile(
            f"{path.name} is one of {count} parts of a model and was renamed",
            hint="give the parts their names NAME-00001-of-0000N.gguf, then merge them",
        )
    stem = match["stem"]
    names = [f"{stem}-{part:05d}-of-{count:05d}.gguf" for part in range(1, min(count, 999) + 1)]
    missing = [name for name in names if not (path.parent / name).exists()]
    merge = f"llama-gguf-split --merge {names[0]} {stem}.gguf"
    raise SplitFile(
        f"{path.name} is part {int(match['part'])} of {count}",
        hint=f"first get {', '.join(missing[:3])}; then: {merge}" if missing else f"merge: {merge}",
    )
