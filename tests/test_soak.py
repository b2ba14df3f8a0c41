"""A short piece of the soak: four chats, cancels, edits, switches, faults."""

from __future__ import annotations

import pytest

from engine.events import TurnFailed, TurnFinished
from tests.soak import Soak


@pytest.mark.parametrize("seed", [1, 2])
def test_random_chats_keep_every_invariant(seed: int) -> None:
    soak = Soak(seed)
    for _ in range(600):
        soak.step()
    soak.finish()
    assert soak.num_finished > 20


class RecordedSoak(Soak):
    """Remembers how its turns ended, drafting included."""

    def __init__(self, seed: int) -> None:
        self.ends: list[object] = []
        super().__init__(seed)

    def _end(self, event: TurnFinished | TurnFailed) -> None:
        self.ends.append(event)
        super()._end(event)


def test_the_same_seed_plays_the_same_run_to_the_last_decision() -> None:
    runs = [RecordedSoak(3) for _ in range(2)]
    for run in runs:
        for _ in range(600):
            run.step()
    assert runs[0].ends == runs[1].ends
    assert any(isinstance(end, TurnFinished) and end.stats.verify_steps for end in runs[0].ends)
