"""What is typed behind a slash, and the palette, which offers the same."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from app.screens.help import HelpScreen
from app.screens.settings import SettingsScreen
from app.services import InstalledModel
from app.slash import SlashCommand, escape, parse_slash, unescape
from engine.commands import LoadModel, SubmitTurn
from storage.chats import ChatStore
from storage.errors import StorageError
from tests.app.app_fixtures import SMOL, FakeLibrary, Stage, open_stage


async def enter(stage: Stage, text: str) -> None:
    await stage.type(text)
    await stage.pilot.press("enter")
    await stage.settle()


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("/help", SlashCommand("help")),
        (" /Model  Qwen3 ", SlashCommand("model", "Qwen3")),
        ("/system be\nbrief", SlashCommand("system", "be\nbrief")),
        ("/usr/bin is a folder", None),
        ("/", None),
        ("/* a comment */", None),
        ("//help", None),
        ("half /2", None),
    ],
)
def test_a_word_behind_a_slash_is_a_command(typed: str, command: SlashCommand | None) -> None:
    assert parse_slash(typed) == command


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("//help", "/help"),
        ("\n //bye now", "\n /bye now"),
        ("///help", "//help"),
        ("a //b", "a //b"),
        ("// TODO: tidy up", "// TODO: tidy up"),
        ("//usr/bin", "//usr/bin"),
    ],
)
def test_two_slashes_before_a_word_are_one_in_the_message(typed: str, sent: str) -> None:
    assert unescape(typed) == sent
    assert escape(sent) == typed


async def test_an_unknown_command_is_said_and_stays_in_the_prompt(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, "/frobnicate now")
        assert "no command /frobnicate" in stage.notices
        assert stage.app.chat_screen.prompt.text == "/frobnicate now"
        assert not stage.engine.sent(SubmitTurn)


async def test_an_escaped_slash_is_sent_as_text(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, "//bye is a word")
        assert stage.engine.request().prompt[-1].content == "/bye is a word"  # type: ignore[union-attr]


async def test_an_escaped_message_that_comes_back_is_no_command(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, "//bye")
        stage.engine.fail("the device is gone")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "//bye"
        await stage.pilot.press("enter")
        await stage.settle()
        stage.engine.answer("Bye.")
        await stage.settle()
        await stage.pilot.press("up", "enter")
        await stage.settle()
        turns = stage.engine.sent(SubmitTurn)
        assert [turn.prompt[-1].content for turn in turns] == ["/bye"] * 3


async def test_what_was_typed_behind_a_command_survives_a_store_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(ChatStore, "set_system_prompt", fail)
    async with open_stage(tmp_path) as stage:
        await enter(stage, "/system a long instruction")
        assert stage.app.chat_screen.prompt.text == "/system a long instruction"
        assert "the disk is full" in stage.notices


async def test_what_was_written_in_a_dialog_survives_a_store_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(ChatStore, "set_system_prompt", fail)
    monkeypatch.setattr(ChatStore, "edit_message", fail)
    async with open_stage(tmp_path) as stage:
        await stage.ask("one")
        stage.engine.answer("ok")
        await stage.settle()
        await stage.pilot.press("ctrl+up", "ctrl+up", "e")
        await stage.settle()
        await stage.pilot.press("!", "f10")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "one!"
        stage.app.chat_screen.prompt.text = ""
        stage.app.chat_screen.prompt.area.focus()
        await enter(stage, "/system")
        await stage.pilot.press("x", "f10")
        await stage.settle()
        assert stage.app.chat_screen.prompt.text == "/system x"


async def test_commands_that_are_carried_out_leave_an_empty_prompt(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, "/help")
        assert isinstance(stage.app.screen, HelpScreen)
        assert "/export [PATH]" in stage.app.chat_screen.commands.describe()
        await stage.pilot.press("escape")
        await enter(stage, "/settings")
        assert isinstance(stage.app.screen, SettingsScreen)
        assert stage.app.chat_screen.prompt.text == ""


async def test_bye_leaves(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.type("/bye")
        await stage.pilot.press("enter")
        await stage.pilot.pause()
        assert stage.app._exit


@pytest.mark.parametrize(
    "typed", ["/think perhaps", "/spec maybe", "/new now", "/export", "/delete"]
)
async def test_a_command_that_cannot_be_says_why_and_stays(tmp_path: Path, typed: str) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, typed)
        assert stage.notices
        assert stage.app.chat_screen.prompt.text == typed


async def test_thinking_is_switched_for_the_next_answer(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        for word, think in (("off", False), ("on", True), ("auto", None)):
            await enter(stage, f"/think {word}")
            await stage.ask("x")
            assert stage.engine.sent(SubmitTurn)[-1].think is think
            assert stage.saved[-1].think == word
            stage.engine.answer("ok")
            await stage.settle()


async def test_a_model_without_a_switch_for_thinking_is_said(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        stage.engine.finish_load(has_thinking_switch=False)
        await stage.settle()
        await enter(stage, "/think on")
        assert "which smollm2-135m has not" in stage.notices


async def test_speculation_is_switched_to_what_was_said(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, "/spec off")
        await enter(stage, "/spec off")
        assert not stage.app.settings.speculation.is_enabled
        await enter(stage, "/spec on")
        assert stage.app.settings.speculation.is_enabled


async def test_a_model_is_loaded_by_name_and_an_unknown_one_changes_nothing(
    tmp_path: Path,
) -> None:
    other = InstalledModel("qwen3-8b", Path("/models/q.gguf"), 5, "qwen3")
    library = FakeLibrary(models=[SMOL, other])
    async with open_stage(tmp_path, library=library) as stage:
        await enter(stage, "/model nobody")
        assert "no model nobody here" in stage.notices
        assert stage.app.model.phase == "ready"
        await enter(stage, "/model qwen3-8b")
        assert [load.name for load in stage.engine.sent(LoadModel)] == [SMOL.name, "qwen3-8b"]
        assert stage.saved[-1].model == "qwen3-8b"


async def test_a_model_chosen_by_its_path_is_found_again_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.gguf"
    library = FakeLibrary(models=[SMOL, InstalledModel("elsewhere", path, 5, "llama")])
    async with open_stage(tmp_path, library=library) as stage:
        await enter(stage, f"/model {path}")
        assert stage.app.model.name == "elsewhere"
        assert stage.saved[-1].model == str(path)


async def test_a_chats_system_prompt_is_changed_for_this_chat_only(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, "/system answer in\nverse")
        await stage.ask("why")
        (message, _) = stage.engine.request().prompt
        assert (message.role, message.content) == ("system", "answer in\nverse")  # type: ignore[union-attr]
        stage.engine.answer("ok")
        await stage.pilot.press("ctrl+n")
        await stage.ask("and here")
        assert len(stage.engine.request().prompt) == 1


async def test_the_system_prompt_can_be_looked_at_and_emptied(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, "/system be brief")
        await enter(stage, "/system")
        assert "be brief" in stage.text
        await stage.pilot.press("ctrl+a", "ctrl+k")
        await stage.pilot.press("f10")
        await stage.settle()
        assert stage.store.get(stage.chat_id).system_prompt == ""


async def test_a_file_becomes_a_chip_and_is_sent_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "two words.txt").write_text("first\r\nsecond\n", "utf-8")
    async with open_stage(tmp_path) as stage:
        await enter(stage, f'/read "{tmp_path / "two words.txt"}"')
        assert "two words.txt" in stage.text
        assert stage.app.chat_screen.prompt.area.text == ""
        await enter(stage, "Summarise it")
        content = stage.engine.request().prompt[-1].content  # type: ignore[union-attr]
        assert content == "two words.txt:\n\nfirst\nsecond\n\n\nSummarise it"


async def test_a_command_leaves_what_is_attached(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", "utf-8")
    async with open_stage(tmp_path) as stage:
        await enter(stage, f"/read {tmp_path / 'a.txt'}")
        await enter(stage, "/spec off")
        assert len(stage.app.chat_screen.prompt.attachments) == 1


async def test_a_file_that_cannot_be_attached_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00\xff")
    (tmp_path / "null.txt").write_bytes(b"a\0b")
    (tmp_path / "big.txt").write_bytes(b"x" * 1_000_001)
    async with open_stage(tmp_path) as stage:
        for name, words in (
            ("image.png", "no text"),
            ("null.txt", "no text"),
            ("big.txt", "at most 1 MB"),
            ("gone.txt", "Cannot read"),
            ("", "is a folder"),
        ):
            stage.app.chat_screen.prompt.text = ""
            await enter(stage, f"/read {tmp_path / name}")
            assert words in stage.notices, name
            assert "\n" not in stage.notices.splitlines()[-1]
        assert not stage.app.chat_screen.prompt.attachments


async def test_a_chat_is_exported_for_its_owner_and_never_over_a_file(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("What is a cat?")
        stage.engine.answer("An animal.")
        await stage.settle()
        path = tmp_path / "out.md"
        await enter(stage, f"/export {path}")
        text = path.read_text("utf-8")
        assert "An animal." in text
        if sys.platform != "win32":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await enter(stage, f"/export {path}")
        assert "exists already" in stage.notices
        assert path.read_text("utf-8") == text


async def test_an_export_without_a_name_is_called_after_the_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_stage(tmp_path) as stage:
        await stage.ask("What is a cat?")
        stage.engine.answer("An animal.")
        await stage.settle()
        await enter(stage, "/export")
        await enter(stage, "/export")
        assert {p.name for p in tmp_path.glob("*.md")} == {
            "what-is-a-cat.md",
            "what-is-a-cat-2.md",
        }


async def test_an_export_into_a_folder_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    async with open_stage(tmp_path) as stage:
        await stage.ask("What is a cat?")
        stage.engine.answer("An animal.")
        await stage.settle()
        monkeypatch.setattr(Path, "cwd", fail)
        await enter(stage, "/export")
        assert "Cannot write into the working folder: No such file" in stage.notices
        assert stage.app.chat_screen.prompt.text == "/export"


async def test_a_model_is_named_by_the_address_it_came_from(tmp_path: Path) -> None:
    address = "https://example.org/m/tiny.gguf"
    asked: list[str] = []
    async with open_stage(tmp_path) as stage:
        find = stage.library.find
        stage.library.find = lambda name: asked.append(name) or find(name)  # type: ignore[method-assign, func-returns-value]
        await enter(stage, f"/model {address}")
        assert asked == [address]
        assert f"There is no model {address} here" in stage.notices


async def test_commands_are_hinted_and_completed(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.type("/mo")
        await stage.settle()
        assert "/model NAME · /models" in stage.words
        await stage.pilot.press("tab")
        assert stage.app.chat_screen.prompt.area.text == "/model"
        await stage.pilot.press("s", "tab")
        assert stage.app.chat_screen.prompt.area.text == "/models "


async def test_tab_elsewhere_goes_to_the_next_widget(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.type("text")
        await stage.pilot.press("tab")
        assert stage.app.focused is not stage.app.chat_screen.prompt.area


async def test_the_palette_offers_every_command(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        offered = [c.help for c in stage.app.get_system_commands(stage.app.screen)]
        hidden = {"bye", "model"}  # the palette's own Quit, and Models
        for name in set(stage.app.chat_screen.commands.names) - hidden:
            assert any(text.endswith(f" · /{name}") for text in offered), name


@pytest.mark.parametrize("command", ["/continue", "/regen", "/copy"])
async def test_what_needs_an_answer_says_that_there_is_none(tmp_path: Path, command: str) -> None:
    async with open_stage(tmp_path) as stage:
        await enter(stage, command)
        assert "There is no answer here yet" in stage.notices
        assert not stage.engine.sent(SubmitTurn)
