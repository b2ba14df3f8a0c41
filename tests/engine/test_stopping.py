"""Ways an answer ends, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.events import FinishReason
from engine.stopping import MAX_CYCLE_REPEATS, RepetitionGuard, StopRule, StopStrings
from tests.engine.fakes_engine import EOS, ByteTokenizer


def _rule(
    *,
    stop: Sequence[str] = (),
    max_tokens: int = 1000,
    finish_at_max: FinishReason = "length",
    pieces: Sequence[bytes] | None = None,
    guards_repetition: bool = False,
) -> StopRule:
    tokenizer = ByteTokenizer()
    return StopRule(
        end_ids=tokenizer.eog_ids,
        stop=stop,
        max_tokens=max_tokens,
        finish_at_max=finish_at_max,
        piece=pieces.__getitem__ if pieces else tokenizer.piece,
        guards_repetition=guards_repetition,
    )


def _run(rule: StopRule, token_ids: Sequence[int]) -> tuple[bytes, int]:
    """Shown bytes and how many tokens were taken before the rule ended the answer."""
    shown, num = b"", 0
    for token_id in token_ids:
        shown += rule.push(token_id)
        num += 1
        if rule.finish_reason:
            break
    return shown, num


def test_an_end_token_ends_the_answer_and_shows_nothing() -> None:
    rule = _rule()
    assert _run(rule, [65, 66, EOS, 67]) == (b"AB", 3)
    assert rule.finish_reason == "stop"


@pytest.mark.parametrize("num", [1, 2, 7])
def test_the_token_limit_is_exact(num: int) -> None:
    rule = _rule(max_tokens=num)
    assert _run(rule, [65] * 20) == (b"A" * num, num)
    assert rule.finish_reason == "length"
    assert rule.num_remaining == 0


def test_no_tokens_asked_for_is_complete_at_once() -> None:
    assert _rule(max_tokens=0).finish_reason == "length"


def test_the_end_of_the_context_has_its_own_reason() -> None:
    rule = _rule(max_tokens=2, finish_at_max="context")
    _run(rule, [65, 65])
    assert rule.finish_reason == "context"


def test_a_stop_string_over_several_tokens_is_cut_before_it() -> None:
    rule = _rule(stop=["END"])
    assert _run(rule, list(b"one EN two END three")) == (b"one EN two ", 14)
    assert rule.finish_reason == "stop"


def test_a_stop_string_may_begin_and_end_inside_tokens() -> None:
    rule = _rule(stop=["b c"], pieces=[b"aab", b" cd", b"x"])
    assert _run(rule, [0, 1, 2]) == (b"aa", 2)


def test_of_two_stop_strings_the_one_that_starts_first_wins() -> None:
    rule = _rule(stop=["late", "x"], pieces=[b"say x or late"])
    assert _run(rule, [0])[0] == b"say "


def test_text_that_may_become_a_stop_string_is_held_back_and_then_shown() -> None:
    strings = StopStrings(["###"])
    assert strings.push(b"a#") == (b"a", False)
    assert strings.push(b"#") == (b"", False)
    assert strings.push(b"b") == (b"##b", False)


def test_a_stop_string_that_is_not_text_harms_nothing() -> None:
    assert _run(_rule(stop=["\udcff", ""], max_tokens=3), list(b"abc"))[0] == b"abc"


def test_held_back_text_is_shown_when_the_answer_ends_otherwise() -> None:
    rule = _rule(stop=["###"])
    assert _run(rule, [*b"a##", EOS])[0] == b"a##"
    limited = _rule(stop=["###"], max_tokens=3)
    assert _run(limited, list(b"a##"))[0] == b"a##"
    cancelled = _rule(stop=["###"])
    assert _run(cancelled, list(b"a##"))[0] + cancelled.flush() == b"a##"


@pytest.mark.parametrize("text", ["aXbXc", "XXab", "abcXX", "XaXXaXX"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_cut_does_not_depend_on_how_the_text_is_split(text: str, size: int) -> None:
    stop = ["XX", "Xc"]
    ends = [text.find(s) for s in stop if s in text]
    expected = text[: min(ends)] if ends else text
    pieces = [text[i : i + size].encode() for i in range(0, len(text), size)]
    rule = _rule(stop=stop, pieces=pieces)
    shown, _ = _run(rule, range(len(pieces)))
    assert (shown + rule.flush()).decode() == expected


@pytest.mark.parametrize("cycle", [[5], [5, 6], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_the_guard_fires_when_a_cycle_has_come_round_too_often(cycle: list[int]) -> None:
    guard = RepetitionGuard()
    stream = [9, 9, 10, *cycle * (MAX_CYCLE_REPEATS + 10)]
    fired = next(i for i, token_id in enumerate(stream) if guard.push(token_id))
    assert fired == 2 + len(cycle) * (MAX_CYCLE_REPEATS + 1)


def test_the_guard_lets_long_tables_and_rules_pass() -> None:
    guard = RepetitionGuard()
    line = [1] * 60 + [2]
    assert not any(guard.push(token_id) for token_id in line * 50)


def test_the_guard_is_off_unless_asked_for() -> None:
    assert _run(_rule(), [65] * 500)[1] == 500
    guarded = _rule(guards_repetition=True)
    assert _run(guarded, [65] * 500)[1] == MAX_CYCLE_REPEATS + 1
    assert guarded.finish_reason == "repetition"
