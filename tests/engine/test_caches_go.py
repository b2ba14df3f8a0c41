"""What is evicted or closed gives its memory back at once, not when the collector comes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.commands import LoadModel
from engine.contracts import LoadedModel
from engine.speculative.options import SpeculationOptions
from tests.engine.fakes_engine import PLAIN, EngineRig, FakeExecutable, fake_model

DRAFTING = SpeculationOptions(algorithm="ngram", use_governor=False)
PROMPT = tuple(b"the cat sat on the mat and the cat sat on the hat, " * 2)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _caches(rig: EngineRig, *chat_ids: str) -> list[weakref.ref[object]]:
    holders = [rig.engine.holder(chat_id) for chat_id in chat_ids]
    return [weakref.ref(holder.cache) for holder in holders if holder is not None]


def test_the_next_model_is_placed_when_every_cache_of_the_last_one_is_gone() -> None:
    """They were counted as memory that will be free; waiting for the collector, they were not."""
    rig = EngineRig(FakeExecutable(period=4), speculation=DRAFTING, system_prompt="be kind" * 12)
    rig.ask(PROMPT, "ended")
    rig.submit(PROMPT, "running", max_tokens=50)
    rig.run(8)
    store = rig.engine._session.store  # type: ignore[union-attr]
    caches = _caches(rig, "ended", "running")
    caches += [weakref.ref(held.cache) for held in store.checkpoints]
    del store
    alive: list[object] = []

    def place() -> LoadedModel:
        alive.extend(ref for ref in caches if ref() is not None)
        return fake_model()

    rig.loader.place = place  # type: ignore[method-assign]
    rig.engine.apply(LoadModel(Path("y"), "y"))
    assert len(caches) == 3
    assert not alive


@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
def test_an_evicted_cache_is_gone_at_once(options: SpeculationOptions) -> None:
    """Whoever evicts has no memory: the collector may come too late."""
    rig = EngineRig(FakeExecutable(period=4), speculation=options)
    rig.ask(PROMPT)
    (cache,) = _caches(rig, "chat")
    while rig.engine._session.store.evict_one():  # type: ignore[union-attr]
        pass
    assert cache() is None
