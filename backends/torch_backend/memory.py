"""Which of torch's errors mean that memory ran out, and how much of it is free.

torch has a class for its GPU allocator only. The CPU's allocator, the driver and the GPU's
libraries (which take memory for workspaces by themselves) raise plain errors with a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from backends.base import OutOfDeviceMemory

# Source: PyTorch `c10/core/impl/alloc_cpu.cpp`, `aten/src/ATen/EmptyTensor.cpp`,
# `c10/cuda/CUDAException.cpp`, `aten/src/ATen/cuda/CUDABlas.cpp` and `cudnn/Exceptions.h`.
_OUT_OF_MEMORY = re.compile(
    "DefaultCPUAllocator|Storage size calculation overflowed|out of memory|_ALLOC_FAILED"
)


@contextmanager
def memory_for(told: Callable[[], OutOfDeviceMemory]) -> Iterator[None]:
    """Every larger allocation happens in here. Raises: what `told` makes, when memory ran out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise told() from error


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether memory ran out, on the CPU or a GPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return _OUT_OF_MEMORY.search(str(error)) is not None


def free_bytes(device: torch.device) -> int:
    """Memory free on the device now, with what torch's allocator keeps and nobody uses."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return int(psutil.virtual_memory().available)
