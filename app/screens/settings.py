"""Edits the settings. Each valid change is used and saved at once; a wrong one says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_type_hints

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input, Select, Static, Switch, TextArea

from app.settings import (
    BACKENDS,
    THINK,
    SamplingSettings,
    Settings,
    SettingsError,
    parse_value,
    replace_setting,
)
from engine.speculative.options import AUTO

if TYPE_CHECKING:
    from app.app import ForetellApp


@dataclass(frozen=True, slots=True)
class Field:
    """One line of the form."""

    key: str
    """Where it stands in the settings tree, for example `sampling.top_k`."""
    title: str
    help_text: str
    kind: Literal["switch", "text", "choice", "long", "lines"] = "text"


@dataclass(frozen=True, slots=True)
class Section:
    """Fields under one heading."""

    title: str
    fields: tuple[Field, ...]


SECTIONS = (
    Section(
        "Speculation (acts on the running answer at its next step)",
        (
            Field("speculation.is_enabled", "Draft ahead", "Never changes a word", "switch"),
            Field("speculation.algorithm", "Algorithm", "auto takes the best there is", "choice"),
            Field("speculation.window", "Window", "Drafts per step, 1 to 64; empty: auto"),
            Field(
                "speculation.min_draft_prob",
                "Gate",
                "Least confidence, 0 to 1; empty: auto",
            ),
            Field(
                "speculation.use_governor",
                "Governor",
                "Rests while drafting does not pay",
                "switch",
            ),
            Field(
                "speculation.drafter_path",
                "Drafter file",
                "Another .gguf; empty: the model's own",
            ),
        ),
    ),
    Section(
        "Sampling (from the next answer; empty: what the model's publisher recommends)",
        (
            Field("sampling.temperature", "Temperature", "0 always takes the likeliest token"),
            Field("sampling.top_k", "Top-k", "Keep the k likeliest; 0 keeps all"),
            Field("sampling.top_p", "Top-p", "Share of the likeliest; 1 keeps all"),
            Field("sampling.min_p", "Min-p", "Least share of the likeliest; 0: any"),
            Field("sampling.repeat_penalty", "Repeat penalty", "1 is none"),
            Field("sampling.presence_penalty", "Presence penalty", "0 is none"),
            Field("sampling.frequency_penalty", "Frequency penalty", "0 is none"),
            Field("sampling.penalty_window", "Penalty window", "Last tokens looked at; 0: all"),
            Field("sampling.seed", "Seed", "Same seed, same question: same answer"),
        ),
    ),
    Section(
        "Chat",
        (
            Field("system_prompt", "System prompt", "First message of new chats", "long"),
            Field("think", "Thinking", "Where the model has a switch; auto: its own way", "choice"),
            Field(
                "context_len",
                "Context size",
                "Tokens a chat may hold; empty: auto",
            ),
            Field("theme", "Theme", "Colours", "choice"),
        ),
    ),
    Section(
        "This machine (from the next start)",
        (
            Field("backend", "Backend", "Where models run; auto takes the best there is", "choice"),
            Field("threads", "Threads", "Of the native backend; 0: physical cores"),
            Field("cache_budget_mb", "Cache budget", "MiB for chats; 0: a share of what is free"),
            Field("model_folders", "Model folders", "Further ones, a line each", "lines"),
            Field("offline", "Offline", "Every connection is an error", "switch"),
        ),
    ),
)


class SettingRow(Horizontal):
    """A field with its control and its help."""

    def __init__(self, field: Field, control: Widget) -> None:
        super().__init__(classes="setting")
        self.field = field
        self.control = control

    def compose(self) -> ComposeResult:
        """Name, control, help."""
        yield Static(self.field.title, classes="setting-name", markup=False)
        yield self.control
        yield Static(self.field.help_text, classes="setting-help", markup=False)


class SettingsScreen(Screen[None]):
    """A form over the settings tree."""

    BINDINGS = [
        Binding("escape,f2", "close", "Back", id="settings.close"),
        Binding("ctrl+t", "toggle_speculation", "Speculation", id="settings.spec", priority=True),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._is_warned = False

    @property
    def foretell(self) -> ForetellApp:
        """The app, with its type."""
        return cast("ForetellApp", self.app)

    def compose(self) -> ComposeResult:
        """Sections of rows between a title and a message line."""
        yield Static("Settings", classes="page-title", markup=False)
        with VerticalScroll(id="settings-form", can_focus=False):
            for section in SECTIONS:
                yield Static(section.title, classes="settings-section", markup=False)
                for field in section.fields:
                    yield SettingRow(field, self._make_control(field))
        yield Static("", id="settings-message", classes="page-message", markup=False)
        yield Static("Tab next · Enter use · Esc back", classes="page-hints", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        """Leave out the help texts where they do not fit."""
        self.set_class(event.size.width < 76, "narrow")

    def _make_control(self, field: Field) -> Widget:
        value = read_setting(self.foretell.settings, field.key)
        match field.kind:
            case "switch":
                return Switch(bool(value), animate=False)
            case "choice":
                names = self._choices(field.key)
                if value not in names:
                    names = [value, *names]
                return Select([(n, n) for n in names], value=value, allow_blank=False, compact=True)
            case "long":
                return TextArea(str(value), compact=True, highlight_cursor_line=False)
            case "lines":
                return TextArea("\n".join(value), compact=True, highlight_cursor_line=False)
            case _:
                return Input(
                    _as_text(value),
                    self._describe_default(field.key) if value is None else "",
                    compact=True,
                    select_on_focus=False,
                )

    def _describe_default(self, key: str) -> str:
        """What is used while nothing is set, and who says so."""
        section, _, name = key.partition(".")
        if section != "sampling":
            return ""
        recommended = self.foretell.conversations.recommended
        value = getattr(SamplingSettings().over(recommended), name)
        return f"{value} ({'publisher' if name in recommended else 'default'})"

    def _choices(self, key: str) -> list[str]:
        match key:
            case "theme":
                return sorted(self.foretell.available_themes)
            case "backend":
                return list(BACKENDS)
            case "think":
                return list(THINK)
        info = self.foretell.model.info
        offered = info.algorithms if info is not None else ()
        return [AUTO, *(name for name in offered if name != AUTO)]

    # -- changes ---------------------------------------------------------------------

    @on(Switch.Changed)
    def _switched(self, event: Switch.Changed) -> None:
        self._take(_row_of(event.switch), event.value)

    @on(Select.Changed)
    def _chosen(self, event: Select.Changed) -> None:
        self._take(_row_of(event.select), event.value)

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        self._take_text(_row_of(event.input), event.value)

    @on(Input.Blurred)
    def _left(self, event: Input.Blurred) -> None:
        self._take_text(_row_of(event.input), event.value)

    @on(events.DescendantBlur)
    def _left_area(self, event: events.DescendantBlur) -> None:
        if isinstance(event.widget, TextArea):
            self._take_control(_row_of(event.widget))

    def action_close(self) -> None:
        """Use what is in the fields, then go back. A wrong value is shown; a second Escape
        leaves it.
        """
        taken = [self._take_control(row) for row in self.query(SettingRow)]
        if all(taken) or self._is_warned:
            self.dismiss(None)
        self._is_warned = True

    def _take_control(self, row: SettingRow) -> bool:
        match row.control:
            case Input():
                return self._take_text(row, row.control.value)
            case TextArea() if row.field.kind == "lines":
                lines = (line.strip() for line in row.control.text.splitlines())
                return self._take(row, tuple(line for line in lines if line))
            case TextArea():
                return self._take(row, row.control.text)
            case _:
                return True

    def action_toggle_speculation(self) -> None:
        """Turn the first switch."""
        self.query(Switch).first().toggle()

    def _take_text(self, row: SettingRow, text: str) -> bool:
        try:
            value = parse_value(text.strip(), _type_of(row.field.key))
        except ValueError as error:
            return self._refuse(row, f"{row.field.title} {text.strip()!r} {error}")
        return self._take(row, value)

    def _take(self, row: SettingRow, value: object) -> bool:
        """Use a value; False, with the reason shown, when it is out of range."""
        settings = self.foretell.settings
        if read_setting(settings, row.field.key) == value:
            return self._accept(row)
        try:
            changed = replace_setting(settings, row.field.key, value)
        except SettingsError as error:
            return self._refuse(row, f"{error}: {error.hint}" if error.hint else str(error))
        try:
            self.foretell.change_settings(changed)
        except SettingsError as error:
            self.foretell.show_error(error)
        return self._accept(row)

    def _refuse(self, row: SettingRow, message: str) -> bool:
        row.add_class("invalid")
        line = self.query_one("#settings-message", Static)
        line.update(message)
        line.add_class("error")
        return False

    def _accept(self, row: SettingRow) -> bool:
        row.remove_class("invalid")
        if not self.query(".setting.invalid"):
            self.query_one("#settings-message", Static).update("")
        return True


def read_setting(settings: Settings, key: str) -> Any:
    """The value at a key of the tree. Any: the tree's values have many types."""
    owner: Any = settings
    for name in key.split("."):
        owner = getattr(owner, name)
    return owner


def _type_of(key: str) -> Any:
    section, _, name = key.rpartition(".")
    owner = getattr(Settings(), section) if section else Settings()
    return get_type_hints(type(owner))[name]


def _as_text(value: object) -> str:
    return "" if value is None else str(value)


def _row_of(control: Widget) -> SettingRow:
    row = control.parent
    assert isinstance(row, SettingRow), "every control of the form stands in its row"
    return row
