"""Programs on PyTorch: CUDA devices, and the CPU where the native library cannot be built.

On the CPU all numbers are float32 and a row has the same bits in any company: products run in
blocks of one fixed number of rows, and every row attends on its own. On a GPU weights and cache
are float16 with float32 sums, rows attend together, and nothing is promised about equal bits. The
GPU's ways were tested on the CPU, piece by piece; they have not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from backends.base import (
    BackendCaps,
    BackendError,
    BackendUnavailable,
    LoadProgress,
    OutOfDeviceMemory,
    RowOutput,
    Segment,
    WantLogits,
    check_given,
    check_token_ids,
    wanted_rows,
)
from backends.program import Embed, EmbedWithHidden, PerLayerInputs, Program, Weight
from backends.torch_backend.batch import Batch, Part, part_of
from backends.torch_backend.graph import STEP_ROWS, GraphedSteps
from backends.torch_backend.kv_cache import TorchCache
from backends.torch_backend.matrix import Matrix, held_bytes, look_up
from backends.torch_backend.memory import free_bytes, is_out_of_memory, memory_for
from backends.torch_backend.ops import OPS, Rows, device_of
from backends.weights import has_float32_cache, matrix_weights, tables

if TYPE_CHECKING:
    from backends.base import Backend, Cache, Executable

_CPU_MAX_ROWS = 256
_GPU_MAX_ROWS = 512
_DENSE_SHARE = 0.6
"""Unpacked weights may take this share of the free memory; the rest is for caches."""


class TorchBackend:
    """One torch device."""

    def __init__(self, device: str, *, may_stay_packed: bool = True) -> None:
        """`device`: "cpu", "cuda" or "cuda:N"; `may_stay_packed`: weights that do not fit unpacked
        may be unpacked in every step. Raises: BackendUnavailable.
        """
        self._device, self._may_stay_packed = torch.device(device), may_stay_packed
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise BackendUnavailable(
                "this PyTorch finds no CUDA device",
                hint="install a CUDA build of PyTorch and a driver, or use the CPU",
            )
        try:
            torch.ones(1, device=self._device).add_(1).cpu()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise BackendUnavailable(
                    f"the memory of {self.device} is full: not one number finds room",
                    hint="close other programs that use it, or use the CPU",
                ) from error
            raise BackendUnavailable(
                f"this PyTorch cannot compute on {device}: {str(error).splitlines()[0]}",
                hint="install a build of PyTorch for this GPU, or use the CPU",
            ) from error

    @property
    def name(self) -> str:
        """The name shown by `doctor`."""
        return f"torch-{self._device.type}"

    @property
    def device(self) -> str:
        """A person's name for the device."""
        return device_name(self._device)

    def compile(
        self,
        program: Program,
        *,
        progress: LoadProgress | None = None,
        reads: Executable | None = None,
    ) -> TorchExecutable:
        """Move the weights to the device.

        Raises: UnsupportedWeight, OutOfDeviceMemory.
        """
        for table in tables(program):
            look_up(table, [0], torch.device("cpu"))  # one nobody can read is refused now
        needed, is_dense = self._fitting(program)
        weights = list(matrix_weights(program))
        matrices: dict[int, Matrix] = {}
        for i, weight in enumerate(weights):
            matrices[id(weight)] = self._placed(weight, is_dense)
            if progress is not None:
                progress((i + 1) / len(weights))
        model = TorchExecutable(program, self._device, matrices)
        if not is_dense:
            model.notices.append(
                f"the weights are unpacked in every step, which is slow: only {needed / 1e9:.1f} "
                f"GB of packed ones fit {device_name(self._device)}"
            )
        return model

    def placed_bytes(self, program: Program) -> int:
        """Main memory of the weights; 0 where they lie on a GPU."""
        return 0 if self._device.type == "cuda" else self._needed(program)[0]

    def check_room(self, program: Program, cache_bytes: int, freed_bytes: int) -> None:
        """Whether weights and caches will fit once so much is given back.

        Raises: OutOfDeviceMemory.
        """
        self._fitting(program, cache_bytes, freed_bytes)

    def _fitting(
        self, program: Program, cache_bytes: int = 0, freed_bytes: int = 0
    ) -> tuple[int, bool]:
        """Bytes of the weights as they fit the device, and whether all of them are unpacked."""
        needed, is_dense = self._needed(program, freed_bytes)
        if not is_dense and not self._may_stay_packed:
            unpacked = self._held_bytes(program, is_dense=True)
            raise self._no_room(
                f"the unpacked weights of {unpacked} bytes and chats beside them", freed_bytes
            )
        if needed + cache_bytes > free_bytes(self._device) + freed_bytes:
            beside = f" and a chat of {cache_bytes}" if cache_bytes else ""
            raise self._no_room(f"the weights of {needed} bytes{beside}", freed_bytes)
        return needed, is_dense

    def _needed(self, program: Program, freed_bytes: int = 0) -> tuple[int, bool]:
        """Bytes of the weights on the device, and whether all of them are unpacked."""
        unpacked = self._held_bytes(program, is_dense=True)
        if unpacked <= _DENSE_SHARE * (free_bytes(self._device) + freed_bytes):
            return unpacked, True
        return self._held_bytes(program, is_dense=False), False

    def _held_bytes(self, program: Program, *, is_dense: bool) -> int:
        return sum(held_bytes(w, self._device, is_dense=is_dense) for w in matrix_weights(program))

    def _placed(self, weight: Weight, is_dense: bool) -> Matrix:
        with memory_for(lambda: self._no_room(f"{weight.name} of {weight.data.nbytes} bytes")):
            return Matrix(weight, self._device, is_dense=is_dense)

    def _no_room(self, what: str, freed_bytes: int = 0) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(
            f"{what} do not fit: {free_bytes(self._device) + freed_bytes} bytes are free",
            hint="close other programs or use a smaller model",
        )


