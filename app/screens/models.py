"""Models on this machine and in the catalog: find, get, use, delete. Downloads go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rich.cells import cell_len, set_cell_size
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from app.downloads import Download
from app.screens.dialogs import ConfirmDialog
from app.services import CatalogModel, DrafterChoice, FoundModel, InstalledModel
from app.sizes import format_bytes, format_progress
from storage.errors import StorageError
from storage.model_sources import is_source

if TYPE_CHECKING:
    from app.app import ForetellApp


FIND_HINT = "/ finds by name, or downloads hf:owner/repo:Q4_K_M, hf:owner/repo/file.gguf, https://…"
LineParts = tuple[tuple[str, str], str, int, tuple[str, str]]
"""Mark with its style, name, bytes, tail with its style."""


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One line of the list: an installed model, a catalog entry, or a drafter beside its model."""

    key: str
    installed: InstalledModel | None = None
    entry: CatalogModel | None = None
    drafter: DrafterChoice | None = None

    @property
    def name(self) -> str:
        """What the line is about."""
        owner = self.drafter or self.installed or self.entry
        assert owner is not None, "a line is about something"
        return owner.name

    @property
    def unsupported(self) -> str | None:
        """Why there is no use in getting it, or None."""
        if self.drafter is not None:
            return self.drafter.refusal
        is_offered = self.entry is not None and self.installed is None
        return self.entry.unsupported if self.entry is not None and is_offered else None

    @property
    def download_name(self) -> str | None:
        """What would be downloaded, or None when there is nothing to fetch."""
        if self.drafter is not None:
            return self.drafter.name if self.drafter.path is None else None
        if self.entry is None or self.installed is not None:
            return None
        return self.entry.source or self.entry.name

    def is_part_of(self, address: str) -> bool:
        """Whether the line is about what a download of this address has left so far."""
        return self.entry is not None and bool(self.entry.source) and self.entry.name in address

    def fits(self, words: Sequence[str]) -> bool:
        """Whether every word stands in a name or title of the line or of its model."""
        owners = (self.installed, self.entry, self.drafter)
        names = [owner.name for owner in owners if owner is not None]
        titles = [self.entry.title] if self.entry is not None else []
        text = " ".join((*names, *titles)).casefold()
        return all(word in text for word in words)


def with_downloads(lines: Sequence[ModelLine], downloads: Sequence[Download]) -> list[ModelLine]:
    """The lines, and before them running downloads of an address that none of them is about."""
    shown = {line.download_name for line in lines}
    names = [download.name for download in downloads if download.is_running]
    fresh = [name for name in names if is_source(name) and name not in shown]
    running = [
        ModelLine(f"address:{name}", entry=CatalogModel(name, name, 0, "", source=name))
        for name in fresh
    ]
    return running + [line for line in lines if not any(line.is_part_of(name) for name in fresh)]


def make_lines(
    installed: Sequence[InstalledModel], catalog: Sequence[CatalogModel]
) -> list[ModelLine]:
    """Installed models first, then what can be downloaded; drafters under their model."""
    lines: list[ModelLine] = []
    for model in installed:
        lines.append(ModelLine(f"installed:{model.name}", installed=model))
        lines.extend(_drafter_lines(f"installed:{model.name}", model.drafters, installed=model))
    for at, entry in enumerate(catalog):  # what was pulled by its address may be called anything
        if not entry.is_installed:
            lines.append(ModelLine(f"catalog:{at}", entry=entry))
            drafters = () if entry.unsupported else entry.drafters
            lines.extend(_drafter_lines(f"catalog:{at}", drafters, entry=entry))
    return lines


def _drafter_lines(
    key: str,
    drafters: Sequence[DrafterChoice],
    *,
    installed: InstalledModel | None = None,
    entry: CatalogModel | None = None,
) -> list[ModelLine]:
    return [ModelLine(f"{key}|{d.name}", installed, entry, d) for d in drafters]


def describe_line(
    line: ModelLine, loaded: str, download: Download | None, name_cells: int = 0
) -> Content:
    """A line of the list: mark, name, size, and how it stands; names padded to `name_cells`."""
    parts = _describe_drafter(line, download) or _describe_model(line, loaded, download)
    mark, name, size, tail = parts
    padded = set_cell_size(name, max(cell_len(name), name_cells - cell_len(mark[0])))
    shown_size = format_bytes(size) if size else ""  # of an address it comes with the first bytes
    described = Content.assemble(mark, (padded, "bold"), f"  {shown_size:>8}  ", tail)
    return described.stylize("dim") if line.unsupported else described


