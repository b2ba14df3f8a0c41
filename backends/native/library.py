"""The native library by ctypes: its structs, its calls, and the process's thread pool.

Struct sizes are compared with the library's own when it is loaded, so a stale build is refused
instead of read wrongly. Every call releases the GIL. Knows no program and no chat.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from backends.base import BackendUnavailable

GROUP = 16
"""Output rows per packed group (FT_GROUP)."""
ALIGNMENT = 64
"""Bytes; what kernels expect of every buffer."""


class Matrix(ctypes.Structure):
    """ft_matrix: a packed matrix."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("group_bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]


class NormSpec(ctypes.Structure):
    """ft_norm; all zero means no norm."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("present", ctypes.c_int32),
    ]


class RopeSpec(ctypes.Structure):
    """ft_rope."""

    _fields_ = [
        ("inv_freq", ctypes.c_void_p),
        ("pairs", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("mscale", ctypes.c_double),
    ]


class OpSpec(ctypes.Structure):
    """ft_op; which fields count depends on `kind`."""


OpSpec._fields_ = [
    ("kind", ctypes.c_int32),
    ("src", ctypes.c_int32),
    ("dst", ctypes.c_int32),
    ("num_matrices", ctypes.c_int32),
    ("matrices", ctypes.POINTER(Matrix)),
    ("biases", ctypes.POINTER(ctypes.c_void_p)),
    ("norm", NormSpec),
    ("post_norm", NormSpec),
    ("factor", ctypes.c_double),
    ("activation", ctypes.c_int32),
    ("heads", ctypes.c_int32),
    ("slot", ctypes.c_int32),
    ("rope", ctypes.c_int32),
    ("writes_kv", ctypes.c_int32),
    ("v_from_k", ctypes.c_int32),
    ("q_norm", NormSpec),
    ("k_norm", NormSpec),
    ("v_norm", NormSpec),
    ("num_experts", ctypes.c_int32),
    ("num_used", ctypes.c_int32),
    ("is_fused", ctypes.c_int32),
    ("experts_padding", ctypes.c_int32),
    ("router_norm", NormSpec),
    ("experts_post_norm", NormSpec),
    ("router_scale", ctypes.c_void_p),
    ("expert_scale", ctypes.c_void_p),
    ("dense", ctypes.POINTER(OpSpec)),
    ("suppressed", ctypes.c_void_p),
    ("num_suppressed", ctypes.c_int64),
    ("table_factor", ctypes.c_double),
    ("proj_factor", ctypes.c_double),
    ("part", ctypes.c_int32),
    ("offset", ctypes.c_int32),
    ("takes_errors", ctypes.c_int32),
    ("head_padding", ctypes.c_int32),
]


class SlotSpec(ctypes.Structure):
    """ft_slot."""

    _fields_ = [
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("ring", ctypes.c_int32),
    ]


class ProgramSpec(ctypes.Structure):
    """ft_program_spec."""

    _fields_ = [
        ("ops", ctypes.POINTER(OpSpec)),
        ("widths", ctypes.c_void_p),
        ("slots", ctypes.POINTER(SlotSpec)),
        ("ropes", ctypes.POINTER(RopeSpec)),
        ("num_ops", ctypes.c_int32),
        ("num_registers", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("num_ropes", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("is_f32_cache", ctypes.c_int32),
        ("grows_cache", ctypes.c_int32),
    ]


class SlotMemory(ctypes.Structure):
    """ft_slot_memory: where one chat keeps one slot."""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
    ]


class SegmentSpec(ctypes.Structure):
    """ft_segment: rows of one chat."""

    _fields_ = [
        ("slots", ctypes.POINTER(SlotMemory)),
        ("start", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    ]


class ForwardArgs(ctypes.Structure):
    """ft_forward_args."""

    _fields_ = [
        ("token_ids", ctypes.c_void_p),
        ("segments", ctypes.POINTER(SegmentSpec)),
        ("wanted", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("argmax", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("given", ctypes.c_void_p),
        ("kind_ns", ctypes.c_void_p),
        ("num_segments", ctypes.c_int32),
        ("num_wanted", ctypes.c_int32),
    ]


_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "matrix": Matrix,
    "norm": NormSpec,
    "rope": RopeSpec,
    "op": OpSpec,
    "slot": SlotSpec,
    "program_spec": ProgramSpec,
    "slot_memory": SlotMemory,
    "segment": SegmentSpec,
    "forward_args": ForwardArgs,
}

_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES: dict[str, tuple[object, Sequence[object]]] = {
    "ft_struct_bytes": (_INT64, [ctypes.c_char_p]),
    "ft_kernels_select": (_POINTER, [ctypes.c_char_p]),
    "ft_kernels_name": (ctypes.c_char_p, [_POINTER]),
    "ft_group_bytes": (_INT64, [_INT32, _INT64]),
    "ft_pack_matrix": (None, [_POINTER, _INT32, _POINTER, _INT64, _INT64, _POINTER]),
    "ft_unpack_row": (None, [ctypes.POINTER(Matrix), _INT64, _POINTER]),
    "ft_pool_new": (_POINTER, [_INT32]),
    "ft_pool_free": (None, [_POINTER]),
    "ft_pool_threads": (_INT32, [_POINTER]),
    "ft_pool_visit": (None, [_POINTER, _INT32, _INT32, _POINTER]),
    "ft_read_memory": (ctypes.c_uint64, [_POINTER, _POINTER, _INT64]),
    "ft_program_new": (_POINTER, [ctypes.POINTER(ProgramSpec), _POINTER]),
    "ft_program_free": (None, [_POINTER]),
    "ft_forward": (_INT32, [_POINTER, _POINTER, ctypes.POINTER(ForwardArgs)]),
}


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library that was built with the package, checked against the structs above.

    Raises: BackendUnavailable when it was not built, cannot be loaded, or is of another version.
    """
    path = _library_path()
    if path is None:
        raise BackendUnavailable(
            "the native library was not built",
            hint="install a C compiler and reinstall foretell",
        )
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(
            f"the native library {path.name} cannot be loaded: {error}", hint="reinstall foretell"
        ) from None
    _check_structs(library, path)
    return library


