"""Which files of a repository on a hub are the model somebody means.

One request lists the repository; nothing is chosen for a person where several models fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import quote

import httpx

from storage.downloads import failure_of, refuse_downgrade
from storage.errors import AccessDenied, DownloadFailed, ModelNotFound
from storage.model_files import SHARD, may_be_model
from storage.model_sources import HubFile, HubRepo

_QUANT: Final = re.compile(r"(?i)(?<![a-z0-9])(?:UD-)?(?:T?I?Q\d\w*|MXFP\d\w*|BF16|F16|F32)")
"""What a file name says of its quantization. Source: the type names of llama.cpp's quantize."""

_HASH: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubEntry:
    """A GGUF file of a repository as the hub lists it."""

    file: str
    size_bytes: int | None
    sha256: str | None


def list_models(
    client: httpx.Client, endpoint: str, token: str | None, repo: HubRepo
) -> list[HubEntry]:
    """Every GGUF file of a repository that may be a language model.

    Source: the hub's `/api/models/{repo}/revision/{revision}?blobs=true`; `siblings` with
    `rfilename`, `size` and, for large files, `lfs.sha256` (huggingface_hub, ModelInfo).
    Raises: AccessDenied, DownloadFailed.
    """
    revision = quote(repo.revision, safe="")
    address = f"{endpoint.rstrip('/')}/api/models/{repo.repo}/revision/{revision}"
    answer = _get(client, address, token)
    if answer.status_code in (401, 403, 404) and token is not None:
        answer = _get(client, address, None)  # a wrong token fails even public repositories
    if answer.status_code in (401, 403, 404):
        raise AccessDenied(
            f"there is no repository {repo.repo} with revision {repo.revision}, or it is private",
            hint="check owner and name, or set HF_TOKEN to a token that may read it",
        )
    if answer.status_code != 200:
        raise DownloadFailed(
            f"{address} answered {answer.status_code} {answer.reason_phrase}".rstrip(),
            hint="try again later, or name the file: hf:owner/repo/file.gguf",
        )
    try:
        entries = [_entry(sibling) for sibling in answer.json()["siblings"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DownloadFailed(f"{address} is no list of files", hint="check HF_ENDPOINT") from error
    return [entry for entry in entries if may_be_model(entry.file)]


def choose_model(repo: HubRepo, entries: Iterable[HubEntry]) -> list[HubEntry]:
    """The files of the one model that is meant: a single file, or the shards of one.

    Raises: ModelNotFound naming what there is, when none fits or several do.
    """
    models: dict[str, list[HubEntry]] = {}
    for entry in entries:
        models.setdefault(_model_name(entry.file), []).append(entry)
    files_of = HubFile(repo.repo, "", repo.revision)
    fitting = [name for name in models if repo.has(replace(files_of, file=name))]
    if len(fitting) == 1:
        return models[fitting[0]]
    if not models:
        raise ModelNotFound(
            f"{repo.repo} has no GGUF file", hint="look for a repository of that name with -GGUF"
        )
    quant = f" {repo.quant}" if repo.quant else ""
    what = f"several models{quant and f' with{quant}'}" if fitting else f"no{quant}, only"
    raise ModelNotFound(
        f"{repo.repo} has {what}: {', '.join(_labels(fitting or list(models)))}",
        hint=f"name one: hf:{repo.repo}:QUANT or hf:{repo.repo}/FILE.gguf",
    )


def _get(client: httpx.Client, address: str, token: str | None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = client.get(
            address, params={"blobs": "true"}, headers=headers, follow_redirects=True
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise failure_of(error, address) from error
    refuse_downgrade(answer, address)
    return answer


def _entry(sibling: Mapping[str, Any]) -> HubEntry:
    size, sha256 = sibling.get("size"), (sibling.get("lfs") or {}).get("sha256")
    is_hash = isinstance(sha256, str) and _HASH.fullmatch(sha256) is not None
    return HubEntry(
        str(sibling["rfilename"]),
        size if isinstance(size, int) else None,
        sha256 if is_hash else None,
    )


def _model_name(file: str) -> str:
    stem = file[: -len(".gguf")]
    match = SHARD.match(stem)
    return match["stem"] if match else stem


def _labels(names: list[str]) -> list[str]:
    """Quantizations where they tell the models apart, else the names."""
    found = [_QUANT.findall(PurePosixPath(name).name) for name in names]
    labels = [quants[-1] if quants else name for quants, name in zip(found, names, strict=True)]
    return sorted(labels if len(set(labels)) == len(names) else names)
