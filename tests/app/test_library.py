"""The library: what is here, wherever it lies, without looking everywhere again and again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from app.library import Library
from app.services import FoundModel
from app.settings import Settings, read_environment
from models.catalog import load_catalog
from models.errors import UnsupportedArchitecture
from storage.model_files import ModelFile, ModelFiles
from storage.paths import Paths


@pytest.fixture
def library(tmp_path: Path) -> Library:
    own = {"FORETELL_HOME": str(tmp_path / "own"), "OLLAMA_MODELS": str(tmp_path / "ollama")}
    env = {"HOME": str(tmp_path), **own}
    return Library(Paths(tmp_path / "own"), Settings(), read_environment(env))


def put_into_hub_cache(home: Path, sha256: str, name: str) -> Path:
    """A file as huggingface_hub keeps it: a link to a blob that is named by its hash."""
    repo = home / ".cache" / "huggingface" / "hub" / "models--someone--something"
    blob, link = repo / "blobs" / sha256, repo / "snapshots" / "abc" / name
    for path in (blob, link):
        path.parent.mkdir(parents=True)
    blob.write_bytes(b"GGUF")
    link.symlink_to(blob)
    return link


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_a_catalog_model_in_another_programs_store_counts_as_installed(
    library: Library, tmp_path: Path
) -> None:
    """`models list` offered what `models pull` called "here already"."""
    entry = next(m for m in load_catalog().models if len(m.files) == 1 and m.files[0].sha256)
    link = put_into_hub_cache(tmp_path, str(entry.files[0].sha256), "other-name.gguf")
    listed = {model.name: model.is_installed for model in library.catalog()}
    assert listed[entry.name]
    assert library.find(entry.name) == FoundModel("other-name", link)


def test_a_drafter_is_found_beside_its_model(library: Library) -> None:
    drafter = load_catalog().drafters[0]
    path = library.folder / drafter.files[0].file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    (model,) = [m for m in library.catalog() if m.name == drafter.serves[0]]
    assert {choice.name: choice.path for choice in model.drafters}[drafter.name] == path
    assert library.installed() == []


def test_a_list_looks_into_the_folders_once(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog looked into every folder twice for each of its drafters: 58 times."""
    looks = []
    found = ModelFiles.installed

    def count(files: ModelFiles) -> list[ModelFile]:
        looks.append(files)
        return found(files)

    monkeypatch.setattr(ModelFiles, "installed", count)
    assert library.catalog()
    assert len(looks) == 1


def test_a_missing_model_is_told_with_what_can_be_done(library: Library) -> None:
    assert "pull smollm2-135m" in library.not_found("smollm2-135m").hint
    assert "smollm2-135m" in library.not_found("smollm2-135").hint
    assert library.not_found("zzz").hint == "see 'foretell models list'"


def test_a_split_model_that_is_not_whole_can_be_pulled_on(library: Library) -> None:
    """Stopped between two files, it was called installed, and `models pull` "here already"."""
    entry = next(model for model in load_catalog().models if len(model.files) > 1)
    for file in entry.files[:-1]:
        path = library.folder / file.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
    last = library.folder / entry.files[-1].file_name
    last.with_name(last.name + ".part").write_bytes(b"GG")
    listed = {model.name: model for model in library.catalog()}[entry.name]
    assert not listed.is_installed
    assert listed.part_bytes == 4 * (len(entry.files) - 1) + 2
    assert library.installed() == []
    assert library.find_whole(entry.name) is None
    last.write_bytes(b"GGUF")
    assert library.find_whole(entry.name) == library.folder / entry.files[0].file_name
    assert [model.name for model in library.installed()] == [entry.name]


def test_what_cannot_be_run_is_listed_last_and_never_fetched(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.catalog.ARCHITECTURES", {"llama": "models.llama"})
    reasons = [model.unsupported for model in library.catalog()]
    num_run = reasons.index("architecture gemma3 is not supported")
    assert set(reasons[:num_run]) == {None}
    assert None not in reasons[num_run:]
    with pytest.raises(UnsupportedArchitecture, match="architecture gemma3 is not supported"):
        library.wanted("gemma3-270m")


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_a_model_used_in_place_has_one_name_however_it_is_asked_for(
    library: Library, tmp_path: Path
) -> None:
    """Remembered by its path it was called so: in the status line, in chats, and not marked."""
    link = put_into_hub_cache(tmp_path, "0" * 64, "Theirs-Q4_0.gguf")
    (listed,) = library.installed()
    found = [library.find(asked) for asked in (str(link), "Theirs-Q4_0", "theirs-q4_0.gguf")]
    assert found == [FoundModel(listed.name, link)] * 3


def test_a_publishers_sampler_is_found_by_name_and_by_the_files_size(
    library: Library, tmp_path: Path
) -> None:
    """Every model ran with the sampler of SmolLM2."""
    entry = next(m for m in load_catalog().models if m.name == "qwen3-0.6b")
    other = tmp_path / "Some-Name.gguf"
    with other.open("wb") as file:
        file.truncate(entry.size_bytes)
    assert library.recommended(FoundModel("qwen3-0.6b", tmp_path / "gone.gguf")) == entry.sampling
    assert library.recommended(FoundModel("Some-Name", other)) == entry.sampling
    assert library.recommended(FoundModel("unknown", tmp_path / "gone.gguf")) == {}


def test_a_model_folder_below_the_home_of_nobody_is_an_empty_one(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "FORETELL_HOME": "~nobody-of-this-name/foretell"}
    settings = Settings(model_folders=("~nobody-of-this-name/models",))
    assert Library(Paths(tmp_path), settings, read_environment(env)).installed() == []


def test_an_unfinished_pull_of_an_address_is_listed_with_its_address(library: Library) -> None:
    """It stood in `models list` alone, and nothing on the screen could go on with it."""
    entry = next(m for m in load_catalog().models if len(m.files) == 1)
    for name in (entry.files[0].file_name, "other.gguf", "odd.gguf"):
        path = library.folder / f"{name}.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
    note = {"source": "https://h/other.gguf", "size_bytes": 9}
    (library.folder / "other.gguf.part.json").write_text(json.dumps(note), "utf-8")
    (library.folder / "odd.gguf.part.json").write_text("[]", "utf-8")
    found = [(m.name, m.size_bytes, m.part_bytes, m.source) for m in library.unfinished()]
    assert found == [("odd", 4, 4, ""), ("other", 9, 4, "https://h/other.gguf")]


def test_nothing_is_left_of_a_split_model_whose_unfinished_download_is_deleted(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were whole stayed, and the line went on to say "unfinished"."""
    monkeypatch.setattr("send2trash.send2trash", Path.unlink)
    folder = library.folder / "big"
    folder.mkdir(parents=True)
    for name in ("b-00001-of-00002.gguf", "b-00002-of-00002.gguf.part"):
        (folder / name).write_bytes(b"GGUF")
    assert [part.name for part in library.unfinished()] == ["big"]
    library.delete_part("big")
    assert not folder.exists()
