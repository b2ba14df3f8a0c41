"""What an empty chat says: how to begin, or how to get a model first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.settings import DEFAULT_MODEL
from app.sizes import format_bytes, format_progress
from models.catalog import CatalogModel, load_catalog

if TYPE_CHECKING:
    from app.app import ForetellApp


def describe_empty_chat(app: ForetellApp) -> str:
    """Text for the middle of an empty chat, as the model stands."""
    model = app.model
    match model.phase:
        case "no model":
            return _describe_first_run(app)
        case "failed" if model.error is not None:
            hint = f"\n{model.error.hint}" if model.error.hint else ""
            return f"{model.error.message}{hint}\n\nF3 chooses another model."
        case "ready" if model.info is not None:
            return _describe_ready(app)
        case _:
            return "Write your message; it is answered as soon as the model is loaded."


def _describe_ready(app: ForetellApp) -> str:
    info = app.model.info
    assert info is not None, "called when a model is loaded"
    lines = [
        f"{info.name} · {info.architecture} {info.quantization} · {info.device} · "
        f"{info.context_len:,} tokens of context",
        "",
        "Write a message and press Enter. F1 shows what the keys do.",
    ]
    if not info.has_chat_template:
        lines.insert(1, "This is a base model without a chat format: it continues text.")
    if info.refusal:
        lines.insert(1, f"No speculation: {info.refusal}")
    return "\n".join(lines)


def _describe_first_run(app: ForetellApp) -> str:
    download = app.downloads.states.get(DEFAULT_MODEL)
    if download is not None and download.is_running:
        return f"Downloading {download.name}: {format_progress(download.progress)}"
    if app.settings.model != DEFAULT_MODEL:
        return f"The model {app.settings.model} was not found.\n\nF3 shows every model."
    entry = load_catalog().find(DEFAULT_MODEL)
    assert isinstance(entry, CatalogModel), "the catalog has the model to begin with"
    lines = ["There is no model on this machine yet."]
    if download is not None and download.error:
        lines.append(f"The download failed: {download.error}")
    lines += [
        "",
        f"Enter downloads {entry.title}",
        f"      {format_bytes(entry.size_bytes)}, licence {entry.licence}, to",
        f"      {app.services.models.folder}",
        "",
        "F3    shows every model, and what fits here",
    ]
    return "\n".join(lines)
