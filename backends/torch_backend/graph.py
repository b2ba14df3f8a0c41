"""Small forwards on a GPU as CUDA graphs: a decode step launches one graph, not 500 kernels.

A step always computes the same number of rows over fixed buffers; surplus rows lie behind the
newest position, where nothing looks and the next forward writes. A graph is good for one chat
while its buffers and the stretch of keys it reads stay the same. Where capturing fails, forwards
go on without; the tests run a step without capturing it, on the CPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from backends.program import MoeFfn, Program
from backends.torch_backend.batch import Batch, Part, SlotRows, extent_of
from backends.torch_backend.kv_cache import TorchCache
from backends.torch_backend.memory import is_out_of_memory
from backends.torch_backend.ops import OPS, Device, Rows

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

log = logging.getLogger(__name__)

STEP_ROWS = 16
"""Rows of a step: a verify of 15 drafts fits; weights are read once, whatever the rows."""


class StaticStep:
    """One forward of `STEP_ROWS` rows whose inputs are refilled in place."""

    def __init__(
        self, program: Program, device: Device, cache: TorchCache, looked_up: dict[int, Tensor]
    ) -> None:
        self._program, self._device = program, device
        # One row per slot, write indices and then the base; the last row holds the positions. One
        # copy from the host fills them all.
        shape = (len(cache.slots) + 1, STEP_ROWS + 1)
        self._numbers = torch.zeros(shape, dtype=torch.int64, device=device.device)
        slots = [
            SlotRows(slot, numbers[:STEP_ROWS], numbers[STEP_ROWS], extent)
            for slot, numbers, extent in zip(
                cache.slots, self._numbers[:-1], extents_of(cache), strict=True
            )
        ]
        self._batch = Batch(
            STEP_ROWS,
            self._numbers[-1, :STEP_ROWS],
            {op: rows.clone() for op, rows in looked_up.items()},
            [Part(0, STEP_ROWS, cache.length, slots)],
        )
        self.rows = Rows(self._batch, {}, slice(0, STEP_ROWS))

    def fill(self, cache: TorchCache, looked_up: dict[int, Tensor]) -> None:
        """Take the inputs of the next step. State: the static inputs."""
        bases = torch.tensor([[slot.base] for slot in cache.slots] + [[0]])
        positions = torch.arange(cache.length, cache.length + STEP_ROWS)
        self._numbers.copy_(torch.cat((positions - bases, bases), dim=1))
        for op, rows in looked_up.items():
            self._batch.looked_up[op].copy_(rows)

    def run(self) -> None:
        """Run every operation on the static inputs. State: `rows`, the cache behind its length."""
        self._batch.angles.clear()
        self.rows = Rows(self._batch, {}, slice(0, STEP_ROWS))
        for op in self._program.ops:
            OPS[type(op)](op, self.rows, self._device)


class CapturedStep:
    """A static step recorded once and replayed."""

    def __init__(self, step: StaticStep, pool: _POOL_HANDLE) -> None:
        self._step = step
        # One run outside the capture fills constants and library workspaces.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step.run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            step.run()

    def replay(self, cache: TorchCache, looked_up: dict[int, Tensor]) -> Rows:
        """Run on new inputs; the rows are valid until the next replay of any graph."""
        self._step.fill(cache, looked_up)
        self._graph.replay()
        return self._step.rows


class GraphedSteps:
    """The newest captured step of every chat."""

    def __init__(self, program: Program, device: Device) -> None:
        self._program, self._device = program, device
        self._pool = torch.cuda.graph_pool_handle()
        self._newest: WeakKeyDictionary[TorchCache, _Newest] = WeakKeyDictionary()
        self._is_broken = False

    @staticmethod
    def suits(program: Program, device: Device) -> bool:
        """Experts are chosen on the host, unpacking weights copies tables from it, and a drafter's
        rows do not stand behind one another."""
        has_experts = any(isinstance(op, MoeFfn) for op in program.ops)
        is_dense = all(matrix.is_dense for matrix in device.matrices.values())
        return is_dense and program.grows_cache and not has_experts

    def step(self, cache: TorchCache, looked_up: dict[int, Tensor]) -> Rows | None:
        """`STEP_ROWS` rows behind the newest of a cache with room, or None: capturing failed.

        State:  the cache's buffers behind its length; the length is the caller's to advance.
        Raises: what `is_out_of_memory` tells; nothing is kept of the step then.
        """
        if self._is_broken:
            return None
        key = (cache.generation, extents_of(cache))
        newest = self._newest.get(cache)
        if newest is None or newest.key != key:
            # The old one goes first, with the memory of its activations: a chat that grows to
            # 32k tokens passes 64 of them.
            newest = None
            self._newest.pop(cache, None)
            step = self._captured(cache, looked_up)
            if step is None:
                return None
            newest = self._newest[cache] = _Newest(key, step)
        return newest.step.replay(cache, looked_up)

    def _captured(self, cache: TorchCache, looked_up: dict[int, Tensor]) -> CapturedStep | None:
        try:
            static = StaticStep(self._program, self._device, cache, looked_up)
            static.fill(cache, looked_up)
            return CapturedStep(static, self._pool)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise  # graphs are not at fault: once there is room, the next step is captured
            log.warning("CUDA graphs are off: capturing a step failed", exc_info=True)
            self._is_broken = True
            self.clear()
            return None

    def clear(self) -> None:
        """Forget every graph. State: empty."""
        self._newest.clear()


@dataclass(slots=True)
class _Newest:
    """A chat's newest step, and the buffers and stretch of keys it is good for."""

    key: tuple[int, tuple[int, ...]]
    step: CapturedStep


def extents_of(cache: TorchCache) -> tuple[int, ...]:
    """Keys a step reads in every slot: with the buffers, what a graph is bound to."""
    end = cache.length + STEP_ROWS
    return tuple(extent_of(slot, end) for slot in cache.slots)
