"""Chooses the backend for this machine, and says why the others were not chosen.

Importing this imports no backend: each is imported when it is tried. The environment is not read
here; a caller passes the name a person asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from backends.base import Backend, BackendUnavailable

AUTO_ORDER = ("mlx", "cuda", "native", "torch")
"""What `auto` tries, fastest first; each says for itself whether it can run here."""


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Whether a backend can run here."""

    name: str
    text: str
    """The device and instruction set, or the reason why not and what to do."""
    is_available: bool


def select_backend(wanted: str = "auto", *, threads: int = 0) -> Backend:
    """The backend of that name; `auto` takes the first that runs here.

    `threads` is for the native backend; 0 takes the physical cores.
    Raises: BackendUnavailable naming every backend that was tried and why it cannot run.
    """
    if wanted != "auto":
        return _factory(wanted)(threads)
    reasons = []
    for name in AUTO_ORDER:
        try:
            return _factory(name)(threads)
        except BackendUnavailable as error:
            reasons.append(f"{name}: {error}")
    raise BackendUnavailable(
        f"no backend can run here ({'; '.join(reasons)})",
        hint="reinstall foretell with a C compiler at hand",
    )


def describe_backends(*, threads: int = 0) -> list[BackendReport]:
    """Every backend in the order `auto` tries them, with its device or its reason."""
    return [_report(name, threads) for name in AUTO_ORDER]


def _report(name: str, threads: int) -> BackendReport:
    try:
        backend = _factory(name)(threads)
    except BackendUnavailable as error:
        hint = f"; {error.hint}" if error.hint else ""
        return BackendReport(name, f"not available: {error}{hint}", False)
    return BackendReport(name, getattr(backend, "device", backend.name), True)


def _factory(name: str) -> Callable[[int], Backend]:
    factories: dict[str, Callable[[int], Backend]] = {
        "native": _native,
        "torch": lambda threads: _torch("cpu"),
        "cuda": lambda threads: _torch("cuda"),
        "mlx": lambda threads: _mlx(),
    }
    if name not in factories:
        raise BackendUnavailable(
            f"there is no backend {name!r}", hint=f"use auto, {', '.join(factories)}"
        )
    return factories[name]


def _native(threads: int) -> Backend:
    from backends.native.backend import NativeBackend

    return NativeBackend(threads=threads)


def _torch(device: str) -> Backend:
    try:
        from backends.torch_backend.backend import TorchBackend  # deferred: 1.8 s
    except ImportError as error:
        raise BackendUnavailable(f"torch cannot be imported: {error}") from None
    return TorchBackend(device)


def _mlx() -> Backend:
    try:
        module = importlib.import_module("backends.mlx_backend.backend")
    except ImportError as error:
        raise BackendUnavailable(f"mlx cannot be imported: {error}") from None
    backend: Backend = module.MlxBackend()
    return backend
