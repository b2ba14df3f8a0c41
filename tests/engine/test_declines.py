"""A drafter that cannot serve is said so, once, and every answer is plain decoding's."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from engine.commands import UpdateSpeculation
from engine.events import Notice, SpeculationChanged
from engine.speculative.draft_head import DraftHead, DraftHeadKind
from engine.speculative.options import SpeculationOptions
from engine.speculative.registry import default_registry
from engine.speculative.speculator import Decline
from tests.engine.fakes_drafters import FakeHead
from tests.engine.fakes_engine import EngineRig, fake_model, of_type
from tests.engine.fakes_speculative import hidden_of

PROMPT = (1, 2, 3, 4)
BLOCK = SpeculationOptions(algorithm="block")


def notices(rig: EngineRig) -> list[str]:
    return [event.text for event in of_type(rig.events, Notice)]


def rig_with_head(kind: DraftHeadKind, options: SpeculationOptions) -> EngineRig:
    head = FakeHead(kind, lambda pos: 0, lambda pos: hidden_of([pos]), name="small-head")
    model = replace(fake_model(), draft_head=cast(DraftHead, head))
    return EngineRig(model=model, speculation=options)


@pytest.mark.parametrize(
    ("kind", "asked", "reason"),
    [
        (
            DraftHeadKind.PER_TOKEN,
            "block",
            "small-head drafts token by token; use spec-type draft-head",
        ),
        (DraftHeadKind.BLOCK, "draft-head", "small-head drafts whole blocks; use spec-type block"),
    ],
)
def test_s45_a_drafter_of_the_wrong_kind_is_said_with_the_model_and_with_a_switch(
    kind: DraftHeadKind, asked: str, reason: str
) -> None:
    options = SpeculationOptions(algorithm=asked)
    rig = rig_with_head(kind, options)
    assert notices(rig) == [f"no drafting: {reason}"]
    rig.ask(PROMPT)
    rig.engine.apply(UpdateSpeculation(options))
    (changed,) = of_type(rig.events, SpeculationChanged)
    assert (changed.algorithm, changed.declined) == (None, reason)
    assert len(notices(rig)) == 1


def test_s05_a_factory_that_declines_late_is_told_once_and_known_from_then_on() -> None:
    registry = default_registry()
    registry.register("late", lambda _: Decline("its tables are missing"))
    options = SpeculationOptions(algorithm="late")
    rig = EngineRig(speculation=options, registry=registry)
    for chat in ("a", "a", "b"):
        assert rig.ask(PROMPT, chat).stats.verify_steps == 0
    assert notices(rig) == ["no drafting: its tables are missing"]
    rig.engine.apply(UpdateSpeculation(options))
    assert of_type(rig.events, SpeculationChanged)[-1].declined == "its tables are missing"
