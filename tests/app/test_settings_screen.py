"""The settings form: every field, its checks, and when a change acts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from textual.widgets import Input, Select, Switch, TextArea

from app.screens.settings import SECTIONS, SettingRow, SettingsScreen, read_setting
from app.settings import SamplingSettings, Settings
from engine.commands import LoadModel, UpdateSpeculation
from engine.speculative.options import SpeculationOptions
from tests.app.app_fixtures import SMOL, FakeLibrary, Stage, open_stage


async def open_settings(stage: Stage) -> SettingsScreen:
    await stage.pilot.press("f2")
    await stage.settle()
    screen = stage.app.screen
    assert isinstance(screen, SettingsScreen)
    return screen


def find_row(screen: SettingsScreen, key: str) -> SettingRow:
    return next(row for row in screen.query(SettingRow) if row.field.key == key)


async def enter(stage: Stage, key: str, text: str) -> None:
    screen = stage.app.screen
    assert isinstance(screen, SettingsScreen)
    control = find_row(screen, key).control
    assert isinstance(control, Input)
    control.focus()
    control.value = text
    await stage.pilot.press("enter")
    await stage.settle()


def test_every_sampling_and_speculation_field_is_in_the_form() -> None:
    keys = {field.key for section in SECTIONS for field in section.fields}
    for part, kind in (("sampling", SamplingSettings), ("speculation", SpeculationOptions)):
        assert {f"{part}.{field.name}" for field in dataclasses.fields(kind)} <= keys
    plain = {f.name for f in dataclasses.fields(Settings)} - {"model", "sampling", "speculation"}
    assert plain <= keys, "the model is chosen on its own screen"


async def test_opening_the_settings_changes_nothing(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await open_settings(stage)
        await stage.pilot.press("escape")
        await stage.settle()
        assert stage.saved == []
        assert stage.engine.sent(UpdateSpeculation) == []
        assert len(stage.engine.sent(LoadModel)) == 1


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("sampling.temperature", "0", 0.0),
        ("sampling.top_k", "7", 7),
        ("sampling.seed", "42", 42),
        ("speculation.window", "4", 4),
        ("speculation.min_draft_prob", "0.5", 0.5),
        ("threads", "2", 2),
        ("cache_budget_mb", "512", 512),
    ],
)
async def test_a_valid_value_is_used_and_saved_at_once(
    tmp_path: Path, key: str, text: str, value: object
) -> None:
    async with open_stage(tmp_path) as stage:
        await open_settings(stage)
        await enter(stage, key, text)
        assert read_setting(stage.saved[-1], key) == value


async def test_what_the_publisher_recommends_stands_in_the_empty_fields(tmp_path: Path) -> None:
    library = FakeLibrary(models=[SMOL], recommendations={SMOL.name: {"temperature": 0.25}})
    async with open_stage(tmp_path, library=library) as stage:
        await open_settings(stage)
        assert "0.25 (publisher)" in stage.text
        assert "0.9 (default)" in stage.text
        await enter(stage, "sampling.temperature", "0.25")
        assert stage.saved[-1].sampling.temperature == 0.25
        await enter(stage, "sampling.temperature", "")
        assert stage.saved[-1].sampling.temperature is None


async def test_model_folders_are_a_line_each(tmp_path: Path) -> None:
    async with open_stage(tmp_path, settings=Settings(model_folders=("/a",))) as stage:
        screen = await open_settings(stage)
        control = find_row(screen, "model_folders").control
        assert isinstance(control, TextArea)
        control.text += "\n\n /b c "
        await stage.pilot.press("escape")
        await stage.settle()
        assert stage.saved[-1].model_folders == ("/a", "/b c")


async def test_thinking_and_the_backend_are_chosen_from_what_there_is(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        screen = await open_settings(stage)
        for key, value in (("think", "off"), ("backend", "native")):
            control = find_row(screen, key).control
            assert isinstance(control, Select)
            control.value = value
            await stage.settle()
            assert read_setting(stage.saved[-1], key) == value


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("sampling.temperature", "-1", "temperature -1.0 is out of range: use 0 to 100"),
        ("sampling.top_p", "1.5", "top-p 1.5 is out of range: use above 0, up to 1"),
        ("sampling.top_k", "many [/", "Top-k 'many [/' is not a whole number"),
        ("speculation.window", "65", "spec-draft 65 is out of range: use 1 to 64"),
        ("speculation.min_draft_prob", "2", "spec-pmin 2.0 is out of range: use 0 to 1"),
        ("context_len", "3", "context_len 3 is too small: use 8 tokens or more"),
    ],
)
async def test_a_wrong_value_is_refused_with_the_reason(
    tmp_path: Path, key: str, text: str, message: str
) -> None:
    async with open_stage(tmp_path) as stage:
        await open_settings(stage)
        await enter(stage, key, text)
        assert message in stage.text
        assert stage.saved == []
        await stage.pilot.press("escape", "escape")
        await stage.settle()
        assert not isinstance(stage.app.screen, SettingsScreen)
        assert stage.app.settings == stage.app.services.settings


async def test_an_empty_field_means_automatic(tmp_path: Path) -> None:
    settings = Settings(speculation=SpeculationOptions(window=4))
    async with open_stage(tmp_path, settings=settings) as stage:
        await open_settings(stage)
        await enter(stage, "speculation.window", "")
        assert stage.saved[-1].speculation.window is None


async def test_the_speculation_switch_acts_on_the_running_answer(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("go")
        stage.engine.begin()
        stage.engine.say("text")
        screen = await open_settings(stage)
        control = find_row(screen, "speculation.is_enabled").control
        assert isinstance(control, Switch)
        control.toggle()
        await stage.settle()
        (update,) = stage.engine.sent(UpdateSpeculation)
        assert not update.options.is_enabled
        assert len(stage.engine.sent(LoadModel)) == 1
        stage.engine.say(" goes on")
        stage.engine.finish()
        await stage.settle()
        assert stage.store.messages(stage.chat_id)[-1].content == "text goes on"


async def test_the_algorithms_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        screen = await open_settings(stage)
        control = find_row(screen, "speculation.algorithm").control
        assert isinstance(control, Select)
        control.value = "ngram"
        await stage.settle()
        assert stage.engine.sent(UpdateSpeculation)[-1].options.algorithm == "ngram"


async def test_a_theme_is_used_and_saved(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        screen = await open_settings(stage)
        control = find_row(screen, "theme").control
        assert isinstance(control, Select)
        control.value = "textual-light"
        await stage.settle()
        assert stage.app.theme == "textual-light"
        assert stage.saved[-1].theme == "textual-light"


async def test_the_system_prompt_is_the_first_message_of_new_chats(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        screen = await open_settings(stage)
        control = find_row(screen, "system_prompt").control
        assert isinstance(control, TextArea)
        control.text = "Answer in [French]."
        await stage.pilot.press("escape")
        await stage.settle()
        await stage.ask("hi")
        assert stage.engine.request().prompt[0].content == "Answer in [French]."  # type: ignore[union-attr]


async def test_another_context_size_loads_the_model_again(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await open_settings(stage)
        await enter(stage, "context_len", "2048")
        assert [load.context_len for load in stage.engine.sent(LoadModel)] == [None, 2048]
