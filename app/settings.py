"""The settings tree: defaults < config.toml < environment < flags.

The only module that reads the environment. A value out of range or a key nobody knows is an error
with the place it came from. Nothing here imports a heavy package, so that `--help` and the first
paint stay quick.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import tomlkit
from tomlkit.exceptions import TOMLKitError

from engine.errors import EngineError
from engine.sampling_params import SamplingParams
from engine.speculative.options import SpeculationOptions

T = TypeVar("T")

DEFAULT_MODEL = "smollm2-135m"
THINK = {"auto": None, "on": True, "off": False}
"""What a person sets -> what the chat template is told; None leaves it to the template."""
BACKENDS = ("auto", "native", "torch", "cuda", "mlx")
MAX_THREADS = 1024
"""Above any machine's cores; 100000 threads took the system minutes to start."""
MAX_BUDGET_MB = 1 << 24
"""16 TiB."""

OLLAMA_SERVICE_MODELS = Path("/usr/share/ollama/.ollama/models")
"""Source: Ollama's Linux installer, which runs it as a service with this home."""

_PLATFORM_EDITOR = "notepad" if sys.platform == "win32" else ""

# In this order: the program's own word about being offline comes last, and wins.
_ENVIRONMENT: Mapping[str, str] = {
    "FORETELL_MODEL": "model",
    "FORETELL_BACKEND": "backend",
    "FORETELL_THREADS": "threads",
    "FORETELL_THINK": "think",
    "HF_HUB_OFFLINE": "offline",
    "FORETELL_OFFLINE": "offline",
    "FORETELL_SPEC": "speculation.is_enabled",
    "FORETELL_SPEC_TYPE": "speculation.algorithm",
    "FORETELL_SPEC_DRAFT": "speculation.window",
    "FORETELL_SPEC_PMIN": "speculation.min_draft_prob",
    "FORETELL_SPEC_DRAFT_MODEL": "speculation.drafter_path",
    "FORETELL_SPEC_GOVERNOR": "speculation.use_governor",
}


class SettingsError(Exception):
    """A setting cannot be used; the message names where it stands and its value."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The sampler as a person set it: None leaves a value to the publisher of the model."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises: EngineError naming the field and its value when one is out of range."""
        self.over({})

    def over(self, recommended: Mapping[str, float]) -> SamplingParams:
        """What was set, else what is recommended, else the engine's defaults."""
        chosen = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        known = {name: value for name, value in chosen.items() if value is not None}
        return SamplingParams(**{**recommended, **known})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a person can set, with where it takes effect."""

    model: str = DEFAULT_MODEL
    """Catalog name or path of the model that opens with the program."""
    context_len: int | None = None
    """Most tokens a chat may hold; None takes the model's own, bounded by memory."""
    system_prompt: str = "You are a helpful assistant. Answer briefly and correctly."
    """First message of new chats; empty leaves it to the model's template."""
    theme: str = "foretell-dark"
    """foretell-dark, foretell-light, or the name of a Textual theme."""
    backend: str = "auto"
    """Where models run: auto, native, torch, cuda, mlx."""
    threads: int = 0
    """Threads of the native backend; 0 takes the physical cores."""
    cache_budget_mb: int = 0
    """Memory for chat caches and checkpoints, MiB; 0 takes a share of what is free."""
    offline: bool = False
    """Refuse every connection."""
    model_folders: tuple[str, ...] = ()
    """Further folders of GGUF files, used in place."""
    think: str = "auto"
    """Whether models that can switch it think before they answer: auto, on, off."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)

    def __post_init__(self) -> None:
        """Raises: SettingsError naming the setting and its value when one is out of range."""
        if self.think not in THINK:
            raise SettingsError(f"think {self.think!r} is unknown", hint=f"use {', '.join(THINK)}")
        if self.backend not in BACKENDS:
            raise SettingsError(
                f"backend {self.backend!r} is unknown", hint=f"use {', '.join(BACKENDS)}"
            )
        for name, most in (("threads", MAX_THREADS), ("cache_budget_mb", MAX_BUDGET_MB)):
            if not 0 <= getattr(self, name) <= most:
                raise SettingsError(
                    f"{name} {getattr(self, name)} is out of range", hint=f"use 0 to {most}"
                )
        if self.context_len is not None and self.context_len < 8:
            raise SettingsError(
                f"context_len {self.context_len} is too small", hint="use 8 tokens or more"
            )


@dataclass(frozen=True, slots=True)
class Environment:
    """What is read from the environment beside settings."""

    home: Path | None
    """FORETELL_HOME: one folder for everything, or None for the platform's folders."""
    hf_endpoint: str
    hf_token: str | None = field(repr=False)
    hf_cache: Path
    ollama_models: tuple[Path, ...]
    lm_studio_models: Path
    editor: str
    """VISUAL, else EDITOR: a command line; empty where none is set."""
    peer_python: str | None = None
    """FORETELL_PEER_PYTHON: the Python that has llama-cpp-python, for `bench peers`."""


