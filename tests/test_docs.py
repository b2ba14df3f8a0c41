"""The documents say what the program does: commands, settings, files, ledger."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

from app.cli.main import VERSION
from app.cli.parser import build_parser
from app.settings import _ENVIRONMENT, Settings
from engine.sampling_params import SamplingParams
from engine.speculative.options import SpeculationOptions
from models.architectures import ARCHITECTURES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")

LEDGER_ROW = re.compile(r"\| (S\d\d) \| (.+?) \| (.+?) \| (done|open|partly) ?(.*?)\|")


@functools.cache
def known_tests() -> dict[str, str]:
    """Name -> file of every test function."""
    names = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names[node.name] = path.relative_to(ROOT).as_posix()
    return names


def ledger() -> list[tuple[str, str, str, str, str]]:
    return [match.groups() for match in LEDGER_ROW.finditer(ARCHITECTURE)]  # type: ignore[misc]


def test_the_ledger_lists_every_behaviour_once() -> None:
    ids = [row[0] for row in ledger()]
    expected = [f"S{n:02d}" for n in (*range(1, 59), *range(60, 66), 70)]
    assert ids == expected


@pytest.mark.parametrize("row", ledger(), ids=lambda row: row[0])
def test_a_done_behaviour_has_a_test_named_after_it(row: tuple[str, ...]) -> None:
    row_id, _, tests, state, _ = row
    named = re.findall(r"`(test_\w+)`", tests)
    known = known_tests()
    assert all(name in known for name in named), f"{row_id} names tests that do not exist"
    if state == "done":
        assert any(name.startswith(f"test_{row_id.lower()}_") for name in named)


def test_every_command_is_in_the_readme() -> None:
    parser = build_parser()
    (commands,) = [a for a in parser._actions if hasattr(a, "choices") and a.dest == "command"]
    assert commands.choices is not None
    missing = [name for name in commands.choices if f"foretell {name}" not in README]
    assert not missing


def test_every_setting_and_variable_is_in_the_readme() -> None:
    names = [
        field.name
        for kind in (Settings, SamplingParams, SpeculationOptions)
        for field in dataclasses.fields(kind)
        if not dataclasses.is_dataclass(getattr(kind(), field.name))
    ]
    missing = [name for name in (*names, *_ENVIRONMENT) if name not in README]
    assert not missing


def test_every_make_target_is_in_the_contributing_page() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    named = README + CONTRIBUTING
    assert not [target for target in phony.split() if f"make {target}" not in named]


def test_the_version_is_the_packages() -> None:
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_the_readme_names_the_architectures_that_run() -> None:
    sentence = README[README.index("Architectures that run:") :].split(" with its")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(ARCHITECTURES)
