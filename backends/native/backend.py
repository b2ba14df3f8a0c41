"""The native CPU backend: packs a program for the kernels of this processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.base import LoadProgress
from backends.native.executable import NativeExecutable
from backends.native.library import Kernels, shared_pool
from backends.native.weights import packed_bytes, packed_weights
from backends.program import Program

if TYPE_CHECKING:
    from backends.base import Backend, Executable


class NativeBackend:
    """C kernels on the CPU; needs neither torch nor a GPU."""

    def __init__(self, *, threads: int = 0, kernels: str | None = None) -> None:
        """`threads` 0 takes the physical cores; `kernels` None the best set of this processor.

        Raises: BackendUnavailable when the library is not there or lacks the named kernels.
        """
        self._kernels = Kernels(kernels)
        self._pool = shared_pool(threads)

    @property
    def name(self) -> str:
        """The name shown by `doctor`."""
        return "native"

    @property
    def device(self) -> str:
        """Instruction set and threads, for a person."""
        return f"CPU, {self._kernels.name}, {self._pool.threads} threads"

    def placed_bytes(self, program: Program) -> int:
        """Memory of the packed weights. Raises: UnsupportedWeight."""
        return sum(map(packed_bytes, packed_weights(program)))

    def compile(
        self,
        program: Program,
        *,
        progress: LoadProgress | None = None,
        reads: Executable | None = None,
    ) -> NativeExecutable:
        """Pack the weights. Raises: UnsupportedWeight, OutOfDeviceMemory."""
        assert reads is None or isinstance(reads, NativeExecutable), "a target of this backend"
        return NativeExecutable(
            program, self._kernels, self._pool, available_bytes, progress, reads
        )


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    import psutil  # deferred: 20 ms that only a load needs

    return int(psutil.virtual_memory().available)


if TYPE_CHECKING:
    _: type[Backend] = NativeBackend
