"""Models as screens and commands see them: the folder, the catalog, downloads, what fits.

Joins `storage` (files and downloads) with the catalog; holds no state of its own. Everything here
may block on disk or network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from app.services import CatalogModel, DrafterChoice, FoundModel, InstalledModel
from app.settings import Environment, Settings
from models.catalog import CatalogDrafter, load_catalog
from models.catalog import CatalogModel as CatalogEntry
from storage.errors import DownloadCancelled, ModelNotFound
from storage.model_files import PART_SUFFIX, ModelFile, ModelFiles, kept_bytes
from storage.model_sources import is_source
from storage.paths import Paths

if TYPE_CHECKING:
    from storage.model_downloads import WantedFile
    from storage.progress import ReportProgress

ORIGINS = {"huggingface": "Hugging Face cache", "ollama": "Ollama", "folder": "another folder"}
SHOWN_CONTEXT_LEN = 4096
"""Context whose cache is counted when a model is said to fit or not."""


@dataclass(frozen=True, slots=True)
class Library:
    """Every model file this machine has, and every one it can get."""

    paths: Paths
    settings: Settings
    environment: Environment

    @property
    def folder(self) -> Path:
        """Where downloads go."""
        return self.paths.models_dir

    @property
    def files(self) -> ModelFiles:
        """Files in all folders."""
        return ModelFiles(
            self.folder,
            hf_cache=self.environment.hf_cache,
            ollama_dirs=self.environment.ollama_models,
            extra_dirs=(
                *(Path(os.path.expanduser(folder)) for folder in self.settings.model_folders),
                self.environment.lm_studio_models,
            ),
        )

    def installed(self) -> Sequence[InstalledModel]:
        """Every whole model that was found, this program's own first; drafters left out."""
        drafters = {drafter.name for drafter in load_catalog().drafters}
        found = [model for model in self.files.installed() if model.is_complete]
        here = _by_name_and_hash(found)
        return [_installed(model, here) for model in found if model.name not in drafters]

    def catalog(self) -> Sequence[CatalogModel]:
        """Every model that can be downloaded, smallest first; what cannot be run comes last."""
        here = _by_name_and_hash(self.files.installed())
        models = [_catalog_model(entry, here, self.folder) for entry in load_catalog().models]
        return sorted(models, key=lambda model: model.unsupported is not None)

    def unfinished(self) -> Sequence[CatalogModel]:
        """What was pulled by its address and is not whole yet."""
        known = {self.folder / file.file_name for e in load_catalog().entries for file in e.files}
        return [
            CatalogModel(
                name=part.name if part.path.parent == self.folder else part.path.parent.name,
                title=part.source or part.name,
                size_bytes=part.total_bytes or part.size_bytes,
                licence="",
                part_bytes=part.size_bytes,
                source=part.source,
            )
            for part in self.files.parts()
            if part.path.with_name(part.path.name.removesuffix(PART_SUFFIX)) not in known
        ]

    def find(self, name: str) -> FoundModel | None:
        """The file a catalog name, file stem or path means, or None when it is not here."""
        try:
            file = self.resolve(name)
        except ModelNotFound:
            return None
        return FoundModel(file.name, file.path)

    def find_whole(self, name: str) -> Path | None:
        """The file of a catalog entry or an address, or None while any of it has to be fetched."""
        if is_source(name):
            from storage.model_downloads import find_pulled

            pulled = find_pulled(self.files, name)
            return pulled.path if pulled else None
        entry = load_catalog().find(name)
        return _path_of(entry, _by_name_and_hash(self.files.installed())) if entry else None

    def resolve(self, name: str) -> ModelFile:
        """The file, with what is known of it. Raises: ModelNotFound naming near ones."""
        try:
            return self.files.resolve(name)
        except ModelNotFound:
            path = self.find_whole(name)
            if path is None:
                raise self.not_found(name) from None
            return self.files.resolve(str(path))

    def not_found(self, name: str) -> ModelNotFound:
        """The error for a name that leads to no file: what it could have been, what to do."""
        if is_source(name) or load_catalog().find(name):
            return ModelNotFound(
                f"model {name!r} is not downloaded", hint=f"run 'foretell models pull {name}'"
            )
        near = load_catalog().near(name)
        hint = f"did you mean {', '.join(near)}?" if near else "see 'foretell models list'"
        return ModelNotFound(f"no model {name!r}", hint=hint)

    def recommended(self, model: FoundModel) -> Mapping[str, float]:
        """What the publisher recommends for the sampler: temperature, top_k, top_p, min_p.

        A file under another name is recognised by its size to the byte.
        """
        entry = load_catalog().find(model.name)
        if entry is None and model.path.is_file():
            size = model.path.stat().st_size
            same = (e for e in load_catalog().models if (e.size_bytes, len(e.files)) == (size, 1))
            entry = next(same, None)
        return entry.sampling if isinstance(entry, CatalogEntry) else {}

    def download(
        self,
        name: str,
        *,
        on_progress: ReportProgress,
        is_cancelled: Callable[[], bool],
    ) -> FoundModel | None:
        """Fetch, check and install; None when it was cancelled, and the part is then kept.

        Raises: StorageError or OSError, with the part kept; EngineError as `wanted`.
        """
        from storage.model_downloads import HubAccess, ModelDownloads

        downloads = ModelDownloads(
            self.folder,
            hub=HubAccess(self.environment.hf_endpoint, self.environment.hf_token),
            is_offline=self.settings.offline,
        )

        try:
            wanted = downloads.wanted(name) if is_source(name) else self.wanted(name)
            path = downloads.fetch(wanted, on_progress=on_progress, is_cancelled=is_cancelled)
        except DownloadCancelled:
            return None
        return self.find(str(path))

    def wanted(self, name: str) -> Sequence[WantedFile]:
        """The files of a catalog entry.

        Raises: ModelNotFound; EngineError for an entry that cannot be run here.
        """
        entry = load_catalog().find(name)
        if entry is None:
            raise self.not_found(name)
        load_catalog().check_runs(entry)
        return entry.files

    def delete(self, path: Path) -> None:
        """Remove an installed file, to the trash where there is one. Raises: StorageError."""
        self.files.remove(self.files.resolve(str(path)))

    def delete_part(self, name: str) -> None:
        """Remove what an unfinished download has kept, files of a split model that are whole too."""
        for model in self.files.installed():
            if model.name == name and model.can_remove and not model.is_complete:
                self.files.remove(model)
        self.files.remove_part(name)


