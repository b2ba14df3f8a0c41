"""Command names and the functions that run them; a failure is raised, or is an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from app.cli.ask import run_ask
from app.cli.flags import settings_from
from app.cli.output import USAGE, CommandFailed, is_terminal, say
from app.wiring import Wiring


def run_chat(args: argparse.Namespace, wiring: Wiring) -> int | None:
    """Open the screen; its exit code. It has printed by itself what went wrong.

    Raises: CommandFailed when there is no terminal, ChatGone for a bad id.
    """
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        raise CommandFailed(
            "the chat needs a terminal", hint="pipe a prompt into 'foretell ask'", exit_code=USAGE
        )
    settings = settings_from(args, wiring.settings)
    chat_id = _chosen_chat(args, wiring)
    from app.app import ForetellApp  # after every check that can fail without a screen

    app = ForetellApp(wiring.services(settings, chat_id=chat_id))
    app.run()
    return app.return_code


def _chosen_chat(args: argparse.Namespace, wiring: Wiring) -> str | None:
    if getattr(args, "cid", None):
        return wiring.open_chats().find(args.cid).id
    if getattr(args, "resume", False):
        latest = wiring.open_chats().latest()
        return latest.id if latest else None
    return None


def run_models(args: argparse.Namespace, wiring: Wiring) -> None:
    """`foretell models`."""
    from app.cli.models import run_models as run

    run(args, wiring)


def run_chats(args: argparse.Namespace, wiring: Wiring) -> None:
    """`foretell chats`."""
    from app.cli.chats import run_chats as run

    run(args, wiring)


def run_bench(args: argparse.Namespace, wiring: Wiring) -> None:
    """`foretell bench`."""
    from app.cli.bench import run_bench as run

    run(args, wiring)


def run_diagnose(args: argparse.Namespace, wiring: Wiring) -> None:
    """`foretell diagnose`."""
    from app.cli.diagnose import run_diagnose as run

    run(args, wiring)


def run_doctor(args: argparse.Namespace, wiring: Wiring) -> None:
    """`foretell doctor`."""
    from app.cli.doctor import run_doctor as run

    run(args, wiring)


def run_config(args: argparse.Namespace, wiring: Wiring) -> None:
    """`foretell config path`: every place, and what decided it."""
    paths = wiring.paths
    reason = "FORETELL_HOME" if wiring.environment.home else "the platform's folders"
    for name, path in (
        ("settings", paths.config_file),
        ("chats", paths.database_file),
        ("models", paths.models_dir),
        ("cache", paths.cache_dir),
        ("log", paths.log_file),
        ("hugging face cache", wiring.environment.hf_cache),
        *(("ollama models", folder) for folder in wiring.environment.ollama_models),
    ):
        say(f"{name:20} {path}")
    say(f"{'decided by':20} {reason}")


COMMANDS: dict[str, Callable[[argparse.Namespace, Wiring], int | None]] = {
    "chat": run_chat,
    "ask": run_ask,
    "models": run_models,
    "chats": run_chats,
    "bench": run_bench,
    "diagnose": run_diagnose,
    "doctor": run_doctor,
    "config": run_config,
}
