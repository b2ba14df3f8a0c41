"""What `foretell ask` prints where."""

from __future__ import annotations

import pytest

from app.cli.ask import AnswerPrinter
from app.thinking import find_opening

Printed = tuple[str, str]


def print_pieces(
    pieces: list[str],
    capsys: pytest.CaptureFixture[str],
    *,
    is_split: bool = True,
    shows_thinking: bool = True,
    shows_answer: bool = True,
) -> Printed:
    printer = AnswerPrinter(
        is_split=is_split, shows_thinking=shows_thinking, shows_answer=shows_answer
    )
    for piece in pieces:
        printer.take(piece)
    printer.end()
    return capsys.readouterr()


THOUGHT = ["<th", "ink>\nfirst", " this\n", "</think>", "\n\nParis", " it is"]


def test_only_the_answer_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_pieces(THOUGHT, capsys) == ("Paris it is\n", "first this\n\n")


def test_nobody_at_stderr_gets_no_thinking(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_pieces(THOUGHT, capsys, shows_thinking=False) == ("Paris it is\n", "")


def test_a_whole_answer_is_left_to_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    shown = print_pieces(THOUGHT, capsys, shows_thinking=False, shows_answer=False)
    assert shown == ("", "")


def test_a_raw_prompts_text_is_not_split(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = print_pieces(THOUGHT, capsys, is_split=False)
    assert (out, err) == ("".join(THOUGHT) + "\n", "")


def test_a_thought_that_never_ends_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_pieces(THOUGHT[:2], capsys) == ("\n", "first\n")


def test_an_answer_is_printed_whole_when_a_thought_shows_late(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, _ = print_pieces(["a thought\n", "</think>\n", "Paris"], capsys)
    assert out.splitlines()[-1] == "Paris"


@pytest.mark.parametrize(
    ("tail", "opening"),
    [
        ("<think>\n", "<think>\n"),
        ("<|channel>thought\n", "<|channel>thought\n"),
        ("</think>\n\n", ""),
        ("<|im_start|>assistant\n", ""),
        ("", ""),
    ],
)
def test_a_thought_the_template_opened_is_known(tail: str, opening: str) -> None:
    assert find_opening(tail) == opening