def _describe_model(line: ModelLine, loaded: str, download: Download | None) -> LineParts:
    if line.installed is not None:
        model = line.installed
        mark = ("● ", "$text-success") if model.name == loaded else ("  ", "")
        tail = " · ".join(part for part in (model.details, model.origin) if part)
        return (mark, model.name, model.size_bytes, (tail, "$text-muted"))
    entry = line.entry
    assert entry is not None, "a line is an installed model or a catalog entry"
    if download is not None and (download.is_running or download.error):
        tail = format_progress(download.progress) if download.is_running else download.error
        style = "$text-accent" if download.is_running else "$text-error"
        size = entry.size_bytes or (download.progress.num_total if download.progress else 0)
        return (("↓ ", "$text-accent"), entry.name, size, (tail, style))
    if entry.unsupported is not None:
        tail, style = entry.unsupported, "$text-muted"
    elif entry.refusal is not None:
        tail, style = f"does not fit: {entry.refusal}", "$text-warning"
    elif entry.part_bytes:
        tail, style = f"unfinished, {format_bytes(entry.part_bytes)} kept", "$text-warning"
    else:
        tail, style = entry.licence, "$text-muted"
    return (("  ", ""), entry.name, entry.size_bytes, (tail, style))


def _describe_drafter(line: ModelLine, download: Download | None) -> LineParts | None:
    drafter = line.drafter
    if drafter is None:
        return None
    if drafter.refusal is not None:
        tail, style = f"refused: {drafter.refusal}", "$text-warning"
    elif download is not None and download.is_running:
        tail, style = format_progress(download.progress), "$text-accent"
    elif drafter.path is not None:
        tail, style = "drafter, installed: Enter uses it", "$text-success"
    else:
        tail, style = "drafter", "$text-muted"
    return (("    ↳ ", "$text-muted"), drafter.name, drafter.size_bytes, (tail, style))


