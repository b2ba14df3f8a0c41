"""Bytes to whole characters, a few deltas a second."""

from __future__ import annotations

import pytest

from engine.text_stream import TextStream
from tests.engine.fakes_engine import FakeClock

TEXT = "ok 🙂👩‍👩‍👧 日本語 é"


def _stream() -> tuple[TextStream, list[str], FakeClock]:
    deltas: list[str] = []
    clock = FakeClock()
    return TextStream(deltas.append, clock), deltas, clock


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_characters_split_over_tokens_come_out_whole(size: int) -> None:
    stream, deltas, clock = _stream()
    data = TEXT.encode()
    for start in range(0, len(data), size):
        stream.push(data[start : start + size])
        clock.now += 1.0
        stream.poll()
    assert stream.finish() == "".join(deltas) == TEXT
    assert "\ufffd" not in TEXT


def test_an_invalid_byte_is_replaced_at_once_and_holds_nothing_back() -> None:
    stream, deltas, _ = _stream()
    stream.push(b"a\xffb")
    stream.poll()
    assert deltas == ["a\ufffdb"]


def test_half_a_character_at_the_end_is_left_out() -> None:
    stream, deltas, _ = _stream()
    stream.push("né".encode()[:-1])
    assert stream.finish() == "n" == "".join(deltas)


def test_deltas_come_at_most_twenty_times_a_second() -> None:
    stream, deltas, clock = _stream()
    for _ in range(1000):
        stream.push(b"x")
        stream.poll()
        clock.now += 0.001
    assert len(deltas) <= 21
    assert stream.finish() == "x" * 1000 == "".join(deltas)


def test_the_first_delta_comes_without_waiting() -> None:
    stream, deltas, _ = _stream()
    stream.push(b"x")
    stream.poll()
    assert deltas == ["x"]


def test_slow_tokens_come_one_by_one() -> None:
    stream, deltas, clock = _stream()
    for letter in (b"a", b"b", b"c"):
        stream.push(letter)
        stream.poll()
        clock.now += 0.2
    assert deltas == ["a", "b", "c"]
