"""Settings: one tree, four sources, every mistake named."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from app.settings import (
    OLLAMA_SERVICE_MODELS,
    Settings,
    SettingsError,
    SettingsFile,
    load_settings,
    parse_value,
    read_environment,
    replace_setting,
    save_settings,
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_defaults_hold_without_a_file(tmp_path: Path) -> None:
    assert load_settings(tmp_path / "config.toml", {}) == Settings()


def test_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", 'model = "a"\nthreads = 3\n[sampling]\ntop_k = 7\n')
    settings = load_settings(path, {"FORETELL_MODEL": "b"})
    assert (settings.model, settings.threads, settings.sampling.top_k) == ("b", 3, 7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = 1", ["unknown setting 'colour'", "theme"]),
        ("[sampling]\ntop_q = 1", ["unknown setting 'sampling.top_q'"]),
        ("threads = 'two'", ["threads = 'two'", "wrong type"]),
        ("threads = true", ["threads = True", "wrong type"]),
        ("threads = -1", ["threads -1"]),
        ("threads = 100000", ["threads 100000", "1024"]),
        ("[sampling]\ntop_p = 3.0", ["top-p 3.0"]),
        ("[speculation]\nwindow = 65", ["spec-draft 65"]),
        ("think = 'perhaps'", ["'perhaps'", "auto, on, off"]),
        ("backend = 'abacus'", ["'abacus'", "native"]),
        ("model = ", ["cannot read settings"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path / "c.toml", text)
    with pytest.raises(SettingsError) as caught:
        load_settings(path, {})
    shown = f"{caught.value} {caught.value.hint}"
    assert all(word in shown for word in [*words, "c.toml"])


@pytest.mark.parametrize(
    ("variable", "text"),
    [("FORETELL_SPEC_DRAFT", "many"), ("FORETELL_SPEC", "maybe"), ("FORETELL_SPEC_PMIN", "7")],
)
def test_a_mistake_in_the_environment_is_named(tmp_path: Path, variable: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"{variable}={text}"):
        load_settings(tmp_path / "none.toml", {variable: text})


def test_s43_every_speculation_flag_has_its_variable(tmp_path: Path) -> None:
    env = {
        "FORETELL_SPEC": "0",
        "FORETELL_SPEC_TYPE": "ngram",
        "FORETELL_SPEC_DRAFT": "5",
        "FORETELL_SPEC_PMIN": "0.25",
        "FORETELL_SPEC_DRAFT_MODEL": "d.gguf",
        "FORETELL_SPEC_GOVERNOR": "off",
    }
    spec = load_settings(tmp_path / "none.toml", env).speculation
    assert (spec.is_enabled, spec.algorithm, spec.window) == (False, "ngram", 5)
    assert (spec.min_draft_prob, spec.drafter_path, spec.use_governor) == (0.25, "d.gguf", False)


def test_saved_settings_come_back_and_comments_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "# mine\nthreads = 2 # two\n")
    settings = replace_setting(load_settings(path, {}), "sampling.temperature", 0.1)
    save_settings(path, settings)
    assert load_settings(path, {}) == settings
    assert "# mine" in path.read_text("utf-8")


def test_a_setting_back_at_its_default_leaves_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "threads = 2\n[speculation]\nwindow = 3\n")
    save_settings(path, Settings())
    text = path.read_text("utf-8")
    assert "threads" not in text
    assert "window" not in text


@pytest.mark.skipif(sys.platform == "win32", reason="no POSIX modes")
def test_settings_are_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c.toml"
    save_settings(path, replace_setting(Settings(), "system_prompt", "secret"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_token_is_never_shown(tmp_path: Path) -> None:
    environment = read_environment({"HF_TOKEN": "hf_secret", "HOME": str(tmp_path)})
    assert "hf_secret" not in repr(environment)


def test_hub_folders_follow_the_hubs_own_variables(tmp_path: Path) -> None:
    home = str(tmp_path)
    assert read_environment({"HOME": home}).hf_cache == tmp_path / ".cache/huggingface/hub"
    assert read_environment({"HOME": home, "HF_HOME": "/x"}).hf_cache == Path("/x/hub")
    assert read_environment({"HOME": home, "HF_HUB_CACHE": "/y"}).hf_cache == Path("/y")


def test_ollamas_service_is_looked_for_beside_the_persons_own_store(tmp_path: Path) -> None:
    """Its models were not found: on Linux the installer makes a system account for them."""
    own = tmp_path / ".ollama/models"
    assert read_environment({"HOME": str(tmp_path)}).ollama_models == (own, OLLAMA_SERVICE_MODELS)
    env = {"HOME": str(tmp_path), "OLLAMA_MODELS": "/z"}
    assert read_environment(env).ollama_models == (Path("/z"),)


def test_an_optional_number_can_be_cleared() -> None:
    assert parse_value("auto", int | None) is None
    assert parse_value("7", int | None) == 7


def test_folders_of_models_are_a_list(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", 'model_folders = ["/a", "/b"]\n')
    settings = load_settings(path, {})
    assert settings.model_folders == ("/a", "/b")
    save_settings(path, settings)
    assert load_settings(path, {}) == settings
    with pytest.raises(SettingsError, match="wrong type"):
        load_settings(write(path, 'model_folders = "/a"\n'), {})


def test_the_token_of_a_login_is_found(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "huggingface"
    folder.mkdir(parents=True)
    (folder / "token").write_text("hf_login\n")
    assert read_environment({"HOME": str(tmp_path)}).hf_token == "hf_login"
    assert read_environment({"HOME": str(tmp_path), "HF_TOKEN": "hf_env\n"}).hf_token == "hf_env"
    assert read_environment({"HOME": str(tmp_path), "HF_TOKEN": " \n"}).hf_token == "hf_login"


def test_the_programs_own_word_about_being_offline_wins(tmp_path: Path) -> None:
    """FORETELL_OFFLINE=1 was undone by HF_HUB_OFFLINE=0."""
    env = {"FORETELL_OFFLINE": "1", "HF_HUB_OFFLINE": "0"}
    assert load_settings(tmp_path / "c.toml", env).offline


def test_a_file_that_broke_meanwhile_is_not_saved_over(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "threads = = 3\n")
    with pytest.raises(SettingsError, match="cannot read settings"):
        save_settings(path, Settings(threads=2))
    assert path.read_text("utf-8") == "threads = = 3\n"


def test_only_what_a_person_changed_is_saved(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "threads = 2\n")
    stored = load_settings(path, {})
    shown = replace_setting(stored, "sampling.temperature", 0.9)  # a flag of this run
    file = SettingsFile(path, shown)
    changed = replace_setting(shown, "speculation.is_enabled", False)
    file.save(changed)
    assert load_settings(path, {}) == replace_setting(stored, "speculation.is_enabled", False)
    file.save(shown)  # and back again
    assert load_settings(path, {}) == stored


def test_the_editor_is_the_visual_one_first() -> None:
    assert read_environment({"VISUAL": "code -w", "EDITOR": "vi"}).editor == "code -w"
    assert read_environment({"EDITOR": "vi"}).editor == "vi"
