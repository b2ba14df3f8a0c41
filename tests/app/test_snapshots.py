"""How the screens look. After a wanted change: pytest --snapshot-update tests/app/test_snapshots.py"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from app.app import ForetellApp
from app.services import CatalogModel, DrafterChoice, InstalledModel
from app.settings import Settings
from tests.app.app_fixtures import SMOL, FakeLibrary, Stage, make_app, wait_for_start
from tests.app.fake_engine import FakeEngine

ANSWER = """The capital of France is **Paris**, on the river *Seine*.

1. about `2.1` million people
2. 20 *arrondissements*

```python
def greet(name: str) -> str:
    return f"Bonjour, {name}!"
```

| City | River |
|------|-------|
| Paris | Seine |
"""

MODELS = FakeLibrary(
    models=[
        SMOL,
        InstalledModel(
            "qwen3-8b",
            Path("/models/qwen3-8b.gguf"),
            5_027_783_488,
            "qwen3 Q4_K_M",
            drafters=(DrafterChoice("smollm2-draft", 98_362_432, None, "another vocabulary"),),
        ),
        InstalledModel("llama3.2-3b", Path("/o"), 2_019_377_696, "llama Q4_K_M", "Ollama", False),
    ],
    entries=[
        CatalogModel("gemma3-270m", "Gemma 3 270M", 253_113_024, "Gemma", part_bytes=90_000_000),
        CatalogModel(
            "llama3.3-70b",
            "Llama 3.3 70B",
            42_520_000_000,
            "Llama",
            refusal="needs 45 GB, 8 GB are free",
        ),
    ],
)

Run = Callable[[Pilot[None]], Awaitable[None]]
SnapCompare = Callable[..., bool]


def make(
    tmp_path: Path, theme: str, library: FakeLibrary | None = None
) -> tuple[ForetellApp, FakeEngine]:
    engine = FakeEngine()
    settings = Settings(theme=theme, system_prompt="")
    return make_app(tmp_path, engine=engine, settings=settings, library=library), engine


def stage_of(app: ForetellApp, pilot: Pilot[Any], engine: FakeEngine) -> Stage:
    app.chat_screen.prompt.area.cursor_blink = False
    return Stage(app, pilot, engine, FakeLibrary(), app.conversations.store, [])


def chat(app: ForetellApp, engine: FakeEngine) -> Run:
    async def run(pilot: Pilot[None]) -> None:
        await wait_for_start(app, pilot)
        stage = stage_of(app, pilot, engine)
        await stage.settle()
        await stage.ask("Tell me a joke about compilers")
        stage.engine.answer("Too many unresolved issues.")
        await stage.pilot.press("ctrl+n")
        await stage.ask("What is the capital of [France]?")
        counters = {"draft_n": 35, "draft_n_accepted": 20, "governor_state": "holding"}
        stage.engine.begin()
        stage.engine.say(f"<think>\nEasy.\n</think>\n\n{ANSWER}", **counters)
        stage.engine.finish()
        await stage.settle()
        await stage.ask("And of Japan?")
        stage.engine.begin()
        stage.engine.say("The capital of Japan is", **counters)
        await stage.settle()

    return run


def press(app: ForetellApp, engine: FakeEngine, *keys: str) -> Run:
    async def run(pilot: Pilot[None]) -> None:
        await wait_for_start(app, pilot)
        stage = stage_of(app, pilot, engine)
        await stage.settle()
        await pilot.press(*keys)
        await stage.settle()
        await stage.settle()

    return run


@pytest.mark.parametrize(
    ("theme", "size"),
    [("foretell-dark", (100, 36)), ("foretell-light", (80, 30)), ("foretell-dark", (40, 14))],
    ids=["dark", "light", "narrow"],
)
def test_a_chat_looks_so(
    snap_compare: SnapCompare, tmp_path: Path, theme: str, size: tuple[int, int]
) -> None:
    app, engine = make(tmp_path, theme)
    assert snap_compare(app, run_before=chat(app, engine), terminal_size=size)


def test_the_settings_look_so(snap_compare: SnapCompare, tmp_path: Path) -> None:
    app, engine = make(tmp_path, "foretell-dark")
    assert snap_compare(app, run_before=press(app, engine, "f2"), terminal_size=(90, 32))


def test_the_models_look_so(snap_compare: SnapCompare, tmp_path: Path) -> None:
    app, engine = make(tmp_path, "foretell-light", MODELS)
    run = press(app, engine, "f3", "down")
    assert snap_compare(app, run_before=run, terminal_size=(90, 14))


def test_the_first_run_looks_so(snap_compare: SnapCompare, tmp_path: Path) -> None:
    app, engine = make(tmp_path, "foretell-dark", FakeLibrary())
    assert snap_compare(app, run_before=press(app, engine), terminal_size=(80, 16))


def test_the_help_looks_so(snap_compare: SnapCompare, tmp_path: Path) -> None:
    app, engine = make(tmp_path, "foretell-dark")
    assert snap_compare(app, run_before=press(app, engine, "f1"), terminal_size=(90, 48))
