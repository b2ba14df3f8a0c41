"""A short piece of the soak: four chats, cancels, edits, switches, faults."""

from __future__ import annotations

import pytest

from tests.soak import Soak


@pytest.mark.parametrize("seed", [1, 2])
def test_random_chats_keep_every_invariant(seed: int) -> None:
    soak = Soak(seed)
    for _ in range(600):
        soak.step()
    soak.finish()
    assert soak.num_finished > 20
