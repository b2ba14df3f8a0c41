"""The command line from end to end: `main` in a folder of its own, on a tiny random model."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.cli.headless import HeadlessEngine
from app.cli.main import VERSION, main
from app.cli.output import (
    BAD_MODEL,
    DOES_NOT_FIT,
    FAILURE,
    INTERRUPTED,
    MISSING,
    OFFLINE,
    OK,
    USAGE,
    CommandFailed,
    note,
    say,
)
from app.log_file import start_log
from app.machine import Busy
from app.sizes import format_bytes
from app.wiring import Wiring
from backends.reference import ReferenceBackend
from engine.bench_concurrent import Cell, CellResult
from engine.commands import Command, LoadModel
from engine.events import EngineEvent, EngineFailed, ErrorInfo
from models.catalog import load_catalog
from models.loader import Loader
from storage.chats import ChatStore
from storage.database import Database
from storage.progress import DownloadProgress, ReportProgress

TINY = Path(__file__).parents[1] / "fixtures" / "trunks" / "llama" / "model.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for everything; log handlers of a test end with it."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back: `start_log` clears it
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


@pytest.mark.parametrize("argv", [["--offline", "models", "pull"], ["models", "pull", "--offline"]])
def test_offline_is_understood_before_and_behind_the_command(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "smollm2-135m"]) == OFFLINE
    assert "offline" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["hf:owner/repo:Q4_K_M", "https://huggingface.co/owner/repo"])
def test_an_address_that_was_not_pulled_names_the_command_that_pulls_it(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-m hf:...` said "no model", and `pull` knew exact files only."""
    assert main(["ask", "x", "-m", address]) == MISSING
    assert f"run 'foretell models pull {address}'" in capsys.readouterr().err
    assert main(["--offline", "models", "pull", address]) == OFFLINE
    assert "owner/repo" in capsys.readouterr().err


def test_a_model_is_shown_by_its_name_however_it_was_typed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafters of a model that was typed as a path or an address were not found."""
    drafter = load_catalog().drafters[0]
    path = home / "data" / "models" / f"{drafter.serves[0]}.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(TINY.read_bytes())
    assert main(["models", "show", str(path), "--json"]) == OK
    facts = json.loads(capsys.readouterr().out)
    assert facts["name"] == drafter.serves[0]
    assert drafter.name in facts["drafters"]


def test_an_engine_that_ended_says_why_with_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The engine's ErrorKind was dropped when the thread ended before the load."""
    error = ErrorInfo("does_not_fit", "no memory left", "close something")

    class Ended:
        def __init__(self, on_event: Callable[[EngineEvent], None]) -> None:
            on_event(EngineFailed(error))

        def submit(self, command: Command) -> None:
            pass

        def join(self, timeout_s: float | None = None) -> bool:
            return True

    with HeadlessEngine(Ended) as engine, pytest.raises(CommandFailed) as caught:
        engine.load(LoadModel(path=TINY, name="tiny"))
    assert (str(caught.value), caught.value.exit_code) == ("no memory left", DOES_NOT_FIT)


def test_a_drafter_nobody_knows_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "stream", str(TINY), "--tokens", "1", "--drafter", "magic:1"]) == USAGE
    assert "drafter magic:1 is unknown" in capsys.readouterr().err


def test_a_missing_drafter_file_is_missing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["diagnose", "draft", str(TINY), "--tokens", "1", "--out", str(home / "o.npz")]
    assert main([*argv, "--draft-model", "nothing.gguf"]) == MISSING


def test_diagnose_stream_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tokens", "1,2,3", "--max-tokens", "6", "--temp", "0", "--drafter", "oracle:2"]
    assert main(["diagnose", "stream", str(TINY), *flags]) == OK
    document = json.loads(capsys.readouterr().out)
    assert document["cache_ok"] is True
    assert document["cache_len"] == 3 + len(document["token_ids"]) - 1


def test_a_stopped_bench_prints_what_is_done_and_leaves_as_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C left with 0: a script could not tell half a bench from a whole one."""

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.cli.bench.run_paired", stop)
    monkeypatch.setattr("app.cli.bench.measure_busy", lambda: Busy(0.0, ""))
    assert main(["bench", "spec", "-m", str(TINY), "--json"]) == INTERRUPTED
    out, err = capsys.readouterr()
    assert json.loads(out)["figures"] == []
    assert "stopped" in err


def test_a_skipped_peer_is_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.cli.peers._PROBE", "raise SystemExit(1)")
    monkeypatch.setattr("app.cli.bench.measure_busy", lambda: Busy(0.0, ""))
    assert main(["bench", "peers", "-m", str(TINY), "--json"]) == OK
    assert "no llama-cpp-python" in json.loads(capsys.readouterr().out)["skipped"]


def test_chats_are_exported_as_they_were_written(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database(home / "data" / "chats.db")
    store = ChatStore(database)
    chat = store.create()
    store.add_message(chat.id, "user", "a ☃ question")
    database.close()
    assert main(["chats", "export", chat.id, "--format", "json"]) == OK
    out = capsys.readouterr().out
    assert json.loads(out)["messages"][0]["content"] == "a ☃ question"
    assert out.endswith("}\n")
    assert not out.endswith("\n\n")
    assert main(["chats", "export", chat.id[:4]]) == OK
    assert "a ☃ question\n" in capsys.readouterr().out
    assert main(["chats", "rm", chat.id]) == OK
    assert main(["chats", "show", chat.id]) == FAILURE


def test_a_log_that_cannot_be_written_is_silent(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """logging prints a traceback on stderr by itself: into the screen, when the disk was full."""
    start_log(home / "foretell.log")

    def fail(record: logging.LogRecord) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logging.getLogger().handlers[-1], "shouldRollover", fail)
    logging.getLogger("app").warning("x")
    assert capsys.readouterr().err == ""


def test_an_answer_that_fills_the_context_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """`ask` cut the answer without a word; the screen said why."""
    flags = ["--seed", "1", "--ctx-size", "16", "--max-tokens", "100"]
    assert main(["ask", "-m", str(TINY), "--raw", "hello", "--temp", "2", *flags]) == OK
    assert "foretell: the context is full" in capsys.readouterr().err


def test_rows_are_measured_where_no_memory_of_this_machine_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU was held against the CPU's memory, and without the native library the bench failed."""
    loader = Loader(backend_factory=ReferenceBackend)
    monkeypatch.setattr(Wiring, "loader", lambda wiring, settings: loader)
    monkeypatch.setattr("app.cli.bench.ROW_COUNTS", (1, 2))
    monkeypatch.setattr("app.cli.bench.ROWS_ROUNDS", 1)
    monkeypatch.setattr("app.cli.bench.measure_busy", lambda: Busy(0.0, ""))
    assert main(["bench", "rows", "-m", str(TINY), "--json"]) == OK
    document = json.loads(capsys.readouterr().out)
    assert document["floor_ms"] is None
    assert [row["num_rows"] for row in document["rows"]] == [1, 2]


