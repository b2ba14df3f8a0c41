"""The status line at every width."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.cells import cell_len

from app.widgets.status_bar import Status, compose_status, format_tokens
from engine.events import TurnStats
from tests.app.app_fixtures import open_stage
from tests.app.fake_engine import FakeEngine

BUSY = Status(
    model="smollm2-135m",
    phase="answering",
    stats=TurnStats(
        completion_tokens=101,
        decode_ms=2_000.0,
        draft_n=350,
        draft_n_accepted=200,
        governor_state="holding",
    ),
    context_used=1204,
    context_len=8192,
    algorithm="ngram",
)


def test_at_80_columns_everything_is_there() -> None:
    line = compose_status(BUSY, 80).plain
    for part in ("smollm2-135m", "answering", "50.0 tok/s", "1.2k/8.2k", "200/350 57%", "holding"):
        assert part in line
    assert cell_len(line) <= 80


def test_at_40_columns_state_speed_and_context_remain() -> None:
    line = compose_status(BUSY, 40).plain
    for part in ("answering", "50.0 tok/s", "1.2k/8.2k"):
        assert part in line
    assert cell_len(line) <= 40


@pytest.mark.parametrize("width", range(1, 100))
def test_the_line_never_exceeds_its_width(width: int) -> None:
    wide = dataclasses.replace(BUSY, model="模型" * 20, num_elsewhere=3)
    assert cell_len(compose_status(wide, width).plain) <= width


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(phase="loading", fraction=0.42), "loading 42%"),
        (Status(phase="reading", fraction=0.3), "reading 30%"),
        (Status(phase="no model"), "no model"),
        (dataclasses.replace(BUSY, is_spec_enabled=False), "spec off"),
        (dataclasses.replace(BUSY, num_elsewhere=2), "+2 elsewhere"),
        (Status(algorithm=None, declined="no draft head"), "nothing drafts"),
    ],
)
def test_each_state_has_its_words(status: Status, text: str) -> None:
    assert text in compose_status(status, 120).plain


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1204, "1.2k"), (131_072, "131k")]
)
def test_token_counts_are_short(count: int, text: str) -> None:
    assert format_tokens(count) == text


def test_nothing_in_the_line_is_markup() -> None:
    assert "[red]x[/" in compose_status(Status(model="[red]x[/", phase="ready"), 60).plain


async def test_a_model_that_drafts_nothing_as_it_was_asked_to_says_so(tmp_path: Path) -> None:
    engine = FakeEngine(loads_by_itself=False)
    async with open_stage(tmp_path, engine=engine) as stage:
        engine.finish_load(algorithm=None, declined="draft-head needs a draft head")
        await stage.settle()
        assert "spec on, nothing drafts" in stage.words
