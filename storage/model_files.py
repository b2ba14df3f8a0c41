"""GGUF files on this machine: the program's own folder, and other programs' files in place.

Looks at names and sizes only; what is inside a file is the model loader's part. Files of other
programs (Hugging Face cache, Ollama, further folders) are read, never written or deleted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from storage.download_lock import download_lock
from storage.errors import ModelNotFound, StorageError

log = logging.getLogger(__name__)

Origin = Literal["foretell", "huggingface", "ollama", "folder"]

PART_SUFFIX: Final = ".part"
"""Ending of a download that is not whole yet; never listed as a model."""

_PIECE_BYTES: Final = 1 << 20

SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})$")
"""Names of split models. Source: llama.cpp tools/gguf-split, LLM_SPLIT naming."""

_NO_MODEL: Final = re.compile(r"(?i)(?<![a-z0-9])(?:mmproj|imatrix)(?![a-z0-9])")
"""In names of image projectors and of statistics for quantizing, which are GGUF files too."""

_OLLAMA_MODEL_LAYER: Final = "application/vnd.ollama.image.model"
"""Source: Ollama's manifests (JSON, one per tag)."""

_OLLAMA_DEFAULT: Final = ("registry.ollama.ai", "library")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that lies on this machine."""

    name: str
    """What a person types; unique in one listing."""
    path: Path
    """The GGUF file; of a split model the first one."""
    size_bytes: int
    """Of all shards together."""
    origin: Origin
    shards: tuple[Path, ...] = ()
    """Every file of a split model in order; empty for a single file."""
    sha256: str | None = None
    """Hash of the content where the place it lies in states it; not computed here."""
    is_complete: bool = True
    """False when shards are missing."""

    @property
    def can_remove(self) -> bool:
        """Whether the file is this program's own."""
        return self.origin == "foretell"


@dataclass(frozen=True, slots=True)
class PartFile:
    """What an unfinished download has left."""

    name: str
    path: Path
    size_bytes: int
    total_bytes: int | None
    """Size of the whole file where it is known."""
    source: str = ""
    """Address it comes from, without what was secret in it; empty where it is not known."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Every place where models may lie. Reads the file system at each call, keeps nothing."""

    models_dir: Path
    """The program's own folder."""
    hf_cache: Path | None = None
    """The hub cache of huggingface_hub (`.../hub`)."""
    ollama_dirs: tuple[Path, ...] = ()
    """Ollama stores (`.ollama/models`)."""
    extra_dirs: tuple[Path, ...] = ()
    """Further folders of GGUF files, searched with their subfolders."""

    def installed(self) -> list[ModelFile]:
        """Every model that was found, the program's own first, names made unique.

        A file that is found twice, because one folder contains another, counts once.
        """
        found = list(scan_folder(self.models_dir, "foretell"))
        for folder in self.extra_dirs:
            found += scan_folder(folder, "folder")
        if self.hf_cache is not None:
            found += scan_hf_cache(self.hf_cache)
        once: dict[Path, ModelFile] = {}
        for model in found:
            once.setdefault(model.path.parent.resolve() / model.path.name, model)
        found = list(once.values())
        for folder in self.ollama_dirs:  # here one file may have several names
            found += scan_ollama(folder)
        return _with_unique_names(found)

    def parts(self) -> list[PartFile]:
        """Unfinished downloads in the program's own folder."""
        return [_part(path) for path in _walk(self.models_dir, PART_SUFFIX)]

    def resolve(self, name: str) -> ModelFile:
        """The model a name or a path means.

        A path that exists wins, then an exact name, then the same in other letter case.
        Raises: ModelNotFound with near names.
        """
        path = Path(os.path.expanduser(name))  # the method raises for a user who does not exist
        models = self.installed()
        if _is_path(name) and path.is_file():
            return _at(path.absolute(), models)
        for fits in (operator.eq, _equal_ignoring_case):
            for model in models:
                if fits(model.name, name) or fits(model.path.name, name):
                    return model
        near = get_close_matches(name, [model.name for model in models], n=3, cutoff=0.5)
        raise ModelNotFound(
            f"no model or file {name!r}",
            hint=f"did you mean {', '.join(near)}?" if near else "foretell models list shows all",
        )

    def remove(self, model: ModelFile) -> bool:
        """Move the model's files to the trash, or delete them where there is none.

        Returns True when they are in the trash.
        Raises: StorageError when the file is not this program's own, or is in use.
        """
        if not model.can_remove:
            raise StorageError(
                f"{model.path} is not foretell's own file, it is only used in place",
                hint="remove it with the program it belongs to",
            )
        in_trash = True
        for path in model.shards or (model.path,):
            in_trash = _discard(path) and in_trash
            _record(path).unlink(missing_ok=True)
        self._drop_empty_folder(model.path.parent)
        return in_trash

    def remove_part(self, name: str) -> bool:
        """Delete what unfinished downloads of a name have kept; False when there was nothing.

        Raises: DownloadBusy while the download goes on somewhere.
        """
        parts = [part for part in self.parts() if name in (part.name, self._folder_name(part.path))]
        for part in parts:
            with download_lock(part.path.with_name(part.path.name.removesuffix(PART_SUFFIX))):
                part.path.unlink(missing_ok=True)
                part.path.with_name(part.path.name + ".json").unlink(missing_ok=True)
            self._drop_empty_folder(part.path.parent)
        return bool(parts)

    def _folder_name(self, path: Path) -> str | None:
        """The split model a file belongs to: they lie in folders of their name."""
        return None if path.parent == self.models_dir else path.parent.name

    def _drop_empty_folder(self, folder: Path) -> None:
        if folder == self.models_dir or not folder.is_dir():
            return
        rest = list(folder.iterdir())
        if all(path.name.startswith(".") and path.suffix == ".lock" for path in rest):
            shutil.rmtree(folder, ignore_errors=True)


