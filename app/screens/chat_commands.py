"""What a person can do in a chat by name: the palette's entries and the slash commands are one."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import SystemCommand

from app.editor import edit_in_terminal
from app.errors import Refused
from app.screens.dialogs import ConfirmDialog, EditDialog, TextDialog
from app.settings import THINK, Settings, SettingsError
from app.text_files import free_path, read_text_file, typed_path, write_new_file
from app.widgets.prompt import Attachment
from storage.chat_export import export_markdown
from storage.errors import StorageError
from storage.model_sources import is_source

if TYPE_CHECKING:
    from app.app import ForetellApp
    from app.screens.chat import ChatScreen


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """One thing to do."""

    name: str
    """What is typed behind the slash."""
    title: str
    """What the palette calls it; empty when it has that by another name."""
    help_text: str
    run: Callable[[str], Awaitable[None] | None]
    """Takes what stands behind the name. Raises: Refused, StorageError."""
    takes: str = ""
    """What may stand behind the name; empty: nothing."""
    aliases: tuple[str, ...] = ()


class ChatCommands:
    """Every command of the chat screen."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self._table = tuple(self._make_table())

    @property
    def _app(self) -> ForetellApp:
        return self._screen.foretell

    @property
    def names(self) -> Sequence[str]:
        """What can stand behind a slash, aliases left out."""
        return [command.name for command in self._table]

    def describe(self) -> str:
        """One line for each command, for the help."""
        typed = [(f"/{c.name} {c.takes}".rstrip(), c.help_text) for c in self._table]
        width = max(len(name) for name, _ in typed)
        return "\n".join(f"  {name:{width}}  {text}" for name, text in typed)

    def hint(self, typed: str) -> list[str]:
        """The commands that begin like what is being typed; empty when it is none."""
        if not typed.startswith("/") or typed.startswith("//") or "\n" in typed:
            return []
        name, space, _ = typed[1:].partition(" ")
        found = [c for c in self._table if c.name.startswith(name.lower())]
        if space:
            found = [c for c in found if c.name == name.lower()]
        hints = [f"/{c.name} {c.takes}".rstrip() for c in found]
        return [*hints, found[0].help_text] if len(found) == 1 else hints

    def palette(self) -> Iterable[SystemCommand]:
        """The same commands for the palette."""
        for command in (c for c in self._table if c.title):
            help_text = f"{command.help_text} · /{command.name}"
            yield SystemCommand(command.title, help_text, partial(self.choose, command.name))
        if name := self._screen.other_model:
            use = partial(self._app.choose_model, name)
            yield SystemCommand(f"Use {name}", "The model that answered here before", use)

    async def run(self, name: str, argument: str) -> None:
        """Carry out what was typed.

        Raises: Refused with the line that says why not; StorageError.
        """
        found = next((c for c in self._table if name in (c.name, *c.aliases)), None)
        if found is None:
            raise Refused(f"There is no command /{name}: /help lists them, //{name} sends the text")
        if argument and not found.takes:
            raise Refused(f"/{found.name} takes nothing behind it")
        if inspect.isawaitable(done := found.run(argument)):
            await done

    async def choose(self, name: str) -> None:
        """Carry out what was chosen by a key or in the palette, or say why not."""
        try:
            await self.run(name, "")
        except (Refused, StorageError) as error:
            self.tell(error)

    def tell(self, error: Refused | StorageError) -> None:
        """Why something was not done."""
        if isinstance(error, Refused):
            self._screen.notify(str(error), severity="warning", markup=False)
        else:
            self._app.show_error(error)

    def _make_table(self) -> Iterable[ChatCommand]:
        screen, run = self._screen, _without_argument
        yield ChatCommand("help", "Help", "Keys and commands (F1)", self._open("help"), "", ("?",))
        yield ChatCommand(
            "new",
            "New chat",
            "Start an empty chat (Ctrl+N)",
            run(screen.action_new),
            aliases=("clear",),
        )
        yield ChatCommand(
            "search",
            "Search chats",
            "Find a chat by title or text (Ctrl+F)",
            run(screen.action_search),
        )
        yield ChatCommand(
            "regen",
            "Answer anew",
            "Answer the last question again (Ctrl+R)",
            run(screen.action_regenerate),
        )
        yield ChatCommand(
            "continue",
            "Continue the answer",
            "Go on with an answer that ended early",
            run(screen.action_go_on),
        )
        yield ChatCommand("stop", "Stop", "Stop the answer (Esc)", run(screen.action_stop))
        yield ChatCommand(
            "copy", "Copy answer", "Copy the newest answer (Ctrl+O)", run(screen.action_copy_answer)
        )
        yield ChatCommand(
            "read", "Attach a file", "Put a text file into the message", self._read, "PATH"
        )
        yield ChatCommand(
            "editor", "Open the editor", "Write in $EDITOR (Ctrl+G)", run(self._edit_prompt)
        )
        yield ChatCommand(
            "export", "Export chat", "Write this chat as Markdown", self._export, "[PATH]"
        )
        yield from self._make_switches()
        yield from self._make_places()

    def _make_switches(self) -> Iterable[ChatCommand]:
        yield ChatCommand(
            "system", "System prompt", "System prompt of this chat", self._system, "[TEXT]"
        )
        yield ChatCommand(
            "think",
            "Thinking",
            "Think first, where the model can switch",
            self._think,
            "on|off|auto",
        )
        yield ChatCommand(
            "spec",
            "Speculation on or off",
            "Draft ahead, from the next step on (Ctrl+T)",
            self._spec,
            "on|off",
        )
        yield ChatCommand("model", "", "Load a model by name", self._model, "NAME")

    def _make_places(self) -> Iterable[ChatCommand]:
        screen, run = self._screen, _without_argument
        yield ChatCommand(
            "models", "Models", "Get, use and delete models (F3)", self._open("models")
        )
        yield ChatCommand(
            "settings", "Settings", "Speculation, sampling, theme (F2)", self._open("settings")
        )
        yield ChatCommand(
            "bench", "Bench", "Does drafting pay on this machine? (F4)", self._open("bench")
        )
        yield ChatCommand(
            "chats",
            "Chats",
            "Show or hide the list of chats (Ctrl+B)",
            run(screen.action_toggle_chats),
        )
        yield ChatCommand(
            "rename", "Rename chat", "Give this chat another title", self._rename_open, "[TITLE]"
        )
        yield ChatCommand(
            "delete", "Delete chat", "Delete this chat, after a question", run(self._delete_open)
        )
        yield ChatCommand(
            "bye", "", "Leave; what runs is kept (Ctrl+Q)", self._leave, "", ("quit", "exit")
        )

    def _open(self, page: str) -> Callable[[str], None]:
        return lambda _: getattr(self._app, f"action_{page}")()

    async def _leave(self, _: str) -> None:
        await self._app.action_quit()

    # -- switches ----------------------------------------------------------------------

    def _think(self, word: str) -> None:
        words = list(THINK)
        settings = self._app.settings
        chosen = word.lower() or words[(words.index(settings.think) + 1) % len(words)]
        if chosen not in THINK:
            raise Refused(f"/think {word}: use on, off or auto")
        self._change(replace(settings, think=chosen))
        info = self._app.model.info
        if info is not None and not info.has_thinking_switch:
            when = f"for models with a switch, which {info.name} has not"
        else:
            when = "from the next answer on"
        self._screen.notify(f"Thinking: {chosen}, {when}", markup=False)

    def _spec(self, word: str) -> None:
        settings = self._app.settings
        is_on = settings.speculation.is_enabled
        wanted = {"on": True, "off": False, "": not is_on}.get(word.lower())
        if wanted is None:
            raise Refused(f"/spec {word}: use on or off")
        self._change(
            replace(settings, speculation=replace(settings.speculation, is_enabled=wanted))
        )
        self._screen.notify(f"Speculation: {'on' if wanted else 'off'}", markup=False)

    def _change(self, settings: Settings) -> None:
        try:
            self._app.change_settings(settings)
        except SettingsError as error:
            self._app.show_error(error)

    def _model(self, name: str) -> None:
        if not name:
            self._app.action_models()
            return
        if name.endswith(".gguf") and not is_source(name):
            name = str(typed_path(name))
        self._app.choose_model(name)

    def _system(self, text: str) -> None:
        if text:
            self._set_system(text)
        else:
            self._screen.run_worker(self._edit_system())

    async def _edit_system(self) -> None:
        question = "System prompt of this chat, from its next answer on. Empty: the model's own."
        with self._screen.told():
            chat_id = self._screen.chat_id
            store = self._screen.conversations.store
            default = self._app.settings.system_prompt
            before = store.get(chat_id).system_prompt if chat_id else default
            dialog = EditDialog(question, before, verb="Use", may_be_empty=True)
            text = await self._app.push_screen_wait(dialog)
            if text is not None and text != before and chat_id == self._screen.chat_id:
                with self._screen.put_back_on_error(f"/system {text}"):
                    self._set_system(text)

    def _set_system(self, text: str) -> None:
        chat_id = self._screen.make_chat()
        self._screen.conversations.store.set_system_prompt(chat_id, text)
        self._screen.notify("System prompt of this chat: used from its next answer on")

    def _edit_prompt(self) -> None:
        if any(turn.is_submitted for turn in self._screen.conversations.running):
            # The editor holds the screen's thread, which stores what comes.
            raise Refused("An answer is running: the editor opens when it has ended")
        before = self._screen.prompt.text
        after = edit_in_terminal(self._app, self._app.services.editor, before)
        if after != before:
            self._screen.prompt.rewrite(after)

    # -- files -------------------------------------------------------------------------

    def _read(self, path: str) -> None:
        if path:
            self._attach(typed_path(path))
        else:
            self._screen.run_worker(self._ask_path())

    async def _ask_path(self) -> None:
        path = await self._app.push_screen_wait(TextDialog("Path of a text file"))
        if path is not None:
            try:
                self._attach(typed_path(path))
            except Refused as error:
                self.tell(error)

    def _attach(self, path: Path) -> None:
        text = read_text_file(path)
        self._screen.prompt.attach(Attachment(f"{path.name}:\n\n{text}", path.name))

    def _export(self, argument: str) -> None:
        chat_id = self._screen.chat_id
        store = self._screen.conversations.store
        if chat_id is None or not (messages := store.messages(chat_id)):
            raise Refused("There is nothing to export yet")
        chat = store.get(chat_id)
        path = typed_path(argument) if argument else free_path(chat.title, ".md")
        write_new_file(path, export_markdown(chat, messages))
        self._screen.notify(f"Written to {path.absolute()}", markup=False)

    # -- chats -------------------------------------------------------------------------

    def delete(self, chat_id: str) -> None:
        """Delete a chat after a question."""
        self._screen.run_worker(self._delete(chat_id))

    def rename(self, chat_id: str) -> None:
        """Ask for another title."""
        self._screen.run_worker(self._ask_title(chat_id))

    async def _delete(self, chat_id: str) -> None:
        screen = self._screen
        with screen.told():
            title = screen.conversations.store.get(chat_id).title or "this chat"
            question = f"Delete “{title}” with all its messages? This cannot be undone."
            if await self._app.push_screen_wait(ConfirmDialog(question, "Delete", "Keep")):
                screen.conversations.delete(chat_id)
        here = {chat.id for chat in screen.conversations.store.list_chats()}
        if chat_id == screen.chat_id and chat_id not in here:
            screen.chat_id = None
            await screen.open_chat(None)
        screen.show_chats()

    async def _ask_title(self, chat_id: str) -> None:
        with self._screen.told():
            title = self._screen.conversations.store.get(chat_id).title
            new = await self._app.push_screen_wait(TextDialog("Rename the chat", title))
            if new is not None:
                self._screen.conversations.store.rename(chat_id, new)
        self._screen.show_chats()

    def _rename_open(self, title: str) -> None:
        chat_id = self._need_chat()
        if title:
            self._screen.conversations.store.rename(chat_id, title)
            self._screen.show_chats()
        else:
            self.rename(chat_id)

    def _delete_open(self) -> None:
        self.delete(self._need_chat())

    def _need_chat(self) -> str:
        if self._screen.chat_id is None:
            raise Refused("This chat is empty: there is nothing to rename or delete")
        return self._screen.chat_id


def _without_argument(action: Callable[[], object]) -> Callable[[str], Awaitable[None] | None]:
    """An action of the screen as a command; one that is a worker runs by itself."""

    def run(_: str) -> Awaitable[None] | None:
        done = action()
        return done if inspect.iscoroutine(done) else None

    return run
