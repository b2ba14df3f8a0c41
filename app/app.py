"""`ForetellApp`: screens, global keys, and the routing of engine events by chat."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import resources

from rich.text import Text
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.command import CommandPalette
from textual.screen import ModalScreen, Screen
from textual.signal import Signal

from app.bench_runner import BenchRunner
from app.bridge import EngineBridge, EngineEventArrived
from app.clipboard import copy_with_tool
from app.conversations import Conversations
from app.downloads import Download, DownloadChanged, Downloads
from app.errors import describe, describe_info
from app.model_choices import ModelChoice, ModelChoices
from app.screens.chat import ChatScreen
from app.services import EngineHandle, FoundModel, Services
from app.settings import DEFAULT_MODEL, Settings, SettingsError
from app.themes import THEMES
from app.turns import Turn
from app.widgets.status_bar import Phase, Status
from engine.commands import UpdateSpeculation
from engine.events import (
    EngineEvent,
    EngineFailed,
    ErrorInfo,
    ModelFailed,
    ModelInfo,
    ModelLoaded,
    ModelLoading,
    Notice,
    PrefillProgress,
    SpeculationChanged,
    TextDelta,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from engine.speculative.options import SpeculationOptions
from storage.errors import StorageError


@dataclass(frozen=True, slots=True)
class ModelState:
    """What is known of the model that answers."""

    name: str = ""
    phase: Phase = "starting"
    fraction: float | None = None
    info: ModelInfo | None = None
    error: ErrorInfo | None = None
    algorithm: str | None = None
    declined: str | None = None


class ForetellApp(App[None]):
    """The program on the screen. Everything from outside comes in as `Services`."""

    TITLE = "Foretell"
    CSS = resources.files("assets").joinpath("foretell.tcss").read_text("utf-8")
    ENABLE_COMMAND_PALETTE = True
    BINDINGS = [
        Binding("f1", "help", "Help", id="app.help"),
        Binding("f2", "settings", "Settings", id="app.settings"),
        Binding("f3", "models", "Models", id="app.models"),
        Binding("f4", "bench", "Bench", id="app.bench"),
        Binding("ctrl+q", "quit", "Quit", id="app.quit", priority=True, show=False),
    ]

    def __init__(self, services: Services) -> None:
        super().__init__()
        for theme in THEMES:
            self.register_theme(theme)
        self.services = services
        self.settings: Settings = services.settings
        self.model = ModelState()
        self._choices = ModelChoices()
        self.copy_tool: Callable[[str], object] = copy_with_tool
        """Copies beside the terminal's own escape; blocking."""
        self.bridge = EngineBridge(services.start_engine, self.post_message)
        self.downloads = Downloads(services.models, self._run_thread, self.post_message)
        self.download_moved: Signal[Download] = Signal(self, "download")
        """For screens that show downloads."""
        self.bench: BenchRunner | None = None
        """The running bench, which gets its own events first."""
        self._told_unsaved: set[str] = set()
        """Turns of which was said that they cannot be stored."""
        self._conversations: Conversations | None = None
        self._chat_screen: ChatScreen | None = None

    @property
    def conversations(self) -> Conversations:
        """The chats; there once the database is open."""
        assert self._conversations is not None, "opened in on_mount"
        return self._conversations

    @property
    def chat_screen(self) -> ChatScreen:
        """The chat screen, also while another one covers it."""
        assert self._chat_screen is not None, "made in on_mount"
        return self._chat_screen

    # -- start and end -----------------------------------------------------------

    def on_mount(self) -> None:
        """Open the chats and paint; the engine starts after the first paint."""
        if self.settings.theme in self.available_themes:
            self.theme = self.settings.theme
        try:
            store = self.services.open_chats()
        except (StorageError, OSError) as error:
            self.exit(return_code=1, message=Text(f"foretell: {describe(error).line}"))
            return
        self._leave_on_signals()
        self._conversations = Conversations(store, self.bridge.submit, lambda: self.settings)
        self._chat_screen = ChatScreen(self.services.chat_id)
        self.push_screen(self._chat_screen)
        self.call_after_refresh(self._run_thread, self._start_engine)

    def _leave_on_signals(self) -> None:
        """Leave as by Ctrl+Q when asked to end: answers stored, the terminal as it was."""
        if sys.platform == "win32":
            return  # asyncio handles no signals there
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: self.call_later(self.action_quit))

    def _start_engine(self) -> None:
        handle = self.bridge.start()
        found = self._find(self.settings.model)
        self.call_from_worker(self._use_engine, handle, found)

    def _use_engine(self, handle: EngineHandle, found: FoundModel | None) -> None:
        self.bridge.attach(handle)
        self.use_model(found)

    async def action_quit(self) -> None:
        """Leave; what is typed and what answers have so far is stored first, or it is said why not."""
        lost: list[str] = []
        if self._conversations is not None:
            turns = self._conversations.running
            self._conversations.keep_partials()
            lost += [describe(turn.problem).line for turn in turns if turn.problem][:1]
            try:
                self.chat_screen.leave_chat()
            except StorageError as error:
                unsent = self.chat_screen.prompt.unsent
                lost.append(f"{describe(error).line}. Not stored, what was typed:\n{unsent}")
        self.downloads.cancel_all()
        if lost:
            self.exit(return_code=1, message=Text("foretell: " + "\nforetell: ".join(lost)))
        else:
            self.exit()

    def on_unmount(self) -> None:
        """Stop what still waits for the engine, then its thread."""
        if self.bench is not None:
            self.bench.stop()
        self.bridge.close()

    # -- engine events -----------------------------------------------------------

    async def on_engine_event_arrived(self, message: EngineEventArrived) -> None:
        """Route an event: model and engine here, turns to their chat."""
        if not self.is_running:
            return  # the screens are being taken down; what answers have is stored
        if self.bench is not None and self.bench.take(message.event):
            return
        try:
            await self._route(message.event)
        except StorageError as error:
            self.show_error(error)

    async def _route(self, event: EngineEvent) -> None:
        if isinstance(event, ModelLoaded):
            self._choices.end(event.info.name, is_loaded=True)
        if isinstance(event, ModelFailed):
            self._choices.end(event.name, is_loaded=False)
        wanted = self.model.name  # loads of models that another one was chosen over change nothing
        match event:
            case TurnStarted() | PrefillProgress() | TextDelta() | TurnFinished() | TurnFailed():
                if turn := self.conversations.apply(event):
                    self._tell_unsaved(turn)
                    await self.chat_screen.show_turn(turn)
            case ModelLoading() if event.name == wanted:
                self._set_model(phase="loading", fraction=event.fraction)
            case ModelLoaded() if event.info.name == wanted:
                self._on_model_loaded(event.info)
            case ModelFailed() if event.name == wanted:
                await self._on_model_failed(event)
            case SpeculationChanged():
                self._set_model(algorithm=event.algorithm, declined=event.declined)
            case Notice():
                self.notify(event.text, markup=False)
            case EngineFailed():
                self._set_model(phase="failed", error=event.error, fraction=None)
                for turn in self.conversations.fail_all(event.error):
                    await self.chat_screen.show_turn(turn)
                self._notify_error(event.error)

    def _tell_unsaved(self, turn: Turn) -> None:
        """Say once, while an answer runs, that it cannot be stored; its text is kept and tried again."""
        problem = turn.writer.problem
        if problem is not None and turn.request_id not in self._told_unsaved:
            self._told_unsaved.add(turn.request_id)
            self.show_error(problem)

    def _on_model_loaded(self, info: ModelInfo) -> None:
        self._set_model(
            phase="ready",
            fraction=None,
            info=info,
            error=None,
            algorithm=info.algorithm,
            declined=info.declined,
        )
        self.conversations.use_model(info.name, info.context_len)
        self.chat_screen.show_model()

    async def _on_model_failed(self, event: ModelFailed) -> None:
        self.model = ModelState(event.name, "failed", error=event.error)
        for turn in self.conversations.fail_waiting(event.error):
            await self.chat_screen.show_turn(turn)
        self._notify_error(event.error)
        if event.kept is None:
            self.chat_screen.show_model()
            return
        self.model = ModelState(event.kept.name)
        self._on_model_loaded(event.kept)
        choice = self._choices.loaded
        if choice is not None and self._choices.is_settled:
            self._choose_again(choice)

    def _choose_again(self, choice: ModelChoice) -> None:
        """What was chosen after it is not to be had: what belongs to the loaded model comes back."""
        self.conversations.recommended = choice.recommended
        self._keep_choice(choice.setting, choice.drafter_path)
        self._tell_errors(lambda: self.services.save_settings(self.settings))

    def _keep_choice(self, setting: str, drafter_path: str | None) -> None:
        """Into the settings alone: the engine hears of a drafter by the load."""
        speculation = replace(self.settings.speculation, drafter_path=drafter_path)
        self.settings = replace(self.settings, model=setting, speculation=speculation)

    def _set_model(self, **changes: object) -> None:
        self.model = replace(self.model, **changes)  # type: ignore[arg-type]
        self.chat_screen.show_status()

    def status(self) -> Status:
        """What the status bar says of the model; the chat adds its turn."""
        info = self.model.info
        phase, fraction = self.model.phase, self.model.fraction
        download = self.downloads.states.get(DEFAULT_MODEL)
        if phase == "no model" and download is not None and download.is_running:
            phase = "downloading"
            fraction = download.progress.fraction if download.progress else 0.0
        return Status(
            model=self.model.name,
            phase=phase,
            fraction=fraction,
            context_len=info.context_len if info else 0,
            is_spec_enabled=self.settings.speculation.is_enabled,
            algorithm=self.model.algorithm,
            declined=self.model.declined,
        )

    # -- models --------------------------------------------------------------------

    def use_model(self, found: FoundModel | None) -> None:
        """Load a model for every chat; without a file say what to do."""
        if found is None:
            self.model = ModelState(self.settings.model, "no model")
        else:
            self.conversations.model = ""
            self.conversations.recommended = self.services.models.recommended(found)
            self._choices.begin(
                ModelChoice(
                    found.name,
                    self.settings.model,
                    self.settings.speculation.drafter_path,
                    self.conversations.recommended,
                )
            )
            self.model = ModelState(found.name, "loading", fraction=0.0)
            self.bridge.submit(found.load_command(self.settings))
        self.chat_screen.show_model()

    def _reload_model(self) -> None:
        """Load the model again for what is fixed at the load; not under a running answer."""
        if any(turn.is_submitted for turn in self.conversations.running):
            self.notify("Used when the model is loaded again (F3)", markup=False)
        elif self.model.phase in ("loading", "ready", "failed"):
            name = self.settings.model
            self._run_thread(lambda: self._find_and_use(name))

    def _find_and_use(self, name: str) -> None:
        found = self._find(name)
        self.call_from_worker(self.use_model, found)

    def _find(self, name: str) -> FoundModel | None:
        """The file of a model; a folder that cannot be read is said, and nothing is found in it."""
        try:
            return self.services.models.find(name)
        except (StorageError, OSError) as error:
            self.call_from_worker(self.show_error, error)
            return None

    def choose_model(self, name: str) -> None:
        """Load a model by its name, for later runs too; one that is not here is said."""
        self._run_thread(lambda: self.call_from_worker(self._choose, name, self._find(name)))

    def _choose(self, name: str, found: FoundModel | None) -> None:
        if found is None:
            self.notify(f"There is no model {name} here: F3 shows every model", markup=False)
        else:
            is_path = name.endswith(".gguf")  # found by its name only in a folder that is known
            self.use_chosen(found, name=str(found.path.absolute()) if is_path else name)

    def use_chosen(self, found: FoundModel, *, name: str, drafter: str | None = None) -> None:
        """Load what a person chose, with the drafter they chose, and remember both.

        name: what finds it again at the next start.
        """
        self._keep_choice(name, drafter)
        self.use_model(found)
        self._tell_errors(lambda: self.services.save_settings(self.settings))

    def get_first_model(self, *, is_announced: bool) -> None:
        """Download the model to begin with, or say that there is none: the network only if asked.

        is_announced: whether the screen says that this key downloads.
        """
        wanted, known = self.settings.model, self.downloads.states.get(DEFAULT_MODEL)
        if known is not None and known.is_running:
            return
        if wanted == DEFAULT_MODEL and (is_announced or known is not None):
            self.downloads.start(DEFAULT_MODEL)
            self.chat_screen.show_model()
        else:
            self.notify(
                f"The model {wanted} was not found: F3 shows every model",
                severity="warning",
                markup=False,
            )

    def on_download_changed(self, message: DownloadChanged) -> None:
        """Show progress where it is looked at; use a first model at once."""
        if not self.is_running:
            return  # the screens are being taken down
        download = message.download
        self.downloads.take(download)
        if download.error:
            self.notify(download.error, title=download.name, severity="error", markup=False)
        found = download.found
        is_first = self.model.phase == "no model" and self.settings.model == DEFAULT_MODEL
        if found is not None and is_first and not download.is_drafter:
            drafter = self.settings.speculation.drafter_path
            self.use_chosen(found, name=found.name, drafter=drafter)
        elif found is not None:
            self.notify(f"{found.name} is ready: F3 to use it", markup=False)
        self.chat_screen.show_model()
        self.download_moved.publish(download)

    # -- settings ------------------------------------------------------------------

    def change_settings(self, settings: Settings) -> None:
        """Use and save new settings; what the engine can change at once, it changes.

        Raises: SettingsError when they cannot be saved; they are used all the same.
        """
        old, self.settings = self.settings, settings
        if settings.speculation != old.speculation:
            self.bridge.submit(UpdateSpeculation(settings.speculation))
        if (settings.context_len, settings.speculation.drafter_path) != (
            old.context_len,
            old.speculation.drafter_path,
        ):
            self._reload_model()
        if settings.theme in self.available_themes and settings.theme != self.theme:
            self.theme = settings.theme
        self.chat_screen.show_status()
        self.services.save_settings(settings)

    def action_toggle_speculation(self) -> None:
        """Switch speculation for the running answer and all later ones."""
        options: SpeculationOptions = self.settings.speculation
        is_enabled = not options.is_enabled
        self._tell_errors(
            lambda: self.change_settings(
                replace(self.settings, speculation=replace(options, is_enabled=is_enabled))
            )
        )

    def watch_theme(self, theme: str) -> None:
        """Remember a theme that was picked in the palette."""
        if self._chat_screen is not None and theme != self.settings.theme:
            self._tell_errors(lambda: self.change_settings(replace(self.settings, theme=theme)))

    def on_app_focus(self) -> None:
        """The window is looked at again: other windows may have made or deleted chats."""
        if self._chat_screen is not None and self._chat_screen.is_mounted:
            self._tell_errors(self._chat_screen.show_chats)

    # -- screens, palette, messages ---------------------------------------------------

    def action_settings(self) -> None:
        """Open the settings."""
        from app.screens.settings import SettingsScreen

        self._open(SettingsScreen)

    def action_models(self) -> None:
        """Open the models."""
        from app.screens.models import ModelsScreen

        self._open(ModelsScreen)

    def action_bench(self) -> None:
        """Open the bench."""
        from app.screens.bench import BenchScreen  # its plots cost 0.1 s nobody else should pay

        self._open(BenchScreen)

    def action_help(self) -> None:
        """Open the help."""
        from app.screens.help import HelpScreen

        self._open(HelpScreen)

    def _open(self, kind: type[Screen[None]]) -> None:
        if isinstance(self.screen, ModalScreen) and not isinstance(self.screen, CommandPalette):
            return  # a question wants its answer first
        if not any(isinstance(screen, kind) for screen in self.screen_stack):
            self.push_screen(kind())

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Everything the palette offers: what the keys do, by name."""
        yield from super().get_system_commands(screen)
        if self._chat_screen is not None:
            yield from self._chat_screen.commands.palette()

    def copy(self, text: str, what: str) -> None:
        """Copy by the terminal's escape and by a local tool."""
        self.copy_to_clipboard(text)
        self._run_thread(lambda: self.copy_tool(text))
        self.notify(f"Copied {what}", timeout=2, markup=False)

    def show_error(self, error: BaseException) -> None:
        """One line about an exception, with what to do."""
        described = describe(error)
        self.notify(described.line, title=described.title, severity="error", markup=False)

    def _notify_error(self, error: ErrorInfo) -> None:
        described = describe_info(error)
        self.notify(described.line, title=described.title, severity="error", markup=False)

    def _tell_errors(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (StorageError, SettingsError, OSError) as error:
            self.show_error(error)

    def call_from_worker(self, callback: Callable[..., None], *args: object) -> None:
        """Run on the UI thread and wait; nothing while the screens are taken down.

        Textual still calls back then, and every query finds a half removed screen.
        """

        def call_while_running() -> None:
            if self.is_running:
                callback(*args)

        self.call_from_thread(call_while_running)

    def _run_thread(self, work: Callable[[], object]) -> None:
        self.run_worker(work, thread=True, exit_on_error=True)