def may_be_model(file_name: str) -> bool:
    """Whether a file is a GGUF file, and by its name no part that only belongs to a model."""
    name = PurePosixPath(file_name).name
    return name.lower().endswith(".gguf") and _NO_MODEL.search(name) is None


def scan_folder(folder: Path, origin: Origin) -> Iterator[ModelFile]:
    """GGUF files below a folder; shards of one model are one entry."""
    yield from _group(_models_below(folder), origin, folder)


def scan_hf_cache(cache: Path) -> Iterator[ModelFile]:
    """GGUF files in a hub cache, newest snapshot of each file.

    Source: huggingface_hub cache layout, `models--OWNER--NAME/snapshots/REV/FILE` -> blob; the
    blob of a large file is named by its SHA-256.
    """
    for repo in sorted(_folders(cache, "models--*")):
        snapshots = sorted(_folders(repo / "snapshots", "*"), key=_mtime, reverse=True)
        seen: set[str] = set()
        for snapshot in snapshots:
            paths = [
                path
                for path in _models_below(snapshot)
                if path.relative_to(snapshot).as_posix() not in seen
            ]
            seen.update(path.relative_to(snapshot).as_posix() for path in paths)
            for model in _group(paths, "huggingface"):
                blob = model.path.resolve().name
                is_hash = re.fullmatch(r"[0-9a-f]{64}", blob) is not None and not model.shards
                yield replace(model, sha256=blob if is_hash else None)


def scan_ollama(store: Path) -> Iterator[ModelFile]:
    """Models of an Ollama store whose weights are here.

    Source: Ollama's store, `manifests/HOST/NAMESPACE/MODEL/TAG` (JSON) -> `blobs/sha256-...`.
    """
    manifests = store / "manifests"
    for manifest in sorted(_files(manifests)):
        digest = _ollama_digest(manifest)
        blob = store / "blobs" / f"sha256-{digest}"
        parts = manifest.relative_to(manifests).parts
        # The store may belong to a system account that lets nobody read.
        if digest is None or len(parts) != 4 or not os.access(blob, os.R_OK):
            continue
        host, namespace, model, tag = parts
        prefix = "" if (host, namespace) == _OLLAMA_DEFAULT else f"{namespace}/"
        yield ModelFile(
            f"ollama:{prefix}{model}:{tag}", blob, blob.stat().st_size, "ollama", sha256=digest
        )


def _ollama_digest(manifest: Path) -> str | None:
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not a manifest: the store may hold other files
    match = re.fullmatch(r"sha256[:-]([0-9a-f]{64})", digests[0]) if digests else None
    return match[1] if match else None


def _group(paths: Iterable[Path], origin: Origin, root: Path | None = None) -> Iterator[ModelFile]:
    shards: dict[tuple[Path, str, int], list[Path]] = {}
    for path in paths:
        match = SHARD.match(path.stem)
        if match:
            key = (path.parent, match["stem"], int(match["total"]))
            shards.setdefault(key, []).append(path)
        else:
            record = read_record(path) if origin == "foretell" else None
            sha256 = record.sha256 if record is not None else None
            yield ModelFile(path.stem, path, path.stat().st_size, origin, sha256=sha256)
    for (folder, stem, total), files in shards.items():
        yield ModelFile(
            # The program's own split models lie in a folder of their name.
            folder.name if origin == "foretell" and folder != root else stem,
            files[0],
            sum(path.stat().st_size for path in files),
            origin,
            shards=tuple(files),
            is_complete=len(files) == total,
        )


