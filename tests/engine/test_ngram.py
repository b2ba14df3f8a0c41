"""Look-up drafting: what it proposes, what it believes, what it costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.speculative.ngram import NgramIndex, NgramPolicy, NgramSpeculator
from engine.speculative.speculator import DraftContext, Proposal
from tests.engine.bench_ngram import replay
from tests.engine.recorded_texts import RECORDED

TEXT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def armed(token_ids: Sequence[int], **changes: object) -> NgramSpeculator:
    """A drafter that holds all but the last token, which is the newest one."""
    drafter = NgramSpeculator(policy=replace(NgramPolicy(), **changes))  # type: ignore[arg-type]
    drafter.commit(token_ids[:-1], None, 0)
    return drafter


def ask(
    drafter: NgramSpeculator, token_ids: Sequence[int], *, num: int = 8, gate: float = 0.0
) -> Proposal:
    return drafter.propose(DraftContext(token_ids[-1], len(token_ids) - 1, num, gate))


def proposed(token_ids: Sequence[int], *, num: int = 8, gate: float = 0.0) -> list[int]:
    return list(ask(armed(token_ids, min_prefix_prob=0.0), token_ids, num=num, gate=gate).token_ids)


def test_s10_proposes_what_followed_the_longest_suffix() -> None:
    ids = [*TEXT, 1, 2, 14, 99, 1, 12, 13, 14]
    assert proposed(ids)[:4] == [15, 16, 17, 18]


def test_s10_of_equal_matches_the_latest_wins() -> None:
    ids = [5, 6, 7, 50, 5, 6, 7, 60, 5, 6, 7]
    assert proposed(ids, num=1) == [60]


def test_longer_match_beats_a_later_shorter_one() -> None:
    ids = [1, 5, 6, 7, 50, 9, 6, 7, 60, 1, 5, 6, 7]
    assert proposed(ids, num=1) == [50]


def test_suffix_is_never_matched_with_itself() -> None:
    assert proposed([1, 2, 3]) == []
    assert proposed([7]) == []


def test_repetition_is_continued_past_the_end_of_what_is_known() -> None:
    assert proposed([1, 2, 1, 2, 1], num=6)[:2] == [2, 1]


def test_s10_hash_collision_is_caught_token_by_token() -> None:
    index = NgramIndex((2, 1))
    index.extend([1, 2, 3, 4, 1, 9])
    index.find(1)
    for table in index._tables:  # every n-gram now claims to go on at 3
        table.places = dict.fromkeys(table.places, 2)
        key = (index._hashes[6] - index._hashes[6 - table.order] * table.power) & ((1 << 64) - 1)
        table.places[key] = 2
    assert index.find(1) is None


@pytest.mark.parametrize("seed", range(5))
def test_s10_index_built_in_pieces_equals_the_one_built_at_once(seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(6) for _ in range(400)]
    whole = NgramIndex((8, 3, 2, 1))
    whole.extend(ids)
    pieces = NgramIndex((8, 3, 2, 1))
    done = 0
    while done < len(ids):
        num = rng.choice([1, 1, 2, 7, 90])
        pieces.extend(ids[done : done + num])
        pieces.find(1)
        done += num
    assert pieces.find(1) == whole.find(1)
    for mine, theirs in zip(pieces._tables, whole._tables, strict=True):
        assert mine.places == theirs.places


@pytest.mark.parametrize("seed", range(20))
def test_find_equals_a_search_through_all_places(seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(5) for _ in range(200)]
    index = NgramIndex((4, 2, 1))
    index.extend(ids)
    expected = next(
        (
            place
            for order in (4, 2, 1)
            for place in range(len(ids) - 1, order - 1, -1)
            if ids[place - order : place] == ids[-order:]
        ),
        None,
    )
    assert index.find(1) == expected


def test_s14_gate_scales_the_length_a_match_must_have() -> None:
    ids = [*TEXT, 1, 2, 3, 12, 13, 14]
    assert proposed(ids, gate=0.1) != []  # three tokens match, 1 + 0.1 * 15 = 2 are asked for
    assert proposed(ids, gate=0.5) == []
    repeated = [*TEXT, *TEXT, *TEXT[:9]]
    assert proposed(repeated, gate=1.0)[:1] == [20]


def test_never_more_than_asked_for() -> None:
    ids = [*TEXT, *TEXT, *TEXT, *TEXT[:5]]
    for num in (1, 3, 16):
        assert len(ask(armed(ids, min_prefix_prob=0.0), ids, num=num).token_ids) <= num


def test_picks_a_text_up_again_behind_one_changed_token() -> None:
    source = list(range(100, 130))
    drafter = armed([*source, 1, 100])
    ids = [*source, 1, 100]
    for token_id in [*range(101, 110), 77]:  # 110 was expected
        ask(drafter, ids)
        ids.append(token_id)
    assert list(ask(drafter, ids).token_ids)[:1] == [111]


@pytest.mark.parametrize(
    ("came", "goes_on"),
    [([77, 110], 111), ([111], 112), ([77, 78, 111], 112), ([112], 113)],
    ids=["a word added", "a word dropped", "one added and one changed", "two dropped"],
)
def test_picks_a_text_up_again_at_the_nearest_equal_token(came: list[int], goes_on: int) -> None:
    source = list(range(100, 130))
    ids = [*source, 1, 100]
    drafter = armed(ids)
    for token_id in [*range(101, 110), *came]:
        ask(drafter, ids)
        ids.append(token_id)
    assert list(ask(drafter, ids).token_ids)[:1] == [goes_on]


def test_belief_follows_what_came() -> None:
    """On text that never goes on as before, its own matches stop being proposed."""
    rng = random.Random(3)
    ids = [rng.randrange(12) for _ in range(300)]
    drafter = armed(ids)
    probs = []
    for _ in range(200):
        proposal = ask(drafter, ids)
        probs.append(proposal.prefix_probs[0] if proposal.prefix_probs else 0.0)
        ids.append(rng.randrange(12))
    assert max(probs[:20]) >= 0.3
    assert sum(probs[-50:]) / 50 < 0.1  # one in twelve is right


def test_belief_grows_with_the_match() -> None:
    ids = [*range(100, 160), 1, *range(100, 130)]
    long = ask(armed(ids), ids).prefix_probs
    short = ask(armed([*range(100, 160), 1, 128, 129]), [*range(100, 160), 1, 128, 129])
    assert long is not None
    assert short.prefix_probs is not None
    assert long[0] > short.prefix_probs[0]
    assert list(long) == sorted(long, reverse=True)


# -- the chat's tokens change under it


def test_s30_seeded_tokens_are_drafted_from() -> None:
    """A follow-up turn met an empty corpus and drafted nothing for the rest of the request."""
    drafter = NgramSpeculator()
    drafter.commit(TEXT, None, 0)
    drafter.commit([1, 11, 12], None, len(TEXT))
    proposal = drafter.propose(DraftContext(13, len(TEXT) + 3, 4, 0.0))
    assert list(proposal.token_ids)[:2] == [14, 15]


def test_b18_rewritten_positions_are_matched_as_they_are_now() -> None:
    """A shortened history left the index pointing behind its end."""
    drafter = armed([*TEXT, 1, 2, 3])
    ask(drafter, [*TEXT, 1, 2, 3])
    drafter.commit([50, 51, 52], None, 4)  # the chat was cut back to four tokens
    drafter.commit([12, 13], None, 7)
    proposal = drafter.propose(DraftContext(14, 9, 4, 0.0))
    assert list(proposal.token_ids)[:1] == [50]


def test_regenerated_answer_is_drafted_from_the_old_one() -> None:
    """The pool: what a chat said before stays material, also when it was replaced."""
    prompt, answer = [1, 2, 3, 4], list(range(200, 240))
    drafter = NgramSpeculator()
    drafter.commit([*prompt, *answer], None, 0)
    drafter.commit([], None, len(prompt))
    ids = [*prompt, 200]
    hits = 0
    for token_id in answer[1:]:
        drafts = ask(drafter, ids).token_ids
        hits += bool(drafts) and drafts[0] == token_id
        ids.append(token_id)
    assert hits >= len(answer) - 3


def test_jump_in_position_is_a_gap_not_an_error() -> None:
    drafter = armed(TEXT)
    drafter.commit([30, 31, 32], None, 100)
    assert drafter.propose(DraftContext(33, 103, 4, 0.0)).token_ids is not None
    drafter.commit([33, 11, 12], None, 103)
    assert list(drafter.propose(DraftContext(13, 106, 4, 0.0)).token_ids)[:1] == [14]


def test_rejected_newest_token_is_replaced() -> None:
    """A step that raised is taken again with another token at the same position."""
    drafter = armed([*TEXT, 1])
    ask(drafter, [*TEXT, 1])
    assert list(ask(drafter, [*TEXT, 13]).token_ids)[:1] == [14]


def test_b12_reset_forgets_everything() -> None:
    drafter = armed([*TEXT, 11])
    drafter.reset()
    drafter.commit([1, 2], None, 0)
    assert not drafter.propose(DraftContext(11, 2, 4, 0.0)).token_ids


def test_corpus_stays_bounded_over_many_regenerated_answers() -> None:
    drafter = armed([1, 2, 3, 4], max_corpus=500)
    for attempt in range(100):
        drafter.commit([attempt * 40 + i for i in range(40)], None, 4)
    assert len(drafter._index.ids) <= 500 + 2 * 64


# -- cost


@pytest.mark.parametrize("kind", ["random", "equal", "period two"])
def test_c10_look_up_does_the_same_work_at_any_length(kind: str) -> None:
    """A scan of the history on every step grew with the context; here dictionary reads do not."""
    rng = random.Random(0)
    work = []
    for length in (1_000, 100_000):
        ids = {
            "random": [rng.randrange(50_000) for _ in range(length)],
            "equal": [7] * length,
            "period two": [1, 2] * (length // 2),
        }[kind]
        drafter = armed(ids)
        ask(drafter, ids)
        counting = CountingDict.install(drafter)
        ids.append(ids[1])
        ask(drafter, ids)
        work.append(counting.num_calls)
    assert work[0] == work[1] <= 2 * len(NgramPolicy().orders)


class CountingDict(dict[int, int]):
    """Counts reads and writes of all tables of a drafter."""

    calls: list[int]

    @classmethod
    def install(cls, drafter: NgramSpeculator) -> CountingDict:
        calls: list[int] = []
        for table in drafter._index._tables:
            table.places = cls(table.places)
            table.places.calls = calls
        last = drafter._index._tables[0].places
        assert isinstance(last, cls)
        return last

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    def get(self, key: int, default: object = None) -> int | None:  # type: ignore[override]
        self.calls.append(key)
        return super().get(key)

    def __setitem__(self, key: int, value: int) -> None:
        self.calls.append(key)
        super().__setitem__(key, value)


# -- strength on recorded turns


@pytest.mark.parametrize(
    ("kind", "least"),
    [("quote", 3.5), ("quote-own", 4.5), ("code-edit", 2.2), ("json", 1.6), ("prose", 0.97)],
)
def test_recorded_turns_keep_their_gain(kind: str, least: float) -> None:
    """Speed against plain decoding with rows at a tenth of a step each; see bench_ngram."""
    words: dict[str, int] = {}
    recorded = next(r for r in RECORDED if r.kind == kind)
    prompt, answer = (
        [words.setdefault(word, len(words)) for word in text.replace("\n", " \n ").split(" ")]
        for text in (recorded.prompt, recorded.answer)
    )
    out = replay(NgramSpeculator(), prompt, answer, None)
    assert out.gain >= least
    assert out.num_tokens == out.num_accepted + out.num_verifies + out.num_plain
