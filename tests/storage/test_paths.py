"""Where things are kept."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from storage.errors import StorageError
from storage.paths import Paths, make_private_dir, make_private_file


def test_every_folder_moves_below_the_given_home(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    places = (paths.database_file, paths.models_dir, paths.config_file, paths.cache_dir)
    assert all(tmp_path in place.parents for place in (*places, paths.log_file))


def test_chats_and_models_never_lie_in_the_cache() -> None:
    paths = Paths(None)
    assert paths.cache_dir not in paths.database_file.parents
    assert paths.cache_dir not in paths.models_dir.parents


def test_naming_a_folder_does_not_create_it(tmp_path: Path) -> None:
    assert Paths(tmp_path).models_dir.name == "models"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_files_and_folders_are_for_their_owner_only(tmp_path: Path) -> None:
    file = make_private_file(tmp_path / "home" / "data" / "chats.db")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (file.parent, file.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_existing_file_keeps_its_content(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    file.write_text("kept")
    assert make_private_file(file).read_text() == "kept"


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot create the folder .*file"):
        make_private_dir(tmp_path / "file" / "data")


def test_storage_reads_no_environment() -> None:
    sources = (Path(__file__).parents[2] / "storage").glob("*.py")
    assert not [path for path in sources if "os.environ" in path.read_text("utf-8")]
