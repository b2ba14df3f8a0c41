"""`foretell models`: what is here, what can be had, get it, look at it, remove it."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Callable

from app.cli.output import INTERRUPTED, CommandFailed, is_terminal, note, say, say_json
from app.sizes import format_bytes, format_progress
from app.wiring import Wiring
from models.catalog import load_catalog
from storage.progress import DownloadProgress


def run_models(args: argparse.Namespace, wiring: Wiring) -> None:
    """Dispatch the verb. Raises: StorageError, ModelError, CommandFailed."""
    verbs: dict[str, Callable[[argparse.Namespace, Wiring], None]] = {
        "list": run_list,
        "pull": run_pull,
        "show": run_show,
        "path": run_path,
        "rm": run_rm,
    }
    verbs[args.verb](args, wiring)


def run_list(args: argparse.Namespace, wiring: Wiring) -> None:
    """Installed files, unfinished downloads, then the catalog."""
    library = wiring.library
    installed, catalog = library.installed(), library.catalog()
    parts = library.files.parts()
    if args.json:
        rows = [
            {**dataclasses.asdict(m), "path": str(m.path), "state": "installed"} for m in installed
        ]
        rows += [{**dataclasses.asdict(p), "path": str(p.path), "state": "partial"} for p in parts]
        rows += [
            {**dataclasses.asdict(entry), "state": "available"}
            for entry in catalog
            if not entry.is_installed
        ]
        say_json([_plain(row) for row in rows])
        return
    for model in installed:
        where = f"  ({model.origin})" if model.origin else ""
        say(f"{model.name:28} {format_bytes(model.size_bytes):>9}  installed{where}")
    for part in parts:
        total = f" of {format_bytes(part.total_bytes)}" if part.total_bytes else ""
        say(f"{part.name:28} {format_bytes(part.size_bytes):>9}  partial{total}")
    for entry in catalog:
        if not entry.is_installed:
            reason = entry.unsupported or entry.refusal
            tail = f"{entry.licence}  {reason}" if reason else entry.licence
            say(f"{entry.name:28} {format_bytes(entry.size_bytes):>9}  {tail}")


def run_pull(args: argparse.Namespace, wiring: Wiring) -> None:
    """Download; progress on stderr when it is a terminal, else one line at the end."""
    here = wiring.library.find_whole(args.name)
    if here is not None:
        note(f"{args.name} is here already: {here}")
        return
    meter = _ProgressLine()
    try:
        found = wiring.library.download(
            args.name, on_progress=meter.show, is_cancelled=lambda: False
        )
    except KeyboardInterrupt:
        raise CommandFailed(
            "stopped", hint="the part is kept; pull again to go on", exit_code=INTERRUPTED
        ) from None
    finally:
        meter.end()
    assert found is not None, "nobody cancelled it"
    note(f"installed {found.path}")


def run_show(args: argparse.Namespace, wiring: Wiring) -> None:
    """Facts from the file's header when it is here, else from the catalog."""
    is_here = wiring.library.find(args.name) is not None
    facts = _file_facts(args.name, wiring) if is_here else _catalog_facts(args.name, wiring)
    if args.json:
        say_json(facts)
        return
    for name, value in facts.items():
        say(f"{name.replace('_', ' '):28} {_text(name, value)}")


def run_path(args: argparse.Namespace, wiring: Wiring) -> None:
    """Print the file's path."""
    say(str(wiring.find_model(args.name).path))


def run_rm(args: argparse.Namespace, wiring: Wiring) -> None:
    """Remove an installed model, or what an unfinished download kept."""
    library = wiring.library
    if library.find(args.name) is None:
        if not library.files.remove_part(args.name):
            raise library.not_found(args.name)
        say(f"removed the unfinished download of {args.name}")
        return
    model = library.resolve(args.name)
    went_to_trash = library.files.remove(model)
    library.files.remove_part(args.name)  # of a split model, what was fetched last
    say(f"removed {model.path}" + (" (in the trash)" if went_to_trash else ""))


def _file_facts(name: str, wiring: Wiring) -> dict[str, object]:
    from models.loader import inspect

    model = wiring.library.resolve(name)
    summary = inspect(model.path)
    facts = dataclasses.asdict(summary)
    facts["weight_types"] = dict(summary.weight_types)
    facts = {"name": model.name, "path": str(model.path), **facts}
    facts["drafters"] = [d.name for d in load_catalog().drafters_for(model.name)]
    return facts


def _catalog_facts(name: str, wiring: Wiring) -> dict[str, object]:
    entry = load_catalog().find(name)
    if entry is None:
        raise wiring.library.not_found(name)
    facts = dataclasses.asdict(entry)
    facts["files"] = [file.file_name for file in entry.files]
    facts["sources"] = [source for file in entry.files for source in file.sources]
    facts["size_bytes"] = entry.size_bytes
    facts["drafters"] = [d.name for d in load_catalog().drafters_for(name)]
    facts["installed"] = False
    facts["unsupported"] = load_catalog().refusal(entry)
    return _plain(facts)


def _text(name: str, value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {number}" for key, number in value.items()) or "none"
    if name.endswith(("bytes", "tokens")) and isinstance(value, int):
        return format_bytes(value)
    return "-" if value is None else str(value)


def _plain(row: dict[str, object]) -> dict[str, object]:
    """The row with paths and mappings as JSON has them."""
    return {
        key: value
        if isinstance(value, str | int | float | list | tuple | dict | None)
        else str(value)
        for key, value in row.items()
    }


class _ProgressLine:
    """One line on stderr that is written over, and only on a terminal."""

    def __init__(self) -> None:
        self._is_terminal = is_terminal(sys.stderr)
        self._width = 0

    def show(self, progress: DownloadProgress) -> None:
        """Write the line again."""
        if not self._is_terminal:
            return
        text = format_progress(progress)[: shutil.get_terminal_size().columns - 1]
        note("\r" + text.ljust(self._width), end="")
        self._width = len(text)

    def end(self) -> None:
        """Leave the line."""
        if self._width:
            note("")
