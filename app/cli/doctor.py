"""`foretell doctor`: what this machine can run, what is set up, and what is missing."""

from __future__ import annotations

import argparse
import platform
import sys

import psutil

from app.cli.output import say, say_json
from app.sizes import format_bytes
from app.wiring import Wiring


def run_doctor(args: argparse.Namespace, wiring: Wiring) -> None:
    """One line per finding; `--json` gives one object."""
    findings = {**_machine(), **_backends(wiring), **_places(wiring)}
    if args.json:
        say_json(findings)
        return
    for name, value in findings.items():
        say(f"{name:18} {value}")


def _machine() -> dict[str, object]:
    memory = psutil.virtual_memory()
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical",
        "memory": f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}",
    }


def _backends(wiring: Wiring) -> dict[str, object]:
    from backends.select import describe_backends

    found = {f"backend {row.name}": row.text for row in describe_backends()}
    picked = f"{wiring.settings.backend} (setting)"
    return {"backend": picked, **found}


def _places(wiring: Wiring) -> dict[str, object]:
    found = wiring.library.find(wiring.settings.model)
    wanted = f"{wiring.settings.model}: " + (
        str(found.path) if found else f"missing (foretell models pull {wiring.settings.model})"
    )
    return {
        "model": wanted,
        "models": str(wiring.paths.models_dir),
        "chats": str(wiring.paths.database_file),
        "settings": str(wiring.paths.config_file),
        "offline": wiring.settings.offline,
    }
