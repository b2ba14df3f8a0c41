"""Chooses the backend for this machine, and says why the others were not chosen.

Importing this imports no backend: each is imported when it is tried. The environment is not read
here; a caller passes the name a person asked for.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from backends.base import Backend, BackendUnavailable
from backends.first_that_fits import FirstThatFits

BACKENDS = ("mlx", "cuda", "native", "torch")
"""Fastest first; each says for itself whether it can run here."""


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Whether a backend can run here."""

    name: str
    text: str
    """The device and instruction set, or the reason why not and what to do."""
    is_available: bool


def select_backend(wanted: str = "auto", *, threads: int = 0) -> Backend:
    """The backend of that name; `auto` takes the first that runs here and holds the model.

    `threads` is for the native backend; 0 takes the physical cores.
    Raises: BackendUnavailable naming every backend that was tried and why it cannot run.
    """
    if wanted != "auto":
        return _factory(wanted)(threads)
    return FirstThatFits(_auto_candidates(threads))


def _auto_candidates(threads: int) -> list[tuple[str, Callable[[], Backend]]]:
    """What `auto` tries. MLX only on Apple Silicon: its CPU device elsewhere is for tests.

    A GPU whose memory holds the unpacked weights is fastest. Unpacking them in every step moves
    some 20 times their packed bytes, so the CPU comes before that.
    """
    candidates: list[tuple[str, Callable[[], Backend]]] = [
        ("mlx", _mlx),
        ("cuda", lambda: _cuda(may_stay_packed=False)),
        ("native", lambda: _native(threads)),
        ("cuda", _cuda),
        ("torch", lambda: _torch("cpu")),
    ]
    return candidates if sys.platform == "darwin" else candidates[1:]


def describe_backends(*, threads: int = 0) -> list[BackendReport]:
    """Every backend, fastest first, with its device or its reason."""
    return [_report(name, threads) for name in BACKENDS]


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
        "cuda": lambda threads: _cuda(),
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


def _cuda(*, may_stay_packed: bool = True) -> Backend:
    # Asked of the driver, not of torch: on a machine without a GPU its import takes 2 s for a no.
    if not has_cuda_device():
        raise BackendUnavailable("the driver finds no NVIDIA GPU")
    return _torch("cuda", may_stay_packed=may_stay_packed)


def _torch(device: str, *, may_stay_packed: bool = True) -> Backend:
    try:
        from backends.torch_backend.backend import TorchBackend
    except (ImportError, OSError) as error:
        raise _not_importable("torch", error) from None
    return TorchBackend(device, may_stay_packed=may_stay_packed)


def _mlx() -> Backend:
    try:
        module = importlib.import_module("backends.mlx_backend.backend")
    except (ImportError, OSError) as error:
        raise _not_importable("mlx", error) from None
    backend: Backend = module.MlxBackend()
    return backend


def _not_importable(package: str, error: ImportError | OSError) -> BackendUnavailable:
    """A package that is not there, or (OSError) a library it needs that the system cannot load."""
    hint = ""
    if sys.platform == "win32" and not isinstance(error, ImportError):
        hint = "install the Microsoft Visual C++ Redistributable"
    return BackendUnavailable(f"{package} cannot be imported: {error}", hint=hint)


def has_cuda_device() -> bool:
    """Whether an NVIDIA driver is installed and sees a device.

    Source: CUDA driver API, `cuInit` and `cuDeviceGetCount` (0 is success).
    """
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return False
    return bool(found) and count.value > 0
