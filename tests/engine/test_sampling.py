"""The sampler: an exact distribution, keyed random numbers, penalties that see every token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from engine.errors import EngineError, NotANumber
from engine.sampling import Sampler, uniform
from engine.sampling_params import SamplingParams


def _row(size: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=2.0, size=size).astype(np.float32)


def _expected(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities by the definition: sort everything, filter, renormalise."""
    order = np.lexsort((np.arange(row.size), -row))
    p = np.exp((row[order].astype(np.float64) - row.max()) / params.temperature)
    if params.top_k:
        p[params.top_k :] = 0.0
    p /= p.sum()
    if params.top_p < 1.0:
        p[int(np.searchsorted(np.cumsum(p), params.top_p, side="left")) + 1 :] = 0.0
    p[p < params.min_p * p[0]] = 0.0
    probabilities = np.empty_like(p)
    probabilities[order] = p / p.sum()
    return probabilities


def _draws(row: np.ndarray, params: SamplingParams, num: int) -> np.ndarray:
    sampler = Sampler(params, [])
    counts = np.zeros(row.size)
    for _ in range(num):
        token_id = sampler.draw(row)
        sampler.accept(token_id)
        counts[token_id] += 1
    return counts / num


SETTINGS = [
    SamplingParams(temperature=0.5, top_k=0, top_p=1.0),
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
    SamplingParams(temperature=1.5, top_k=0, top_p=1.0),
    SamplingParams(temperature=1.0, top_k=3, top_p=1.0),
    SamplingParams(temperature=1.0, top_k=0, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.2),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("params", SETTINGS)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    row = _row()
    frequencies = _draws(row, params, 4000)
    assert np.abs(frequencies - _expected(row, params)).sum() / 2 < 0.03


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("size", [1000, 49_152])
def test_a_large_row_draws_the_token_the_full_sort_would(params: SamplingParams, size: int) -> None:
    row = _row(size, seed=size)
    order = np.lexsort((np.arange(size), -row))
    cumulative = np.cumsum(_expected(row, params)[order])
    sampler = Sampler(params, [])
    for position in range(40):
        u = uniform(params.seed, 0, position)
        token_id = sampler.draw(row)
        sampler.accept(token_id)
        rank = int(np.flatnonzero(order == token_id)[0])
        below = cumulative[rank - 1] if rank else 0.0
        assert below - 1e-5 <= u <= cumulative[rank] + 1e-5


def test_a_row_of_equal_logits_is_drawn_uniformly_in_id_order() -> None:
    params = SamplingParams(temperature=1.0, top_k=4, top_p=1.0)
    frequencies = _draws(np.zeros(5000, dtype=np.float32), params, 4000)
    assert set(np.flatnonzero(frequencies)) == {0, 1, 2, 3}
    assert np.abs(frequencies[:4] - 0.25).max() < 0.03


def test_temperature_zero_and_top_k_one_are_the_same_stream() -> None:
    rows = [_row(300, seed) for seed in range(50)]
    streams = []
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.3, top_k=1)):
        sampler = Sampler(params, [1, 2])
        stream = []
        for row in rows:
            stream.append(sampler.draw(row))
            sampler.accept(stream[-1])
        streams.append(stream)
    assert streams[0] == streams[1] == [int(row.argmax()) for row in rows]


def test_a_known_argmax_is_not_searched_again_where_nothing_is_penalized() -> None:
    row = np.array([0, 5, 5, 1], dtype=np.float32)
    assert Sampler(SamplingParams(temperature=0.0), []).draw(row, 2) == 2
    penalized = SamplingParams(temperature=0.0, repeat_penalty=10.0)
    assert Sampler(penalized, [2]).draw(row, 2) == 1


@pytest.mark.parametrize("top_k", [0, 1, 40])
@pytest.mark.parametrize("size", [300, 1087, 5000])
def test_a_row_with_one_nan_anywhere_is_refused(size: int, top_k: int) -> None:
    """Groups, and the ids behind the last whole group."""
    params = SamplingParams(temperature=0.7, top_k=top_k)
    for place in (0, size // 2, size - 1):
        row = _row(size)
        row[place] = np.nan
        with pytest.raises(NotANumber):
            Sampler(params, []).draw(row)


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    row = np.array([0, 5, 5, 1], dtype=np.float32)
    assert Sampler(SamplingParams(temperature=0.0), []).draw(row) == 1


def test_s70_a_position_draws_the_same_token_whatever_was_drawn_before() -> None:
    params, row = SamplingParams(seed=7, temperature=1.2), _row(500)
    walked = Sampler(params, list(range(10)))
    for token_id in (1, 2, 3):
        walked.draw(_row(500, token_id))
        walked.accept(token_id)
    assert walked.draw(row) == Sampler(params, list(range(13))).draw(row)


def test_seeds_and_attempts_give_different_streams() -> None:
    rows = [_row(500, seed) for seed in range(30)]

    def stream(seed: int, attempt: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=1.5), [], attempt=attempt)
        result = []
        for row in rows:
            result.append(sampler.draw(row))
            sampler.accept(result[-1])
        return result

    assert stream(1, 0) == stream(1, 0)
    assert len({tuple(stream(s, a)) for s, a in [(1, 0), (2, 0), (1, 1), (0, 1)]}) == 4


def test_keyed_numbers_are_uniform_and_unrelated_between_keys() -> None:
    grid = np.array([[uniform(seed, 0, pos) for pos in range(200)] for seed in range(200)])
    assert grid.min() >= 0.0
    assert grid.max() < 1.0
    counts = np.histogram(grid, bins=20, range=(0, 1))[0]
    assert np.abs(counts / grid.size - 0.05).max() < 0.004
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("window", [0, 3])
def test_penalties_equal_the_definition_over_prompt_and_answer(window: int) -> None:
    params = SamplingParams(
        temperature=0.0,
        repeat_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        penalty_window=window,
    )
    history = [1, 1, 2, 5]
    sampler = Sampler(params, history)
    for step in range(60):
        row = _row(12, seed=step)
        expected = row.astype(np.float64)
        for token_id, count in Counter(history[-window:] if window else history).items():
            logit = expected[token_id]
            logit = logit / 1.3 if logit > 0 else logit * 1.3
            expected[token_id] = logit - 0.5 - 0.4 * count
        token_id = sampler.draw(row)
        assert token_id == int(expected.argmax())
        sampler.accept(token_id)
        history.append(token_id)


def test_penalties_leave_the_models_row_alone() -> None:
    row = _row()
    before = row.copy()
    Sampler(SamplingParams(repeat_penalty=2.0), [0, 1, 2]).draw(row)
    assert (row == before).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_that_is_not_a_number_is_refused(temperature: float) -> None:
    row = _row()
    row[3] = np.nan
    with pytest.raises(EngineError, match="not a number"):
        Sampler(SamplingParams(temperature=temperature), []).draw(row)


def test_suppressed_tokens_are_never_drawn() -> None:
    row = np.full(400, -np.inf, dtype=np.float32)
    row[[17, 203]] = 0.0
    frequencies = _draws(row, SamplingParams(temperature=5.0, top_k=40, top_p=1.0), 300)
    assert set(np.flatnonzero(frequencies)) == {17, 203}