def _at(path: Path, models: list[ModelFile]) -> ModelFile:
    """The listed model a file belongs to, or the file as a model of its own."""
    for model in models:
        if path == model.path or path in model.shards:
            return model
    match = SHARD.match(path.stem)
    paths = [path]
    if match is not None:
        same = (other for other in _walk(path.parent, ".gguf") if other.parent == path.parent)
        paths = [p for p in same if (m := SHARD.match(p.stem)) and m["stem"] == match["stem"]]
    return next(_group(paths, "folder"))


def _models_below(folder: Path) -> list[Path]:
    return [path for path in _walk(folder, ".gguf") if may_be_model(path.name)]


def _walk(folder: Path, suffix: str) -> list[Path]:
    """Files with this ending below a folder, sorted; dangling links and closed folders skipped."""
    return [path for path in _files(folder) if path.name.lower().endswith(suffix)]


def _files(folder: Path) -> list[Path]:
    found = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found if os.path.isfile(path))  # is_file raises in closed ones


def _folders(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.glob(pattern) if path.is_dir()]


def _mtime(path: Path) -> float:
    return path.stat().st_mtime


def _is_path(name: str) -> bool:
    return name.lower().endswith(".gguf") or "/" in name or os.sep in name


def _equal_ignoring_case(left: str, right: str) -> bool:
    return left.casefold() == right.casefold()


def _with_unique_names(models: list[ModelFile]) -> list[ModelFile]:
    taken: set[str] = set()
    unique: list[ModelFile] = []
    for model in models:
        name = model.name if model.name not in taken else str(model.path)
        if name in taken:
            continue  # the same file under the same name of another Ollama host
        taken.add(name)
        unique.append(replace(model, name=name))
    return unique


def _part(path: Path) -> PartFile:
    note: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        note = json.loads(path.with_name(path.name + ".json").read_bytes())
    if not isinstance(note, dict):
        note = {}  # a part without its note starts over; it still can be listed and removed
    name = path.name.removesuffix(PART_SUFFIX).removesuffix(".gguf")
    size, source = note.get("size_bytes"), str(note.get("source", ""))
    return PartFile(name, path, path.stat().st_size, size, source)


def _discard(path: Path) -> bool:
    from send2trash import (  # type: ignore[import-untyped]
        TrashPermissionError,
        send2trash,
    )

    try:
        send2trash(path)
    except (OSError, TrashPermissionError):
        # No trash on this volume (a server, a network share): what was ordered is done all the same.
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot remove {path}: {error.strerror}", hint="close the chat that uses it"
            ) from error
        return False
    return True


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of an installed file since it was checked."""

    source: str
    sha256: str
    size_bytes: int
    mtime_ns: int


def write_record(path: Path, *, source: str, sha256: str) -> None:
    """Remember where an installed file came from and the hash it was checked against.

    Without a record (the disk is full) the file is hashed again when somebody asks.
    """
    stat = path.stat()
    record = FileRecord(source, sha256, stat.st_size, stat.st_mtime_ns)
    try:
        _record(path).write_text(json.dumps(dataclasses.asdict(record), indent=1), "utf-8")
    except OSError as error:
        log.warning("no record of %s: %s", path, error)


def read_record(path: Path) -> FileRecord | None:
    """The record of a file, or None when there is none or the file has changed since."""
    try:
        record = FileRecord(**json.loads(_record(path).read_bytes()))
        stat = path.stat()
    except (OSError, ValueError, TypeError):
        return None
    is_same = (record.size_bytes, record.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    return record if is_same else None


def kept_bytes(target: Path) -> int:
    """Bytes an earlier download has left of a file: all of it, or its part."""
    for path in (target, target.with_name(target.name + PART_SUFFIX)):
        if path.is_file():
            return path.stat().st_size
    return 0


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file, read in pieces; `on_bytes` gets what was read so far and may raise."""
    digest, num_read = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_PIECE_BYTES):
            digest.update(chunk)
            num_read += len(chunk)
            on_bytes(num_read)
    return digest.hexdigest()


def _record(path: Path) -> Path:
    return path.with_name(path.name + ".json")
