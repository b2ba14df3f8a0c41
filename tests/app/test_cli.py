"""The command line from end to end: `main` in a folder of its own, on a tiny random model."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.main import VERSION, main
from app.cli.output import DOES_NOT_FIT, MISSING, OK, USAGE, note, say
from app.sizes import format_bytes

TINY = Path(__file__).parents[1] / "fixtures" / "trunks" / "llama" / "model.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for everything; log handlers of a test end with it."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    before = list(logging.getLogger().handlers)
    yield tmp_path
    for handler in logging.getLogger().handlers[:]:
        if handler not in before:
            logging.getLogger().removeHandler(handler)
            handler.close()


class Terminal(io.StringIO):
    """A stream with a person at it."""

    def isatty(self) -> bool:
        return True


def ask(*flags: str) -> int:
    return main(["ask", "-m", str(TINY), "--raw", "--max-tokens", "6", *flags])


def test_ask_prints_the_same_answer_for_the_same_seed_drafting_or_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = set()
    for flag in ("--spec", "--no-spec", "--no-stream"):
        assert ask("hello", "--seed", "7", "--temp", "1", flag) == OK
        answers.add(capsys.readouterr().out)
    assert len(answers) == 1


def test_ask_puts_stdin_before_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("a\nb", "--seed", "1", "--json") == OK
    typed = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    assert ask("b", "--seed", "1", "--json") == OK
    piped = json.loads(capsys.readouterr().out)
    assert (piped["prompt_tokens"], piped["token_ids"]) == (
        typed["prompt_tokens"],
        typed["token_ids"],
    )


def test_a_prompt_that_does_not_fit_fails_with_both_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ask("hello " * 40, "--ctx-size", "16") == DOES_NOT_FIT
    out, err = capsys.readouterr()
    assert out == ""
    assert "tokens" in err
    assert "16" in err


@pytest.mark.parametrize("command", [[], ["chat"]])
def test_a_closed_stdin_is_no_terminal_and_no_traceback(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`foretell <&-` raised AttributeError: Python makes a closed stream None."""
    monkeypatch.setattr(sys, "stdin", None)
    assert main(command) == USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_notes_never_go_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """print(file=None) prints to stdout: with a closed stderr notes stood in the answer."""
    monkeypatch.setattr(sys, "stderr", None)
    note("figures")
    assert capsys.readouterr().out == ""


def test_pipes_are_utf8_whatever_the_code_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A code page wrote "?" for every character it lacks, and misread or refused piped UTF-8."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO("☃ \x81".encode()), encoding="cp1252")
    )
    assert main(["--version"]) == OK
    say("😀")
    assert raw.getvalue().decode("utf-8").split() == ["foretell", VERSION, "😀"]
    assert sys.stdin.read() == "☃ \x81"


def test_piped_bytes_that_are_no_text_become_replacement_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"h\xff"), encoding="utf-8"))
    main(["--version"])
    assert sys.stdin.read() == "h\ufffd"


def test_a_terminal_gets_no_control_characters_of_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer with ESC ] 52 wrote the clipboard of whoever read it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    say("a\x1b]52;c;aGk=\x07\tb\x9b1m\n☃", end="")
    assert terminal.getvalue() == "a\ufffd]52;c;aGk=\ufffd\tb\ufffd1m\n☃"


def test_a_pipe_gets_the_answer_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[0m", end="")
    assert capsys.readouterr().out == "a\x1b[0m"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device")
@pytest.mark.parametrize("argv", [["--version"], ["completion", "bash"], ["models", "list"]])
def test_a_full_disk_is_one_line_and_its_exit_code(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch, Path("/dev/full").open("wb", buffering=0) as full:
        patch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        assert main(argv) == DOES_NOT_FIT
        sys.stdout.detach()  # type: ignore[union-attr]
    assert capsys.readouterr().err == "foretell: No space left on device\n"


@pytest.mark.parametrize(
    "argv", [["models", "show"], ["models", "path"], ["models", "rm"], ["ask", "x", "-m"]]
)
def test_a_missing_model_has_its_own_exit_code(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "nothing.gguf"]) == MISSING
    assert capsys.readouterr().err.startswith("foretell: no model 'nothing.gguf'")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(999, "999 B"), (98_362_432, "98 MB"), (2_500_000_000, "2.5 GB")]
)
def test_sizes_read_like_a_person_writes_them(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