def read_environment(env: Mapping[str, str] | None = None) -> Environment:
    """The environment beside settings: folders, hub address and token."""
    env = os.environ if env is None else env
    user = Path(env.get("HOME") or env.get("USERPROFILE") or Path.home())
    cache = Path(env.get("XDG_CACHE_HOME") or user / ".cache")
    hf_home = Path(env.get("HF_HOME") or cache / "huggingface")
    return Environment(
        home=Path(os.path.expanduser(env["FORETELL_HOME"])) if env.get("FORETELL_HOME") else None,
        hf_endpoint=env.get("HF_ENDPOINT") or "https://huggingface.co",
        hf_token=env.get("HF_TOKEN", "").strip() or _read_token(env, hf_home),
        hf_cache=Path(env.get("HF_HUB_CACHE") or hf_home / "hub"),
        ollama_models=(
            (Path(env["OLLAMA_MODELS"]),)
            if env.get("OLLAMA_MODELS")
            else (user / ".ollama" / "models", OLLAMA_SERVICE_MODELS)
        ),
        lm_studio_models=user / ".lmstudio" / "models",
        editor=env.get("VISUAL") or env.get("EDITOR") or _PLATFORM_EDITOR,
        peer_python=env.get("FORETELL_PEER_PYTHON") or None,
    )


def _read_token(env: Mapping[str, str], hf_home: Path) -> str | None:
    """The token `hf auth login` keeps. Source: huggingface_hub, HF_TOKEN_PATH and HF_HOME/token."""
    try:
        return (
            Path(env.get("HF_TOKEN_PATH") or hf_home / "token").read_text("utf-8").strip() or None
        )
    except (OSError, UnicodeDecodeError):
        return None  # nobody logged in here


def load_settings(path: Path, env: Mapping[str, str] | None = None) -> Settings:
    """Defaults, then the file (if there is one), then the environment.

    Raises: SettingsError naming the file and key, or the variable, that cannot be used.
    """
    tree: dict[str, Any] = {}
    if path.exists():
        tree = _read_toml(path).unwrap()
    settings = _build(Settings, tree, where=str(path))
    return _apply_environment(settings, os.environ if env is None else env)


def save_settings(path: Path, settings: Settings) -> None:
    """Write what differs from the defaults, keeping comments of an existing file.

    The file is replaced in one step, mode 0600 (a system prompt may be private).
    Raises: SettingsError when the file is no TOML (it is left alone) or cannot be written.
    """
    document = _read_toml(path) if path.exists() else tomlkit.document()
    _write_table(document, settings, Settings())
    draft = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=0o600)
        draft.write_text(tomlkit.dumps(document), "utf-8")
        draft.replace(path)
    except OSError as error:
        raise SettingsError(
            f"cannot save settings to {path}: {error.strerror}", hint="check the folder's rights"
        ) from error


class SettingsFile:
    """The file, changed by what a person changes on a screen that shows flags and variables too."""

    def __init__(self, path: Path, shown: Settings) -> None:
        self._path = path
        self._shown = shown

    def save(self, settings: Settings) -> None:
        """Put every setting that differs from what was shown into the file.

        Raises: SettingsError when the file cannot be read or written.
        """
        stored = load_settings(self._path, env={})
        save_settings(self._path, with_changes(stored, self._shown, settings))
        self._shown = settings


