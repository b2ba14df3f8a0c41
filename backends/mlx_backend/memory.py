"""Which of MLX's errors mean that memory ran out, and how much of it is free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from backends.base import OutOfDeviceMemory

# Source: MLX `backend/metal/allocator.cpp`, `backend/no_gpu/allocator.cpp`; Metal's own text for
# a command buffer that ran out.
_OUT_OF_MEMORY = re.compile(r"malloc\]|Unable to allocate|Insufficient Memory|OutOfMemory")


@contextmanager
def memory_for(told: Callable[[], OutOfDeviceMemory]) -> Iterator[None]:
    """Whatever computes happens in here. Raises: what `told` makes, when memory ran out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        raise told() from error


def free_bytes() -> int:
    """Memory free now: processor and GPU share it."""
    return int(psutil.virtual_memory().available)