class ModelsScreen(Screen[None]):
    """The list of models. Leaving it stops nothing."""

    AUTO_FOCUS = "#models-list"
    BINDINGS = [
        Binding("escape", "back", "Back", id="models.back"),
        Binding("f3", "dismiss(None)", "Back", id="models.close", show=False),
        Binding("slash", "find", "Find", id="models.find", priority=True),
        Binding("down", "into_list", show=False, id="models.down"),
        Binding("delete,d", "delete", "Delete", id="models.delete"),
        Binding("x", "cancel", "Cancel download", id="models.cancel"),
        Binding("ctrl+r", "refresh_list", "Look again", id="models.refresh", priority=True),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._all: list[ModelLine] = []
        self._lines: list[ModelLine] = []
        """Those of them that the list shows."""

    @property
    def foretell(self) -> ForetellApp:
        """The app, with its type."""
        return cast("ForetellApp", self.app)

    def compose(self) -> ComposeResult:
        """The list, and what is known of the highlighted line."""
        yield Static("Models", classes="page-title", markup=False)
        yield Input(placeholder=FIND_HINT, id="models-find", compact=True)
        yield OptionList(id="models-list", markup=False)
        yield Static("Looking for models…", id="models-details", markup=False)
        hints = "Enter use or download · / find or address · X cancel · D delete · Esc back"
        yield Static(hints, classes="page-hints", markup=False)

    def on_mount(self) -> None:
        """Follow downloads, and read the list on a worker thread."""
        self.foretell.download_moved.subscribe(self, self._on_download)
        self.action_refresh_list()

    def action_refresh_list(self) -> None:
        """Read the folders and the catalog again."""
        self._read()

    @work(thread=True, exclusive=True, group="models-list")
    def _read(self) -> None:
        library = self.foretell.services.models
        try:
            offered = [*library.unfinished(), *library.catalog()]
            lines = make_lines(library.installed(), offered)
        except (StorageError, OSError) as error:
            self.foretell.call_from_worker(self.foretell.show_error, error)
            return
        self.foretell.call_from_worker(self.show_lines, lines)

    def show_lines(self, lines: list[ModelLine]) -> None:
        """Replace the list; the highlight stays where it was."""
        self._all = lines
        models, text = self.query_one(OptionList), self.query_one(Input).value.strip()
        at = models.highlighted or 0
        words = [] if is_source(text) else text.casefold().split()
        lines = with_downloads(lines, list(self.foretell.downloads.states.values()))
        self._lines = lines = [line for line in lines if line.fits(words)]
        models.set_options(Option(self._describe(line), id=line.key) for line in lines)
        models.highlighted = min(at, len(lines) - 1) if lines else None
        if not lines:
            nothing = f"Nothing is called {text!r}." if words else "There is no model here."
            self.query_one("#models-details", Static).update(nothing)

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self.show_lines(self._all)

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        self.query_one(OptionList).focus()
        text = event.value.strip()
        if is_source(text):
            event.input.clear()
            self._start(text)

    def _describe(self, line: ModelLine) -> Content:
        name = line.download_name
        download = self.foretell.downloads.states.get(name) if name else None
        widest = max(cell_len(shown.name) + (6 if shown.drafter else 2) for shown in self._lines)
        cells = min(widest, self.size.width // 2)
        return describe_line(line, self.foretell.model.name, download, cells)

    def _on_download(self, download: Download) -> None:
        if not download.is_running:
            self.action_refresh_list()
            return
        for line in self._lines:
            if line.download_name == download.name:
                self.query_one(OptionList).replace_option_prompt(line.key, self._describe(line))

    def _line(self) -> ModelLine | None:
        at = self.query_one(OptionList).highlighted
        return self._lines[at] if at is not None and at < len(self._lines) else None

    @on(OptionList.OptionHighlighted)
    def _show_details(self, event: OptionList.OptionHighlighted) -> None:
        if line := self._line():
            self.query_one("#models-details", Static).update(self._details(line))

    def _details(self, line: ModelLine) -> str:
        if line.drafter is not None:
            refusal = line.drafter.refusal
            return f"Refused: {refusal}" if refusal else "Drafts tokens for the model above it."
        if line.installed is not None:
            return f"{line.installed.path}"
        entry = line.entry
        assert entry is not None, "a line is an installed model or a catalog entry"
        folder = self.foretell.services.models.folder
        if entry.source:
            return f"{entry.source}\nDownloads to {folder}"
        if entry.unsupported:
            return f"{entry.title} · {entry.licence}\nCannot be run: {entry.unsupported}"
        fits = f"Does not fit: {entry.refusal}" if entry.refusal else "Fits this machine."
        return f"{entry.title} · {entry.licence}\n{fits} Downloads to {folder}"

    # -- what the keys do --------------------------------------------------------------

    @on(OptionList.OptionSelected)
    async def _selected(self, event: OptionList.OptionSelected) -> None:
        line = self._line()
        if line is None:
            return
        if line.unsupported is not None:
            self.notify(f"{line.name}: {line.unsupported}", title="Refused", markup=False)
        elif line.download_name is not None:
            self._fetch(line)
        elif line.drafter is not None and line.installed is not None:
            self._use(line.installed, str(line.drafter.path))
        elif line.installed is not None:
            self._use(line.installed, None)

    @work
    async def _fetch(self, line: ModelLine) -> None:
        name = line.download_name
        assert name is not None, "only lines with something to fetch come here"
        entry = line.entry
        if line.drafter is None and entry is not None and entry.refusal is not None:
            question = (
                f"{name} does not fit this machine: {entry.refusal}. Download it all the same?"
            )
            if not await self.app.push_screen_wait(ConfirmDialog(question, "Download")):
                return
        self._start(name, is_drafter=line.drafter is not None)

    def _start(self, name: str, *, is_drafter: bool = False) -> None:
        if not self.foretell.downloads.start(name, is_drafter=is_drafter):
            self.notify(f"{name} is on its way already", markup=False)
        self.show_lines(self._all)

    def _use(self, model: InstalledModel, drafter: str | None) -> None:
        found = FoundModel(model.name, model.path)
        self.foretell.use_chosen(found, name=found.name, drafter=drafter)
        self.dismiss(None)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """In the field `/` is a letter of an address."""
        return action != "find" or not isinstance(self.focused, Input)

    def action_find(self) -> None:
        """Type what to look for, or an address; at once, so that no letter goes elsewhere."""
        self.set_focus(self.query_one(Input))

    def action_into_list(self) -> None:
        """Go from the input into the list."""
        self.query_one(OptionList).focus()

    def action_back(self) -> None:
        """Show every line again, or leave."""
        find = self.query_one(Input)
        if not find.value and not find.has_focus:
            self.dismiss(None)
        find.clear()
        self.query_one(OptionList).focus()

    def action_cancel(self) -> None:
        """Stop the highlighted download; its part is kept and goes on next time."""
        line = self._line()
        if line is not None and line.download_name is not None:
            self.foretell.downloads.cancel(line.download_name)

    @work
    async def action_delete(self) -> None:
        """Delete an installed model, or the part of an unfinished download, after a question."""
        line = self._line()
        if line is None or line.drafter is not None:
            return
        if line.installed is not None:
            await self._delete_model(line.installed)
        elif line.entry is not None and line.entry.part_bytes:
            await self._delete_part(line.entry)

    async def _delete_model(self, model: InstalledModel) -> None:
        if not model.can_delete:
            self.notify(f"{model.name} belongs to {model.origin}; it is not deleted", markup=False)
            return
        if model.name == self.foretell.model.name:
            self.notify("This model is loaded: use another one first", markup=False)
            return
        question = f"Delete {model.name} ({format_bytes(model.size_bytes)})?"
        if await self.app.push_screen_wait(ConfirmDialog(question, "Delete", "Keep")):
            self._remove(lambda: self.foretell.services.models.delete(model.path))

    async def _delete_part(self, entry: CatalogModel) -> None:
        kept = format_bytes(entry.part_bytes)
        question = f"Delete the unfinished download of {entry.name} ({kept})?"
        if await self.app.push_screen_wait(ConfirmDialog(question, "Delete", "Keep")):
            self._remove(lambda: self.foretell.services.models.delete_part(entry.name))

    @work(thread=True)
    def _remove(self, delete: Callable[[], None]) -> None:
        try:
            delete()
        except (StorageError, OSError) as error:
            self.foretell.call_from_worker(self.foretell.show_error, error)
        self.foretell.call_from_worker(self.action_refresh_list)
