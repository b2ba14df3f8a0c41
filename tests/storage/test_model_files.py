"""Model files wherever they lie: own folder, hub cache, Ollama, further folders."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from storage.download_lock import download_lock
from storage.errors import DownloadBusy, ModelNotFound, StorageError
from storage.model_files import ModelFiles, hash_file, read_record, write_record

HASH = "ab" * 32


def write(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def add_hub_file(cache: Path, repo: str, revision: str, file: str, blob: str = HASH) -> Path:
    """A file as huggingface_hub keeps it (a copy where links are not allowed)."""
    root = cache / ("models--" + repo.replace("/", "--"))
    target = write(root / "blobs" / blob)
    link = root / "snapshots" / revision / file
    link.parent.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        link.write_bytes(target.read_bytes())
    else:
        link.symlink_to(target)
    return link


def add_ollama_model(
    store: Path, place: str, digest: str = HASH, *, with_blob: bool = True
) -> Path:
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "cd" * 32},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    write(store / "manifests" / place, json.dumps({"layers": layers}).encode())
    blob = store / "blobs" / f"sha256-{digest}"
    return write(blob) if with_blob else blob


def test_own_files_are_found_by_name_file_name_and_path(tmp_path: Path) -> None:
    path = write(tmp_path / "models" / "smollm2-135m.gguf")
    files = ModelFiles(tmp_path / "models")
    for name in ("smollm2-135m", "SmolLM2-135M", "smollm2-135m.gguf", str(path)):
        assert files.resolve(name).path == path
        assert files.resolve(name).can_remove


def test_a_missing_folder_is_an_empty_one(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path / "a", tmp_path / "b", (tmp_path / "c",), (tmp_path / "d",))
    assert files.installed() == []
    assert files.parts() == []


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x.gguf", "~nobody-of-this-name"])
def test_the_home_of_a_user_who_does_not_exist_is_an_unknown_model(
    tmp_path: Path, name: str
) -> None:
    """pathlib raised RuntimeError, and a typed `~models/x.gguf` ended the program."""
    with pytest.raises(ModelNotFound, match="no model or file '~nobody"):
        ModelFiles(tmp_path).resolve(name)


def test_a_folder_inside_another_is_not_listed_twice(tmp_path: Path) -> None:
    own, outer = tmp_path / "home" / "models", tmp_path / "home"
    for path in (own / "a.gguf", outer / "more" / "b.gguf", outer / "other" / "b.gguf"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"GGUF")
    extra = (outer, outer / "more", outer / "more" / ".." / "other", outer / "more")
    listed = ModelFiles(own, extra_dirs=extra).installed()
    names = ["a", "b", str(outer / "other" / "b.gguf")]
    assert [(model.name, model.origin) for model in listed] == [
        (names[0], "foretell"),
        (names[1], "folder"),
        (names[2], "folder"),
    ]


def test_an_unknown_name_suggests_near_ones(tmp_path: Path) -> None:
    write(tmp_path / "smollm2-135m.gguf")
    with pytest.raises(ModelNotFound, match="'smollm-135m'") as caught:
        ModelFiles(tmp_path).resolve("smollm-135m")
    assert "smollm2-135m" in caught.value.hint
    with pytest.raises(ModelNotFound):
        ModelFiles(tmp_path).resolve(str(tmp_path / "nothing.gguf"))


def test_parts_and_projectors_are_no_models(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf.part", b"GGUF12")
    for name in ("mmproj-a.gguf", "a-MMPROJ-f16.gguf", "a_imatrix.gguf", "notes.txt"):
        write(tmp_path / name)
    files = ModelFiles(tmp_path)
    assert files.installed() == []
    assert [(part.name, part.size_bytes) for part in files.parts()] == [("a", 6)]


def test_a_file_named_by_its_path_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    write(tmp_path / "mmproj-a.gguf")
    assert ModelFiles(tmp_path).resolve(str(tmp_path / "mmproj-a.gguf")).name == "mmproj-a"


def test_a_part_is_removed_with_its_note(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf.part")
    write(tmp_path / "a.gguf.part.json", b"{}")
    write(tmp_path / "big" / "s-00001-of-00002.gguf.part")
    files = ModelFiles(tmp_path)
    assert files.remove_part("a")
    assert files.remove_part("big")
    assert not files.remove_part("a")
    assert [path.name for path in tmp_path.iterdir()] == [".a.gguf.lock"]


def test_the_name_of_the_models_folder_removes_no_part(tmp_path: Path) -> None:
    """`foretell models rm models` removed every unfinished download of a single file."""
    write(tmp_path / "models" / "a.gguf.part")
    files = ModelFiles(tmp_path / "models")
    assert not files.remove_part("models")
    assert [part.name for part in files.parts()] == ["a"]


def test_a_part_that_is_growing_is_not_removed(tmp_path: Path) -> None:
    part = write(tmp_path / "a.gguf.part")
    with download_lock(tmp_path / "a.gguf"), pytest.raises(DownloadBusy):
        ModelFiles(tmp_path).remove_part("a")
    assert part.exists()


def test_shards_are_one_model_and_know_whether_they_are_all_there(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / "sub" / f"big-0000{number}-of-00003.gguf", b"GGUF" * number)
    files = ModelFiles(tmp_path / "own", extra_dirs=(tmp_path / "sub",))
    (model,) = files.installed()
    assert (model.name, model.size_bytes, model.is_complete) == ("big", 12, False)
    write(tmp_path / "sub" / "big-00003-of-00003.gguf")
    (model,) = files.installed()
    assert model.is_complete
    assert [path.name[:9] for path in model.shards] == ["big-00001", "big-00002", "big-00003"]
    assert files.resolve(str(model.shards[1])).path == model.shards[0]


def test_the_hub_cache_is_used_in_place_with_the_hash_it_states(tmp_path: Path) -> None:
    link = add_hub_file(tmp_path, "owner/repo", "rev1", "Qwen3-4B-Q4_K_M.gguf")
    files = ModelFiles(tmp_path / "own", hf_cache=tmp_path)
    model = files.resolve("Qwen3-4B-Q4_K_M")
    assert model.path == link
    assert not model.can_remove
    if sys.platform != "win32":
        assert model.sha256 == HASH


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_of_two_snapshots_the_newest_counts_and_dangling_links_do_not(tmp_path: Path) -> None:
    old = add_hub_file(tmp_path, "o/r", "rev1", "m.gguf")
    new = add_hub_file(tmp_path, "o/r", "rev2", "m.gguf", "cd" * 32)
    gone = add_hub_file(tmp_path, "o/r", "rev2", "gone.gguf", "ef" * 32)
    gone.resolve().unlink()
    os.utime(old.parent, (1, 1))
    models = ModelFiles(tmp_path / "own", hf_cache=tmp_path).installed()
    assert [model.path for model in models] == [new]


def test_ollama_models_are_used_in_place(tmp_path: Path) -> None:
    blob = add_ollama_model(tmp_path, "registry.ollama.ai/library/smollm2/135m")
    add_ollama_model(tmp_path, "hf.co/owner/repo/Q4_K_M", "12" * 32)
    add_ollama_model(tmp_path, "registry.ollama.ai/library/gone/latest", "34" * 32, with_blob=False)
    write(tmp_path / "manifests" / "registry.ollama.ai" / "library" / "bad" / "x", b"not json")
    files = ModelFiles(tmp_path / "own", ollama_dirs=(tmp_path,))
    assert [model.name for model in files.installed()] == [
        "ollama:owner/repo:Q4_K_M",
        "ollama:smollm2:135m",
    ]
    model = files.resolve("ollama:smollm2:135m")
    assert (model.path, model.sha256, model.can_remove) == (blob, HASH, False)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_a_store_nobody_may_read_is_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ollama's Linux service keeps models below a home that may be closed to others."""
    closed, open_ = tmp_path / "closed", tmp_path / "open"
    blob = add_ollama_model(closed, "registry.ollama.ai/library/smollm2/135m")
    add_ollama_model(open_, "registry.ollama.ai/library/qwen3/4b", "12" * 32)
    monkeypatch.setattr(os, "access", lambda path, mode: path != blob)  # root may read all
    files = ModelFiles(tmp_path / "own", ollama_dirs=(closed, open_))
    assert [model.name for model in files.installed()] == ["ollama:qwen3:4b"]