def with_changes(stored: T, before: T, after: T) -> T:
    """`stored` with every setting in which `after` differs from `before`.

    A person changes one setting on a screen that shows flags and environment too: only that one
    setting belongs into the file.
    """
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(after):  # type: ignore[arg-type]
        old, new = getattr(before, item.name), getattr(after, item.name)
        if dataclasses.is_dataclass(new):
            new = with_changes(getattr(stored, item.name), old, new)
            old = getattr(stored, item.name)
        if new != old:
            changes[item.name] = new
    return dataclasses.replace(stored, **changes)  # type: ignore[type-var]


def replace_setting(settings: Settings, key: str, value: object) -> Settings:
    """A copy with `key` ("threads" or "sampling.top_k") set. Raises: SettingsError."""
    section, _, name = key.rpartition(".")
    try:
        if not section:
            changes: dict[str, Any] = {name: value}
        else:
            changes = {section: dataclasses.replace(getattr(settings, section), **{name: value})}
        return dataclasses.replace(settings, **changes)
    except EngineError as error:
        raise SettingsError(str(error), hint=error.hint) from error


def _read_toml(path: Path) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        raise SettingsError(
            f"cannot read settings {path}: {error}", hint="correct the file or move it away"
        ) from error


def _build(kind: type, tree: Mapping[str, Any], where: str, prefix: str = "") -> Any:
    """A dataclass from a TOML table; every unknown key and wrong type is named."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        full = prefix + key
        if key not in hints:
            known = ", ".join(item.name for item in dataclasses.fields(kind))
            raise SettingsError(
                f"{where}: unknown setting {full!r}", hint=f"known settings: {known}"
            )
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping):
            values[key] = _build(hints[key], value, where, prefix=f"{full}.")
        else:
            values[key] = _checked(value, hints[key], f"{where}: {full}")
    try:
        return kind(**values)
    except (EngineError, SettingsError) as error:
        raise SettingsError(f"{where}: {error}", hint=error.hint) from error


def _checked(value: Any, hint: Any, where: str) -> Any:
    if get_origin(hint) is tuple:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise SettingsError(f"{where} = {value!r} has the wrong type", hint="use a list of texts")
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and bool not in kinds:
        kinds = ()
    if not isinstance(value, tuple(k for k in kinds if isinstance(k, type))):
        names = " or ".join(getattr(k, "__name__", str(k)) for k in kinds) or "another type"
        raise SettingsError(f"{where} = {value!r} has the wrong type", hint=f"use {names}")
    return value


def _apply_environment(settings: Settings, env: Mapping[str, str]) -> Settings:
    for variable, key in _ENVIRONMENT.items():
        text = env.get(variable, "")
        if not text:
            continue
        section, _, name = key.rpartition(".")
        owner: Any = getattr(settings, section) if section else settings
        hint = get_type_hints(type(owner))[name]
        try:
            settings = replace_setting(settings, key, parse_value(text, hint))
        except (ValueError, SettingsError) as error:
            hint_text = error.hint if isinstance(error, SettingsError) else ""
            raise SettingsError(f"{variable}={text}: {error}", hint=hint_text) from error
    return settings


def parse_value(text: str, hint: Any) -> Any:
    """Text from the environment or a form field as a setting's type. Raises: ValueError."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if type(None) in kinds and text.lower() in ("", "none", "auto"):
        return None
    if bool in kinds:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError("is neither on nor off (use 1 or 0)")
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                name = "whole number" if kind is int else "number"
                raise ValueError(f"is not a {name}") from None
    return text


def _write_table(table: Any, value: Any, default: Any) -> None:
    for item in dataclasses.fields(value):
        new, old = getattr(value, item.name), getattr(default, item.name)
        if dataclasses.is_dataclass(new):
            if item.name not in table:
                if new == old:
                    continue
                table[item.name] = tomlkit.table()
            _write_table(table[item.name], new, old)
        elif new == old or new is None:
            table.pop(item.name, None)
        else:
            table[item.name] = list(new) if isinstance(new, tuple) else new
