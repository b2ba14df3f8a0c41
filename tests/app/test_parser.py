"""The command line: names are a contract, mistakes are one line with exit code 2."""

from __future__ import annotations

import argparse

import pytest

from app.cli.flags import sampling_from, settings_from
from app.cli.main import main
from app.cli.output import USAGE, CommandFailed
from app.cli.parser import build_parser
from app.settings import Settings
from engine.sampling_params import SamplingParams


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(list(argv))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--mtp-spec", "--spec"),
        ("--mtp-draft=4", "--spec-draft"),
        ("--mtp-pmin", "--spec-pmin"),
        ("--mtp-draft-model", "--draft-model"),
        ("--spec-draft-model", "--draft-model"),
    ],
)
def test_s44_an_old_spelling_fails_and_names_its_replacement(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "hi", old]) == USAGE
    assert f"use {new}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--speed", "--temp=x", "--spec-type=magic", "--max-tok=3"])
def test_s44_unknown_flags_and_values_fail_in_one_line(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "hi", flag]) == USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_s43_speculation_flags_reach_the_settings() -> None:
    args = parse(
        *("ask", "hi", "--no-spec", "--spec-type", "ngram", "--spec-draft", "3"),
        *("--spec-pmin", "0.5", "--draft-model", "d.gguf", "--no-governor"),
    )
    spec = settings_from(args, Settings()).speculation
    assert (spec.is_enabled, spec.algorithm, spec.window) == (False, "ngram", 3)
    assert (spec.min_draft_prob, spec.drafter_path, spec.use_governor) == (0.5, "d.gguf", False)


def test_s43_a_window_out_of_range_is_a_usage_error() -> None:
    with pytest.raises(CommandFailed, match="spec-draft 65") as caught:
        settings_from(parse("ask", "hi", "--spec-draft", "65"), Settings())
    assert caught.value.exit_code == USAGE


def test_flags_that_are_zero_count_as_given() -> None:
    settings = settings_from(parse("ask", "x", "--temp", "0", "--top-k", "0"), Settings())
    assert (settings.sampling.temperature, settings.sampling.top_k) == (0.0, 0)


def test_without_a_seed_each_answer_draws_its_own() -> None:
    args = parse("ask", "x")
    assert sampling_from(args, Settings(), {}).seed != sampling_from(args, Settings(), {}).seed


def test_the_switch_for_thinking_is_a_setting_where_it_is_given() -> None:
    assert settings_from(parse("chat", "--think"), Settings()).think == "on"
    assert settings_from(parse("ask", "x", "--no-think"), Settings()).think == "off"
    assert settings_from(parse("ask", "x"), Settings(think="on")).think == "on"


def test_flags_beat_the_publisher_who_beats_the_defaults() -> None:
    args = parse("ask", "x", "--temp", "0.1", "--seed", "4")
    settings = settings_from(args, Settings())
    sampling = sampling_from(args, settings, {"temperature": 0.6, "top_k": 20})
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.1, 20, 4)
    assert sampling.top_p == SamplingParams().top_p


def test_token_lists_name_what_is_no_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "logits", "m.gguf", "--tokens", "1,x", "--out", "f"]) == USAGE
    assert "'x' is not a token id" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_the_commands(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    assert "diagnose" in capsys.readouterr().out


def test_version_and_help_leave_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["--help"]) == 0
    assert "foretell" in capsys.readouterr().out