def test_a_path_that_is_listed_nowhere_is_a_model_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "elsewhere" / "m.gguf")
    model = ModelFiles(tmp_path / "own").resolve(str(path))
    assert (model.name, model.path, model.can_remove) == ("m", path, False)


def test_equal_names_stay_reachable_by_path(tmp_path: Path) -> None:
    own = write(tmp_path / "own" / "m.gguf")
    other = write(tmp_path / "other" / "m.gguf")
    files = ModelFiles(tmp_path / "own", extra_dirs=(tmp_path / "other",))
    assert [model.name for model in files.installed()] == ["m", str(other)]
    assert files.resolve("m").path == own
    assert files.resolve(str(other)).path == other


def test_files_of_other_programs_are_never_removed(tmp_path: Path) -> None:
    link = add_hub_file(tmp_path, "owner/repo", "rev1", "m.gguf")
    files = ModelFiles(tmp_path / "own", hf_cache=tmp_path)
    with pytest.raises(StorageError, match="only used in place"):
        files.remove(files.resolve("m"))
    assert link.exists()


@pytest.mark.parametrize("has_trash", [True, False])
def test_own_files_go_to_the_trash_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_trash: bool
) -> None:
    trash: list[Path] = []

    def fake_trash(path: Any) -> None:
        if not has_trash:
            raise OSError("no trash here")
        trash.append(Path(path).rename(tmp_path / f"trash-{Path(path).name}"))

    monkeypatch.setattr("send2trash.send2trash", fake_trash)
    for number in (1, 2):
        path = write(tmp_path / "own" / "big" / f"b-0000{number}-of-00002.gguf")
        write_record(path, source="x", sha256=HASH)
    files = ModelFiles(tmp_path / "own")
    assert files.remove(files.resolve("big")) is has_trash
    assert len(trash) == (2 if has_trash else 0)
    assert list((tmp_path / "own").iterdir()) == []


def test_a_record_counts_only_for_the_bytes_it_was_made_for(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", b"GGUF-one")
    write_record(path, source="hf:x", sha256=hash_file(path))
    files = ModelFiles(tmp_path)
    assert files.resolve("m").sha256 == hash_file(path)
    path.write_bytes(b"GGUF-other")
    assert read_record(path) is None
    assert files.resolve("m").sha256 is None