def test_what_is_left_of_an_unfinished_split_model_goes_in_one_go(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("send2trash.send2trash", Path.unlink)
    folder = home / "data" / "models" / "big"
    folder.mkdir(parents=True)
    for name in ("b-00001-of-00002.gguf", "b-00002-of-00002.gguf.part"):
        (folder / name).write_bytes(b"GGUF")
    assert main(["models", "rm", "big"]) == OK
    assert not folder.exists()
    assert main(["models", "rm", "big"]) == MISSING


def test_a_context_that_was_narrowed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """What the engine said while it loaded was thrown away."""
    assert ask("hello", "--ctx-size", "99999999") == OK
    assert "context narrowed from 99999999" in capsys.readouterr().err


def test_s05_a_drafter_that_was_asked_for_and_is_not_there_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`ask --spec-type draft-head` decoded plainly without a word."""
    assert ask("hello", "--spec-type", "draft-head") == OK
    assert "no drafting: " in capsys.readouterr().err
    assert ask("hello", "--spec-type", "draft-head", "--no-spec") == OK
    assert ask("hello") == OK
    assert capsys.readouterr().err == ""


def test_what_can_be_made_again_lies_in_the_cache(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept prompts lay among the models, where a half written one was an unfinished download."""
    folders = []
    monkeypatch.setattr("engine.host.EngineHost", lambda *_, options, **__: folders.append(options))
    wiring = Wiring.from_environment()
    wiring.start_engine(wiring.settings, lambda event: None)
    assert folders[0].checkpoint_dir == home / "cache" / "checkpoints"


def test_a_stopped_concurrency_bench_keeps_the_cells_that_are_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C threw away minutes of measurements."""
    measured: list[Cell] = []

    def run(_engine: object, _settings: object, cell: Cell, *_: object) -> CellResult:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(cell)
        return CellResult(cell, 10.0 + len(measured), 5.0, ((1, 2),))

    monkeypatch.setattr("app.cli.concurrent._run", run)
    monkeypatch.setattr("app.cli.bench.measure_busy", lambda: Busy(0.0, ""))
    assert main(["bench", "concurrent", "-m", str(TINY), "--json"]) == INTERRUPTED
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["num_chats"], row["ratio"]) == (1, pytest.approx(12 / 11))


def test_a_model_that_cannot_be_run_is_not_pulled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("models.catalog.ARCHITECTURES", {"gemma3": "models.gemma3"})
    assert main(["models", "list"]) == OK
    listed = capsys.readouterr().out.splitlines()
    assert "Apache-2.0  architecture llama is not supported" in next(
        line for line in listed if line.startswith("smollm2-135m ")
    )
    assert main(["models", "pull", "smollm2-135m"]) == BAD_MODEL
    assert capsys.readouterr().err.startswith("foretell: smollm2-135m: architecture llama is not")


@pytest.mark.parametrize(("code", "expected"), [(0, OK), (None, OK), (1, FAILURE)])
def test_a_screen_that_failed_leaves_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, code: int | None, expected: int
) -> None:
    """A database that could not be opened, and a crash, left with 0."""
    monkeypatch.setattr("app.cli.commands.is_terminal", lambda stream: True)
    monkeypatch.setattr("app.app.ForetellApp.run", lambda app: setattr(app, "_return_code", code))
    assert main(["chat"]) == expected


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (
            DownloadProgress(42_000_000, 98_000_000, 5e6),
            "42 MB of 98 MB · 43% · 5 MB/s · 11 s left",
        ),
        (
            DownloadProgress(42_000_000, 98_000_000, stage="stalled", note="next try in 8 s"),
            "42 MB of 98 MB · 43% · stalled: next try in 8 s",
        ),
    ],
)
def test_a_pull_says_how_far_it_is_and_why_it_waits(
    monkeypatch: pytest.MonkeyPatch, progress: DownloadProgress, text: str
) -> None:
    def fetch(*args: object, on_progress: ReportProgress, **kwargs: object) -> Path:
        on_progress(progress)
        return TINY

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("storage.model_downloads.ModelDownloads.fetch", fetch)
    assert main(["models", "pull", "smollm2-135m"]) == OK
    assert terminal.getvalue() == f"\r{text}\ninstalled {TINY}\n"
