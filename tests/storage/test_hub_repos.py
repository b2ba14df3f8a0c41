"""Repositories on a hub: which of their files is meant, asked once, found again offline."""

from __future__ import annotations

import json
from typing import Any

import pytest

from storage.errors import AccessDenied, DownloadFailed, ModelNotFound, OfflineError, StorageError
from storage.model_downloads import find_pulled
from storage.model_files import ModelFiles
from storage.model_sources import HubRepo, parse_hub_repo, parse_source
from tests.storage.download_bench import SIZE, Bench
from tests.storage.misbehaving_server import SHA256, Behaviour, hang_up, send, status

FILES = (
    "README.md",
    "mmproj-Tiny-F16.gguf",
    "Tiny.mmproj-Q8_0.gguf",
    "Tiny-imatrix.gguf",
    "Tiny-Q4_0.gguf",
    "Tiny-q4_k_m.gguf",
    "Tiny-IQ4_XS.gguf",
    "BF16/Tiny-BF16-00001-of-00002.gguf",
    "BF16/Tiny-BF16-00002-of-00002.gguf",
)


def listing(*files: str) -> Behaviour:
    """What the hub says of a repository with these files."""
    siblings: list[dict[str, Any]] = [
        {"rfilename": file, "size": SIZE, "blobId": "1", "lfs": {"sha256": SHA256, "size": SIZE}}
        for file in files
    ]
    return send(json.dumps({"id": "owner/repo", "siblings": siblings}).encode())


def wanted(bench: Bench, text: str, *files: str) -> list[str]:
    bench.server.plan = [listing(*(files or FILES))]
    found = bench.downloads.wanted(text)
    assert {(file.size_bytes, file.sha256) for file in found} == {(SIZE, SHA256)}
    return [file.file_name for file in found]


@pytest.mark.parametrize(
    ("text", "repo"),
    [
        ("hf:o/r", HubRepo("o/r")),
        ("hf:o/r:Q4_K_M", HubRepo("o/r", "Q4_K_M")),
        ("hf:o/r@v1:Q4_K_M", HubRepo("o/r", "Q4_K_M", "v1")),
        ("https://huggingface.co/o/r", HubRepo("o/r")),
        ("https://huggingface.co/o/r/:Q8_0", HubRepo("o/r", "Q8_0")),
        ("https://huggingface.co/o/r/tree/v1:Q8_0?x=1", HubRepo("o/r", "Q8_0", "v1")),
        ("hf:o/r/f.gguf", None),
        ("hf:o/r@v1/f.gguf", None),
        ("https://huggingface.co/o/r/blob/main/f.gguf", None),
        ("https://example.org/o/r", None),
        ("http://[::1/x", None),
        ("pypi:a==1", None),
        ("smollm2-135m", None),
    ],
)
def test_repositories_are_told_from_files(text: str, repo: HubRepo | None) -> None:
    assert parse_hub_repo(text) == repo


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("hf:owner/repo:Q4_K_M", ["Tiny-q4_k_m.gguf"]),
        ("hf:owner/repo:iq4_xs", ["Tiny-IQ4_XS.gguf"]),
        ("https://huggingface.co/owner/repo:Q4_0", ["Tiny-Q4_0.gguf"]),
        ("hf:owner/repo:bf16", [f"Tiny-BF16/Tiny-BF16-0000{n}-of-00002.gguf" for n in (1, 2)]),
    ],
)
def test_a_quantization_names_its_files(bench: Bench, text: str, names: list[str]) -> None:
    assert wanted(bench, text) == names
    ((path, _),) = bench.server.requests
    assert path == "/api/models/owner/repo/revision/main?blobs=true"


def test_the_only_model_of_a_repository_needs_no_quantization(bench: Bench) -> None:
    assert wanted(bench, "hf:owner/repo", *FILES[:5]) == ["Tiny-Q4_0.gguf"]


@pytest.mark.parametrize(
    ("quant", "files", "message"),
    [
        ("", FILES, "has several models: BF16, IQ4_XS, Q4_0, q4_k_m"),
        (":Q8_0", FILES, "has no Q8_0, only: BF16, IQ4_XS, Q4_0, q4_k_m"),
        (":Q4_K", FILES, "has no Q4_K, only: "),
        (":Q4_0", ("a-Q4_0.gguf", "b-Q4_0.gguf"), "several models with Q4_0: a-Q4_0, b-Q4_0"),
        ("", FILES[:2], "has no GGUF file"),
        (":BF16", FILES[:-1], "lacks Tiny-BF16/Tiny-BF16-00002-of-00002.gguf"),
    ],
)
def test_nothing_is_chosen_for_a_person_and_the_choices_are_named(
    bench: Bench, quant: str, files: tuple[str, ...], message: str
) -> None:
    with pytest.raises((ModelNotFound, DownloadFailed)) as caught:
        wanted(bench, f"hf:owner/repo{quant}", *files)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        (status(404), AccessDenied, "no repository owner/repo with revision main"),
        (status(503), DownloadFailed, "answered 503"),
        (send(b"<html>"), DownloadFailed, "no list of files"),
        (send(b'{"siblings": [1]}'), DownloadFailed, "no list of files"),
        (hang_up, DownloadFailed, "the connection broke"),
    ],
)
def test_a_hub_that_does_not_answer_is_one_line(
    bench: Bench, behaviour: Behaviour, error: type[StorageError], message: str
) -> None:
    bench.server.plan = [behaviour]
    with pytest.raises(error, match=message):
        bench.downloads.wanted("hf:owner/repo:Q4_0")


def test_a_bad_token_is_dropped_for_a_public_repository(bench: Bench) -> None:
    bench.token = "hf_secret"
    bench.server.plan = [status(401), listing(*FILES)]
    bench.downloads.wanted("hf:owner/repo:Q4_0")
    sent = [headers.get("Authorization") for _, headers in bench.server.requests]
    assert sent == ["Bearer hf_secret", None]


def test_offline_no_repository_is_asked(bench: Bench) -> None:
    bench.is_offline = True
    with pytest.raises(OfflineError, match="owner/repo"):
        bench.downloads.wanted("hf:owner/repo:Q4_0")
    assert bench.server.requests == []


def test_a_pulled_model_is_found_by_the_address_it_came_from(bench: Bench) -> None:
    files = ModelFiles(bench.folder)
    for quant in ("Q4_0", "BF16"):
        bench.server.plan = [listing(*FILES)]
        bench.downloads.fetch(
            bench.downloads.wanted(f"hf:owner/repo:{quant}"),
            on_progress=bench.reports.append,
            is_cancelled=lambda: False,
        )
    for text, name in (
        ("hf:owner/repo:q4_0", "Tiny-Q4_0"),
        ("hf:Owner/Repo:BF16", "Tiny-BF16"),
        ("https://huggingface.co/owner/repo:BF16", "Tiny-BF16"),
        ("hf:owner/repo/Tiny-Q4_0.gguf", "Tiny-Q4_0"),
        ("hf:owner/repo/BF16/Tiny-BF16-00002-of-00002.gguf", "Tiny-BF16"),
        ("hf:owner/repo:Q8_0", None),
        ("hf:owner/repo", None),
        ("hf:other/repo:Q4_0", None),
        ("pypi:tiny==1", None),
    ):
        found = find_pulled(files, text)
        assert (found.name if found else None) == name, text


def test_what_a_source_looks_like_is_said() -> None:
    with pytest.raises(StorageError) as caught:
        parse_source("hf:owner")
    assert "hf:owner/repo:QUANT" in caught.value.hint
