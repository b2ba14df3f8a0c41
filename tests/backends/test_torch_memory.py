"""What is free on a GPU, what a closed model gives back, and how a full one is told."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from backends.base import BackendUnavailable, OutOfDeviceMemory
from backends.torch_backend import backend as torch_module
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.memory import free_bytes
from backends.weights import matrix_weights
from tests.backends.tiny_programs import everything


def test_what_the_allocator_keeps_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts it as taken: the second model of a session found the card full."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    assert free_bytes(torch.device("cuda")) == 100 + 650


def test_a_closed_model_leaves_the_allocator_nothing_to_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = TorchBackend("cpu").compile(everything("Q4_K"))
    matrices = [weakref.ref(matrix) for matrix in model._device.matrices.values()]
    alive_when_emptied = []
    monkeypatch.setattr(
        torch.cuda,
        "empty_cache",
        lambda: alive_when_emptied.append(sum(matrix() is not None for matrix in matrices)),
    )
    model._on_gpu = True
    gc.collect()
    gc.disable()
    try:
        model.close()
    finally:
        gc.enable()
    assert alive_when_emptied == [0]


def test_what_the_model_in_use_gives_back_counts_where_it_is_asked_whether_the_next_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = everything("Q4_K")
    unpacked = TorchBackend("cpu").placed_bytes(program)
    packed = sum(weight.data.nbytes for weight in matrix_weights(program))
    monkeypatch.setattr(torch_module, "free_bytes", lambda device: 0)
    backend = TorchBackend("cpu")
    backend.check_room(program, 7, packed + 7)
    with pytest.raises(OutOfDeviceMemory, match=f"of {packed} bytes and a chat of 7 do not fit: "):
        backend.check_room(program, 7, packed + 6)
    unpacking = TorchBackend("cpu", may_stay_packed=False)
    unpacking.check_room(program, 7, 2 * unpacked)
    with pytest.raises(OutOfDeviceMemory, match=f"the unpacked weights of {unpacked} bytes"):
        unpacking.check_room(program, 7, unpacked + 7)


@pytest.mark.parametrize(
    ("error", "text", "hint"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "memory of .* is full", "close other"),
        (RuntimeError("no kernel image\nmore"), "cannot compute on cpu: no kernel image$", "build"),
    ],
)
def test_a_full_device_is_not_taken_for_a_wrong_build(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str, hint: str
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, "ones", failing)
    with pytest.raises(BackendUnavailable, match=text) as caught:
        TorchBackend("cpu")
    assert hint in caught.value.hint
