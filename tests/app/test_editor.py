"""A message in the person's own editor: it comes back, or what was written is kept."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from textual.app import SuspendNotSupported

from app.editor import edit_text
from app.errors import Refused
from app.widgets.prompt import Attachment
from tests.app.app_fixtures import open_stage


@contextmanager
def refuse() -> Iterator[None]:
    raise SuspendNotSupported("headless")
    yield


def editor_that(folder: Path, code: str) -> str:
    script = folder / "editor.py"
    script.write_text(f"import sys, pathlib\npath = pathlib.Path(sys.argv[-1])\n{code}\n", "utf-8")
    return f'"{sys.executable}" "{script}"'


APPEND = "path.write_bytes(path.read_bytes() + 'é and more\\n'.encode())"


async def test_the_message_is_written_in_the_persons_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        object.__setattr__(stage.app.services, "editor", editor_that(tmp_path, APPEND))
        monkeypatch.setattr(stage.app, "suspend", nullcontext)
        await stage.type("so far ")
        await stage.pilot.press("ctrl+g")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "so far é and more"


async def test_what_is_attached_stays_a_chip_when_the_editor_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        prompt = stage.app.chat_screen.prompt
        object.__setattr__(stage.app.services, "editor", editor_that(tmp_path, APPEND))
        monkeypatch.setattr(stage.app, "suspend", nullcontext)
        prompt.attach(Attachment("\nfile.txt:\n\nlines\n", "file.txt"))
        await stage.type("so far ")
        await stage.pilot.press("ctrl+g")
        await stage.settle()
        assert prompt.area.text == "so far é and more"
        assert [attachment.name for attachment in prompt.attachments] == ["file.txt"]
        object.__setattr__(
            stage.app.services, "editor", editor_that(tmp_path, "path.write_text('all new')")
        )
        await stage.pilot.press("ctrl+g")
        await stage.settle()
        assert (prompt.area.text, prompt.attachments) == ("all new", ())


async def test_without_an_editor_one_line_says_what_to_set(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.type("kept")
        await stage.pilot.press("ctrl+g")
        await stage.settle()
        assert "set VISUAL or EDITOR" in stage.notices
        assert stage.app.chat_screen.prompt.text == "kept"


async def test_a_terminal_that_cannot_be_lent_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path) as stage:
        object.__setattr__(stage.app.services, "editor", "vi")
        monkeypatch.setattr(stage.app, "suspend", refuse)
        await stage.pilot.press("ctrl+g")
        await stage.settle()
        assert "cannot be lent" in stage.notices


@pytest.mark.parametrize(
    ("editor", "words"),
    [
        ("/no/such/editor", "cannot be started"),
        ("'unclosed", "cannot be started"),
        ("fails", "ended with code 3"),
        ("binary", "no UTF-8 text"),
    ],
)
def test_an_editor_that_fails_leaves_the_message(tmp_path: Path, editor: str, words: str) -> None:
    codes = {"fails": "sys.exit(3)", "binary": "path.write_bytes(bytes([255, 254]))"}
    command = editor_that(tmp_path, codes[editor]) if editor in codes else editor
    with pytest.raises(Refused, match=words):
        edit_text(command, "text")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("path.write_text('precious'); sys.exit(3)", "ended with code 3"),
        ("path.write_bytes(b'pr\\xe9cieux')", "no UTF-8 text"),
    ],
)
def test_what_was_written_stays_in_its_file_when_it_cannot_be_taken(
    tmp_path: Path, temporary: Path, code: str, words: str
) -> None:
    with pytest.raises(Refused, match=words) as refused:
        edit_text(editor_that(tmp_path, code), "text")
    (path,) = temporary.iterdir()
    assert str(path) in str(refused.value)
    assert path.read_bytes().startswith(b"pr")


def test_no_file_is_left_when_nothing_was_written(tmp_path: Path, temporary: Path) -> None:
    for editor in (editor_that(tmp_path, "sys.exit(3)"), "/no/such/editor"):
        with pytest.raises(Refused):
            edit_text(editor, "text")
    assert edit_text(editor_that(tmp_path, APPEND), "text ") == "text é and more"
    assert not list(temporary.iterdir())


def test_a_folder_for_temporary_files_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(Refused, match="cannot be given to an editor"):
        edit_text("vi", "text")


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent by other means there")
def test_an_interrupt_meant_for_the_editor_leaves_the_program(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    code = (
        "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\n"
        "assert signal.getsignal(signal.SIGINT) == signal.default_int_handler\n"
        "path.write_text('after it')"
    )
    assert edit_text(editor_that(tmp_path, code), "text") == "after it"
    assert signal.getsignal(signal.SIGINT) is before


async def test_the_editor_waits_until_no_answer_runs(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        object.__setattr__(stage.app.services, "editor", "vi")
        await stage.ask("one")
        await stage.pilot.press("ctrl+g")
        await stage.settle()
        assert "An answer is running" in stage.notices
