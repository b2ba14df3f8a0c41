"""The checks find what they are for: a wrong cache, a row that differs, a flipped argmax."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.cache.holder import Holder
from engine.contracts import LoadedModel
from engine.diagnostics import (
    RowClass,
    check_rollbacks,
    check_rows,
    cold_check,
    draft_after,
    plain_rows,
)
from engine.errors import EngineError
from engine.speculative.draft_head import DraftHeadKind
from engine.speculative.target import TargetTraits
from tests.engine.fakes_drafters import FakeHead
from tests.engine.fakes_engine import (
    VOCAB,
    FakeExecutable,
    LinearCache,
    RecurrentCache,
    RingCache,
    fake_model,
)

PROMPT = [5, 6, 7, 8, 9]
EMITTED = [20, 21, 22, 23]
TEXT = [int(i) for i in np.random.default_rng(0).integers(0, 256, 60)]


def filled(model: LoadedModel, token_ids: list[int]) -> Holder:
    holder = Holder(model.executable)
    holder.forward(token_ids)
    return holder


@pytest.mark.parametrize("make_cache", [LinearCache, RingCache, RecurrentCache])
def test_cold_check_passes_on_what_plain_decoding_leaves(make_cache: type[LinearCache]) -> None:
    model = fake_model(FakeExecutable(make_cache))
    holder = filled(model, [*PROMPT, *EMITTED[:-1]])
    before = holder.token_ids[:]
    assert cold_check(model, holder, PROMPT, EMITTED)
    assert holder.token_ids == before
    holder.check_integrity()


@pytest.mark.parametrize(
    "held",
    [
        [*PROMPT, *EMITTED],
        [*PROMPT, *EMITTED[:-2]],
        [*PROMPT, 99, *EMITTED[1:-1]],
    ],
    ids=["one too many", "one too few", "another token"],
)
def test_cold_check_finds_a_cache_of_other_tokens(held: list[int]) -> None:
    model = fake_model()
    assert not cold_check(model, filled(model, held), PROMPT, EMITTED)


def test_cold_check_finds_a_cache_that_holds_other_rows_than_its_ids() -> None:
    """A rejected row left behind: ids and length are right, one entry is not."""
    model = fake_model()
    holder = filled(model, [*PROMPT, *EMITTED[:-1]])
    assert isinstance(holder.cache, LinearCache)
    holder.cache.ids[6] = 77
    assert not cold_check(model, holder, PROMPT, EMITTED)


def test_cold_check_of_an_empty_answer() -> None:
    model = fake_model()
    assert cold_check(model, filled(model, PROMPT), PROMPT, [])


class DriftingExecutable(FakeExecutable):
    """Rows computed with others come out a little higher, as batch-shaped kernels do."""

    drift = 0.0

    def logits(self, cache: LinearCache) -> np.ndarray:
        row = super().logits(cache)
        if self.is_many:
            row[::2] += self.drift
        return row

    is_many = False

    def forward(self, segments, **kwargs):  # type: ignore[no-untyped-def]
        self.is_many = sum(len(s.token_ids) for s in segments) > 1
        return super().forward(segments, **kwargs)


def test_s62_rows_equal_to_plain_decoding_show_no_error() -> None:
    classes = check_rows(fake_model(), TEXT, 4)
    assert [c.name for c in classes][:3] == ["row 0 of 1", "row 0 of 2", "row 1 of 2"]
    assert all(c.max_error == 0.0 and not c.flips for c in classes)
    assert sum(len(c.errors) for c in classes if c.name.endswith("of 3")) == len(TEXT)


def test_s62_error_of_each_row_class_is_measured() -> None:
    executable = DriftingExecutable()
    executable.drift = 0.5
    by_name = {c.name: c for c in check_rows(fake_model(executable), TEXT, 2)}
    assert by_name["row 0 of 1"].max_error == 0.0
    assert by_name["row 1 of 2"].max_error == pytest.approx(0.5, abs=1e-5)


def test_s62_flip_is_reported_with_plain_decodings_margin() -> None:
    rows = RowClass("row 1 of 2")
    plain = np.array([1.0, 3.0, 2.75], dtype=np.float32)
    rows.add(7, plain, np.array([1.0, 2.8, 2.9], dtype=np.float32))
    rows.add(8, plain, plain)
    (flip,) = rows.flips
    assert (flip.position, flip.plain_id, flip.other_id) == (7, 1, 2)
    assert flip.margin == 0.25
    assert rows.max_error == pytest.approx(0.2)


@pytest.mark.parametrize("persists", [True, False])
@pytest.mark.parametrize("make_cache", [LinearCache, RingCache, RecurrentCache])
def test_s62_rollbacks_of_every_length_leave_no_error(
    make_cache: type[LinearCache], persists: bool
) -> None:
    traits = TargetTraits(verify_persists_accepted_kv=persists)
    model = fake_model(FakeExecutable(make_cache), traits=traits)
    kept, after_all, after_rollback = check_rollbacks(model, TEXT, 4)
    assert kept.max_error == after_all.max_error == after_rollback.max_error == 0.0
    assert after_all.errors
    assert len(after_rollback.errors) > len(after_all.errors)


def test_s62_rollback_that_leaves_rows_behind_is_found() -> None:
    class Leaky(LinearCache):
        def rewind_to(self, length: int) -> None:
            super().rewind_to(length - 1)
            self.append(1)  # a rejected row stays in the place of an accepted one

    _, _, after_rollback = check_rollbacks(fake_model(FakeExecutable(Leaky)), TEXT, 3)
    assert after_rollback.max_error > 0.1


def test_plain_rows_are_one_row_forwards() -> None:
    executable = FakeExecutable()
    rows = plain_rows(fake_model(executable), TEXT[:6])
    assert rows.shape == (6, VOCAB)
    assert executable.shapes == [(1,)] * 6


# -- drafts


class TalkingHead(FakeHead):
    """Also shows logits."""

    def last_logits(self, state: object) -> np.ndarray:
        num = self.block_size if self.kind is DraftHeadKind.BLOCK else 1
        return np.full((num, VOCAB), 0.5, dtype=np.float32)


def head(kind: DraftHeadKind) -> TalkingHead:
    executable = FakeExecutable()
    cache = executable.new_cache()
    states = []
    for token_id in TEXT:
        cache.append(token_id)
        states.append(np.full(4, cache.state() % 97, dtype=np.float32))
    return TalkingHead(kind, lambda pos: 100 + pos, states.__getitem__, block_size=5)


@pytest.mark.parametrize(("kind", "num"), [(DraftHeadKind.BLOCK, 5), (DraftHeadKind.PER_TOKEN, 8)])
def test_drafts_stand_behind_the_last_token(kind: DraftHeadKind, num: int) -> None:
    """The head checks that it is handed the row before the newest token."""
    model = replace(fake_model(), draft_head=head(kind))
    ids, logits, confidences = draft_after(model, TEXT[:9])
    assert ids.tolist() == [100 + 9 + i for i in range(num)]
    assert logits.shape == (num, VOCAB)
    assert len(confidences) == num


def test_model_without_a_drafter_says_why() -> None:
    with pytest.raises(EngineError, match="tiny holds no drafter"):
        draft_after(fake_model(), TEXT)
    refused = replace(fake_model(), draft_head_refusal="it belongs to another model")
    with pytest.raises(EngineError, match="it belongs to another model"):
        draft_after(refused, TEXT)


def test_text_of_one_token_is_too_short_to_draft_after() -> None:
    model = replace(fake_model(), draft_head=head(DraftHeadKind.BLOCK))
    with pytest.raises(EngineError, match="too short"):
        draft_after(model, TEXT[:1])