def device_name(device: torch.device) -> str:
    """A person's name for the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, PyTorch {torch.__version__}, {torch.get_num_threads()} threads"


class TorchExecutable:
    """A program with its weights on a torch device."""

    def __init__(self, program: Program, device: torch.device, matrices: dict[int, Matrix]) -> None:
        self._program = program
        self.notices: list[str] = []
        self._on_gpu = device.type == "cuda"
        self._device = device_of(device, matrices)
        self._graphs: GraphedSteps | None = None
        if self._on_gpu and GraphedSteps.suits(program, self._device):
            self._graphs = GraphedSteps(program, self._device)
        self._kv_type = torch.float32
        if self._on_gpu and not has_float32_cache(program):
            self._kv_type = torch.float16

    @property
    def caps(self) -> BackendCaps:
        """Equal bits are promised on the CPU only."""
        name = device_name(self._device.device)
        if self._on_gpu:
            kernels = f"torch {torch.__version__} {name}"
            return BackendCaps("torch-cuda", name, kernels, False, False, _GPU_MAX_ROWS)
        kernels = f"torch {torch.__version__} CPU {torch.backends.cpu.get_cpu_capability()}"
        return BackendCaps("torch-cpu", name, kernels, True, True, _CPU_MAX_ROWS)

    @property
    def weight_bytes(self) -> int:
        """Memory of the matrices; tables that are only looked up stay in the mapped file."""
        return sum(matrix.num_bytes for matrix in self._device.matrices.values())

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of the slots without a window."""
        slots = (slot for slot in self._program.slots if slot.window is None)
        return sum(2 * self._kv_type.itemsize * s.kv_heads * s.head_dim for s in slots)

    @property
    def free_bytes(self) -> int:
        """Memory that is free on the device now."""
        return free_bytes(self._device.device)

    def new_cache(self) -> TorchCache:
        """An empty cache."""
        with memory_for(lambda: self._no_memory("windows of a new chat")):
            return TorchCache(
                self._program.slots, self.caps.max_rows, self._kv_type, self._device.device
            )

    def _no_memory(self, purpose: str) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(
            f"the {purpose} do not fit beside {self.weight_bytes} bytes of weights: "
            f"{free_bytes(self._device.device)} bytes are free",
            hint="close other programs, end other chats or use a smaller model",
        )

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
        hidden: np.ndarray | None = None,
    ) -> RowOutput:
        """Append and compute. State: each cache grows by its tokens once all rows are done."""
        num_rows = sum(len(segment.token_ids) for segment in segments)
        if not 0 < num_rows <= self.caps.max_rows:
            raise BackendError(f"a forward takes 1 to {self.caps.max_rows} rows, not {num_rows}")
        check_token_ids(segments, self._program.vocab_size)
        given = check_given(self._program, segments, hidden)
        with memory_for(lambda: self._no_memory(f"activations of {num_rows} rows")):
            final, logits = self._graphed(segments, want_logits) or self._eager(
                segments, want_logits, given
            )
            output = RowOutput(
                None if logits is None else logits.cpu().numpy(),
                final[:num_rows].cpu().numpy() if want_hidden else None,
            )
        if self._program.grows_cache:
            for segment in segments:
                own_cache(segment).advance(len(segment.token_ids))
        return output

    def _eager(
        self, segments: Sequence[Segment], want_logits: WantLogits, given: np.ndarray | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden rows (padding included) and the wanted logits, operation by operation."""
        batch = self._batch(segments, given)
        rows = Rows(batch, {}, _index_of(wanted_rows(segments, want_logits)))
        for op in self._program.ops:
            OPS[type(op)](op, rows, self._device)
        assert rows.hidden is not None, "the last operation is the head"
        return rows.hidden, rows.logits

    def _graphed(
        self, segments: Sequence[Segment], want_logits: WantLogits
    ) -> tuple[Tensor, Tensor | None] | None:
        """The same from one captured graph, where there is one for such a forward."""
        num_rows = len(segments[0].token_ids)
        if self._graphs is None or len(segments) > 1 or num_rows > STEP_ROWS:
            return None
        cache = own_cache(segments[0])
        cache.ensure_rows(STEP_ROWS)
        looked_up = self._looked_up(list(segments[0].token_ids), STEP_ROWS - num_rows)
        rows = self._graphs.step(cache, looked_up)
        if rows is None:
            return None
        assert rows.hidden is not None, "the last operation is the head"
        assert rows.logits is not None, "a step computes the logits of every row"
        if want_logits == "none":
            return rows.hidden, None
        return rows.hidden, rows.logits[_index_of(wanted_rows(segments, want_logits))]

    def _batch(self, segments: Sequence[Segment], given: np.ndarray | None) -> Batch:
        token_ids = [token_id for segment in segments for token_id in segment.token_ids]
        grows, device = self._program.grows_cache, self._device.device
        parts: list[Part] = []
        for segment in segments:
            cache, count = own_cache(segment), len(segment.token_ids)
            if grows:
                cache.ensure_rows(count)
            first_row = parts[-1].rows.stop if parts else 0
            parts.append(part_of(cache, first_row, count, device, is_appended=grows))
        padding = -len(token_ids) % self._device.row_block
        positions = torch.tensor([p.position(i) for p in parts for i in range(p.num_rows)])
        return Batch(
            len(token_ids),
            functional.pad(positions, (0, padding)).to(device),
            self._looked_up(token_ids, padding),
            parts,
            None if given is None else _padded(torch.tensor(given, device=device), padding),
        )

    def _looked_up(self, token_ids: list[int], padding: int) -> dict[int, Tensor]:
        return {
            id(op): _padded(look_up(op.table, token_ids, self._device.device), padding)
            for op in self._program.ops
            if isinstance(op, (Embed, EmbedWithHidden, PerLayerInputs))
        }

    def close(self) -> None:
        """Release the weights."""
        if self._graphs is not None:
            self._graphs.clear()
        self._device.matrices.clear()
        self._device.constants.clear()
        if self._on_gpu:
            # The allocator would keep it all: other programs, and blocks of another size, need it.
            torch.cuda.empty_cache()


def _index_of(rows: Sequence[int]) -> list[int] | slice:
    """What selects rows of a batch, as a view where they follow one another from the first."""
    return slice(0, len(rows)) if isinstance(rows, range) else list(rows)


def _padded(rows: Tensor, padding: int) -> Tensor:
    """Rows of zeros appended. Shapes: [R, width] -> [R + padding, width]."""
    return functional.pad(rows, (0, 0, 0, padding))


def own_cache(segment: Segment) -> TorchCache:
    """The segment's cache, which this backend made."""
    assert isinstance(segment.cache, TorchCache), "a cache belongs to the backend that made it"
    return segment.cache


if TYPE_CHECKING:
    _backend: type[Backend] = TorchBackend
    _executable: type[Executable] = TorchExecutable
    _cache: type[Cache] = TorchCache