def _library_path() -> Path | None:
    folder = Path(__file__).parent
    suffixes = [*importlib.machinery.EXTENSION_SUFFIXES, ".so", ".dylib", ".dll"]
    paths = (folder / f"_foretell{suffix}" for suffix in suffixes)
    return next((path for path in paths if path.is_file()), None)


def _check_structs(library: ctypes.CDLL, path: Path) -> None:
    for name, struct in _STRUCTS.items():
        theirs = library.ft_struct_bytes(name.encode())
        if theirs != ctypes.sizeof(struct):
            raise BackendUnavailable(
                f"the native library {path.name} is of another version: its {name} has "
                f"{theirs} bytes, expected {ctypes.sizeof(struct)}",
                hint="rebuild it: pip install -e . (or reinstall foretell)",
            )


class Kernels:
    """The matmul kernels of one instruction set."""

    def __init__(self, wanted: str | None = None) -> None:
        """`wanted` names a set ("portable", "avx2", ...); None takes the best of this processor.

        Raises: BackendUnavailable for a name this processor or build does not have.
        """
        library = load_library()
        self.handle = library.ft_kernels_select(None if wanted is None else wanted.encode())
        if not self.handle:
            raise BackendUnavailable(f"there are no kernels named {wanted!r} on this processor")
        self.name = library.ft_kernels_name(self.handle).decode()


class ThreadPool:
    """Threads that share the work of every forward; the caller is one of them."""

    def __init__(self, threads: int) -> None:
        self._library = load_library()
        self.handle = self._library.ft_pool_new(threads)
        if not self.handle:
            raise BackendUnavailable(f"a pool of {threads} threads cannot be started")

    @property
    def threads(self) -> int:
        """Threads that run, the caller included."""
        return int(self._library.ft_pool_threads(self.handle))

    def visit(self, count: int, grain: int) -> np.ndarray:
        """How often each of `count` items was handed out, int32 [count]: ones, for tests."""
        visits = np.zeros(count, np.int32)
        self._library.ft_pool_visit(self.handle, count, grain, visits.ctypes.data)
        return visits

    def close(self) -> None:
        """Stop the threads. State: the pool must not be used afterwards."""
        self._library.ft_pool_free(self.handle)
        self.handle = None


@functools.cache
def _pool_of(threads: int) -> ThreadPool:
    return ThreadPool(threads)


def shared_pool(threads: int = 0) -> ThreadPool:
    """The process's pool of that many threads; 0 takes the physical cores."""
    return _pool_of(threads if threads > 0 else physical_cores())


def physical_cores() -> int:
    """Physical cores this process may use: of its affinity, and of its share in a container."""
    import psutil  # deferred: only a start without a setting asks

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return max(1, min(cores, quota_cores() or cores))


def quota_cores(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Cores a container's quota pays for, rounded up; None without one.

    More threads than that are stopped together for the rest of every period.
    Source: Linux Documentation/admin-guide/cgroup-v2.rst (cpu.max), cgroup-v1 (cpu.cfs_quota_us).
    """
    try:
        quota, period = (groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (groups / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (groups / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None  # "max", or -1
    return -(-int(quota) // int(period))


def aligned_bytes(size: int) -> np.ndarray:
    """Uninitialised uint8 [size] that starts at a multiple of ALIGNMENT."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def read_bandwidth_gb_s(threads: int = 0, *, num_bytes: int = 256 << 20) -> float:
    """Measured memory read bandwidth, GB/s: the best of five passes over a large buffer.

    Raises: BackendUnavailable.
    """
    library, pool = load_library(), shared_pool(threads)
    words = np.ones(num_bytes // 8, np.uint64)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        library.ft_read_memory(pool.handle, words.ctypes.data, len(words))
        best = max(best, words.nbytes / (time.perf_counter() - start))
    return best / 1e9
