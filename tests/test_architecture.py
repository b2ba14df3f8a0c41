"""Imports point one way: app -> models, storage -> engine's seam modules -> backends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("app", "engine", "backends", "models", "storage")

ALLOWED = {
    "app": {"app", "engine", "backends", "models", "storage", "assets"},
    "models": {"models", "engine", "backends", "assets"},
    "storage": {"storage", "assets"},
    "engine": {"engine", "backends"},
    "backends": {"backends"},
}
"""Folder -> our own packages it may import."""

ENGINE_SEAM = (
    "engine.contracts",
    "engine.commands",
    "engine.errors",
    "engine.events",
    "engine.speculative.target",
    "engine.speculative.draft_head",
    "engine.speculative.options",
)
"""The engine modules models may see: what they implement, never the loop."""

BACKEND_SEAM = {
    "engine": ("backends.base",),
    "models": ("backends.base", "backends.program", "backends.weights"),
}
"""The backend modules engine and models may see."""

MODELS_AND_BACKENDS_USERS = ("app/wiring.py", "app/cli/")
"""Where app may touch models and backends directly."""

HOME_OF = {
    "textual": ("app/",),
    "rich": ("app/",),
    "torch": ("backends/torch_backend/",),
    "mlx": ("backends/mlx_backend/",),
    "sqlite3": ("storage/",),
    "filelock": ("storage/",),
    "httpx": ("storage/",),
    "platformdirs": ("storage/",),
    "tokenizers": ("models/",),
    "jinja2": ("models/",),
}
"""Third-party package -> the only places that may import it."""

ALGORITHMS = ("ngram", "head_speculator", "block_speculator", "drafters")
"""Modules only the registry (and the command line, for the fakes) may know."""


def imports() -> Iterator[tuple[str, int, str]]:
    """(file, line, imported module) of every import, deferred ones included."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        yield name, node.lineno, alias.name
                elif isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{name}:{node.lineno} is a relative import"
                    yield name, node.lineno, node.module or ""


def is_within(module: str, seams: tuple[str, ...]) -> bool:
    return any(module == seam or module.startswith(seam + ".") for seam in seams)


def violation(file: str, module: str) -> str | None:
    """Why this file may not import this module, or None."""
    folder, top = file.split("/")[0], module.split(".")[0]
    if top in FOLDERS and top not in ALLOWED[folder]:
        return f"{folder} may import only {sorted(ALLOWED[folder])}"
    if top in HOME_OF and not file.startswith(HOME_OF[top]):
        return f"{top} lives in {HOME_OF[top]} only"
    if folder == "models" and top == "engine" and not is_within(module, ENGINE_SEAM):
        return "models see only the engine's seam modules"
    if folder in BACKEND_SEAM and top == "backends" and not is_within(module, BACKEND_SEAM[folder]):
        return f"of the backends only {BACKEND_SEAM[folder]} are seams"
    if (
        folder == "app"
        and top in ("models", "backends")
        and not file.startswith(MODELS_AND_BACKENDS_USERS)
        and module != "models.catalog"
    ):
        return "app reaches models and backends through wiring and the command line"
    return algorithm_violation(file, module)


def algorithm_violation(file: str, module: str) -> str | None:
    """Only the registry knows which algorithms exist."""
    if not module.startswith("engine.speculative."):
        return None
    name = module.removeprefix("engine.speculative.")
    if name in ALGORITHMS and file not in (
        "engine/speculative/registry.py",
        "app/cli/diagnose.py",
    ):
        return "only the registry knows the algorithms"
    if name == "registry" and file == "engine/speculative/execution.py":
        return "the loop knows no algorithm"
    return None


def test_imports_point_one_way() -> None:
    found = [
        f"{file}:{line} imports {module}: {reason}"
        for file, line, module in imports()
        if (reason := violation(file, module))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("engine/events.py", "textual"),
        ("engine/events.py", "models.loader"),
        ("engine/events.py", "torch"),
        ("engine/events.py", "sqlite3"),
        ("engine/session.py", "backends.weights"),
        ("engine/speculative/execution.py", "engine.speculative.ngram"),
        ("engine/speculative/execution.py", "engine.speculative.registry"),
        ("models/llama.py", "engine.engine"),
        ("models/llama.py", "backends.native.executable"),
        ("storage/chats.py", "engine.events"),
        ("app/screens/chat.py", "models.loader"),
    ],
)
def test_a_forbidden_import_is_found(file: str, module: str) -> None:
    assert violation(file, module)


def test_no_file_is_longer_than_500_lines() -> None:
    files = [p for folder in (*FOLDERS, "tests") for p in (ROOT / folder).rglob("*.py")]
    long = {
        p.relative_to(ROOT).as_posix(): n
        for p in files
        if (n := len(p.read_text("utf-8").splitlines())) > 500
    }
    assert not long
