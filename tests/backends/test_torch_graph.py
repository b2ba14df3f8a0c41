"""A GPU's captured steps, run directly on the CPU: their numbers, and what is kept of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from backends.base import OutOfDeviceMemory
from backends.program import MoeFfn, Program
from backends.torch_backend import graph
from backends.torch_backend.backend import TorchBackend, TorchExecutable
from backends.torch_backend.graph import STEP_ROWS, GraphedSteps, StaticStep, extents_of
from backends.torch_backend.kv_cache import TorchCache
from backends.torch_backend.ops import Rows, attend_masked
from tests.backends.tiny_programs import everything, logits_of, random_ids


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    """Models of this size lose with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def without_experts() -> Program:
    program = everything("Q4_K")
    return replace(program, ops=tuple(op for op in program.ops if not isinstance(op, MoeFfn)))


def test_a_refilled_step_of_fixed_rows_gives_what_separate_forwards_give() -> None:
    """What a CUDA graph replays, run directly: 16 rows over fixed inputs, 5 of them meant."""
    program = without_experts()
    model = TorchBackend("cpu").compile(program)
    model._device.attend = attend_masked
    assert GraphedSteps.suits(program, model._device)
    chat, other, step = model.new_cache(), model.new_cache(), None
    for start in range(0, 60, 5):
        token_ids = random_ids(60)[start : start + 5]
        chat.ensure_rows(STEP_ROWS)
        looked_up = model._looked_up(token_ids, STEP_ROWS - 5)
        if step is None:
            step, extents = StaticStep(program, model._device, chat, looked_up), extents_of(chat)
        assert extents_of(chat) == extents
        step.fill(chat, looked_up)
        step.run()
        chat.advance(5)
        assert step.rows.logits is not None
        expected = logits_of(model, other, token_ids)
        np.testing.assert_allclose(step.rows.logits[:5], expected, rtol=0, atol=1e-4)


class FakeCapture:
    """Stands for a captured step; alive while somebody keeps it."""

    alive: ClassVar[weakref.WeakSet[FakeCapture]] = weakref.WeakSet()
    error: ClassVar[Exception | None] = None

    def __init__(self, step: StaticStep, pool: object) -> None:
        if self.error is not None:
            raise self.error
        self.alive.add(self)
        self.step = step

    def replay(self, cache: TorchCache, looked_up: dict[int, torch.Tensor]) -> Rows:
        self.step.fill(cache, looked_up)
        self.step.run()
        return self.step.rows


def graphed(monkeypatch: pytest.MonkeyPatch) -> TorchExecutable:
    """A model whose steps are captured, or fail to be, by `FakeCapture`."""
    monkeypatch.setattr(graph, "CapturedStep", FakeCapture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    program = without_experts()
    model = TorchBackend("cpu").compile(program)
    model._device.attend = attend_masked
    model._graphs = GraphedSteps(program, model._device)
    return model


def test_a_card_that_is_full_for_once_does_not_end_the_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = graphed(monkeypatch)
    chat = model.new_cache()
    monkeypatch.setattr(FakeCapture, "error", torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(OutOfDeviceMemory, match="activations of 1 rows"):
        logits_of(model, chat, [1])
    assert (chat.length, len(FakeCapture.alive)) == (0, 0)
    monkeypatch.setattr(FakeCapture, "error", None)
    logits_of(model, chat, [1])
    assert (chat.length, len(FakeCapture.alive)) == (1, 1)


def test_where_capturing_fails_forwards_go_on_and_nothing_captured_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = graphed(monkeypatch)
    first, second = model.new_cache(), model.new_cache()
    logits_of(model, first, [1])
    assert len(FakeCapture.alive) == 1
    monkeypatch.setattr(FakeCapture, "error", RuntimeError("operation not permitted"))
    expected = logits_of(TorchBackend("cpu").compile(without_experts()), model.new_cache(), [1])
    np.testing.assert_allclose(logits_of(model, second, [1]), expected, rtol=0, atol=1e-4)
    assert (second.length, len(FakeCapture.alive)) == (1, 0)


def test_a_chat_that_grows_keeps_its_newest_captured_step_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = graphed(monkeypatch)
    steps, chats = model._graphs, [model.new_cache(), model.new_cache()]
    assert steps is not None
    captured = set()
    for chat in chats:
        chat.ensure_capacity(4096)
        while chat.length < 3000:
            chat.ensure_rows(STEP_ROWS)
            assert steps.step(chat, model._looked_up(random_ids(5), STEP_ROWS - 5)) is not None
            captured.add(extents_of(chat))
            chat.advance(250)
    assert len(captured) > 4
    assert len(FakeCapture.alive) == len(chats)


def test_a_program_with_experts_is_not_captured() -> None:
    program = everything("Q4_K")
    assert not GraphedSteps.suits(program, TorchBackend("cpu").compile(program)._device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_graphs_give_what_the_same_rows_give_without() -> None:
    gpu = TorchBackend("cuda").compile(without_experts())
    assert gpu._graphs is not None
    chat, other = gpu.new_cache(), gpu.new_cache()
    for start in range(0, 600, 6):
        token_ids = random_ids(600)[start : start + 6]
        graphed = logits_of(gpu, chat, token_ids)
        assert not gpu._graphs._is_broken
        graphs, gpu._graphs = gpu._graphs, None
        eager = logits_of(gpu, other, token_ids)
        gpu._graphs = graphs
        np.testing.assert_allclose(graphed, eager, rtol=0, atol=5e-2)