Here = Mapping[str, Path]
"""Name, or SHA-256 where it is known, of every whole model that was found -> its path."""


def _by_name_and_hash(found: Sequence[ModelFile]) -> Here:
    # The program's own files come first and win: entered last.
    whole = [model for model in found if model.is_complete]
    keys = [(key, model.path) for model in whole for key in (model.name, model.sha256) if key]
    return dict(reversed(keys))


def _path_of(entry: CatalogEntry | CatalogDrafter, here: Here) -> Path | None:
    """Where a catalog entry lies: under its name, or in another program's store by its hash."""
    hash_ = entry.files[0].sha256 if len(entry.files) == 1 else None
    return here.get(entry.name) or here.get(hash_ or "")


def _installed(model: ModelFile, here: Here) -> InstalledModel:
    entry = load_catalog().find(model.name)
    return InstalledModel(
        name=model.name,
        path=model.path,
        size_bytes=model.size_bytes,
        details=f"{entry.title}, {entry.quantization}" if entry else "",
        origin=ORIGINS.get(model.origin, ""),
        can_delete=model.can_remove,
        drafters=_drafters(model.name, here),
    )


def _catalog_model(entry: CatalogEntry, here: Here, folder: Path) -> CatalogModel:
    path = _path_of(entry, here)
    return CatalogModel(
        name=entry.name,
        title=entry.title,
        size_bytes=entry.size_bytes,
        licence=entry.licence,
        is_installed=path is not None,
        part_bytes=sum(kept_bytes(folder / file.file_name) for file in entry.files if not path),
        refusal=_does_not_fit(entry),
        unsupported=load_catalog().refusal(entry),
        drafters=_drafters(entry.name, here),
    )


def _drafters(model_name: str, here: Here) -> tuple[DrafterChoice, ...]:
    return tuple(
        DrafterChoice(d.name, d.size_bytes, _path_of(d, here), load_catalog().refusal(d))
        for d in load_catalog().drafters_for(model_name)
    )


def _does_not_fit(entry: CatalogEntry) -> str | None:
    """Both numbers when weights and a 4k cache need more memory than this machine has."""
    needed = entry.memory_bytes(SHOWN_CONTEXT_LEN) or entry.size_bytes
    total = psutil.virtual_memory().total
    if needed <= total:
        return None
    return f"needs {needed / 1e9:.1f} GB, this machine has {total / 1e9:.1f} GB"
