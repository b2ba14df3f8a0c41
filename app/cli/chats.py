"""`foretell chats`: list, show, search, export and remove stored chats."""

from __future__ import annotations

import argparse
import dataclasses
import time

from app.cli.output import say, say_json
from app.wiring import Wiring
from storage.chats import Chat


def run_chats(args: argparse.Namespace, wiring: Wiring) -> None:
    """Dispatch the verb. Raises: StorageError naming a chat that is not there."""
    verbs = {
        "list": run_list,
        "show": run_show,
        "search": run_search,
        "export": run_export,
        "rm": run_rm,
    }
    verbs[args.verb](args, wiring)


def run_list(args: argparse.Namespace, wiring: Wiring) -> None:
    """Chats, newest first."""
    chats = wiring.open_chats().list_chats()
    if args.json:
        say_json([_chat_dict(chat) for chat in chats])
        return
    for chat in chats:
        say(_chat_line(chat))


def run_show(args: argparse.Namespace, wiring: Wiring) -> None:
    """A chat as a person reads it."""
    _say_chat(args.id, "md", wiring)


def run_export(args: argparse.Namespace, wiring: Wiring) -> None:
    """A whole chat as Markdown or JSON, every branch in the JSON."""
    _say_chat(args.id, args.format, wiring)


def run_search(args: argparse.Namespace, wiring: Wiring) -> None:
    """Chats whose title or messages contain the words."""
    from storage.chat_search import search_chats

    hits = search_chats(wiring.open_database(), args.text)
    if args.json:
        say_json([dataclasses.asdict(hit) for hit in hits])
        return
    for hit in hits:
        say(f"{hit.chat_id}  {hit.title or '(empty)'}\n        {hit.snippet}")


def run_rm(args: argparse.Namespace, wiring: Wiring) -> None:
    """Remove a chat with all its messages."""
    store = wiring.open_chats()
    chat = store.find(args.id)
    store.delete(chat.id)
    say(f"removed {chat.id}  {chat.title}")


def _say_chat(chat_id: str, form: str, wiring: Wiring) -> None:
    from storage.chat_export import export_json, export_markdown

    store = wiring.open_chats()
    chat = store.find(chat_id)
    if form == "json":
        say(export_json(chat, store.all_messages(chat.id)), end="")
    else:
        say(export_markdown(chat, store.messages(chat.id)), end="")


def _chat_line(chat: Chat) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.updated_at))
    return f"{chat.id}  {when}  {chat.num_messages:4d} messages  {chat.title or '(empty)'}"


def _chat_dict(chat: Chat) -> dict[str, object]:
    return {
        "id": chat.id,
        "title": chat.title,
        "model": chat.model,
        "num_messages": chat.num_messages,
        "created_at": chat.created_at,
        "updated_at": chat.updated_at,
    }
