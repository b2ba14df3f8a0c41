"""The same promises on real executables: tiny random models of several architectures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from backends.base import Executable
from engine.cache.holder import Holder
from engine.diagnostics import cold_cache_agrees
from engine.sampling_params import SamplingParams
from engine.speculative.drafters import drafter_factory
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.ngram import NgramSpeculator
from engine.speculative.registry import SpeculatorRequest
from engine.speculative.speculator import Decline, Speculator
from engine.speculative.target import TargetTraits
from engine.speculative.trunk import Trunk
from engine.speculative.window import FixedWindow
from tests.cpu_backend import CPU_BACKEND
from tests.engine.fakes_speculative import FakeClock, Turn
from tests.models.trunk_fixtures import executable, expected

TRUNKS = ("llama", "qwen3", "gemma3")
"""gemma3 has windows of 16 tokens, which 24 + 40 tokens wrap several times."""
NUM_TOKENS = 40
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9, top_k=20, seed=3),
    "penalised": SamplingParams(temperature=0.0, repeat_penalty=1.2, frequency_penalty=0.3),
}


def prompt_of(trunk: str) -> list[int]:
    """24 tokens of the fixture, the last 8 twice, so that a look-up finds something."""
    ids = expected(trunk).token_ids[:16]
    return [*ids, *ids[-8:]]


def trunk_on(model: Executable, vocab_size: int) -> Trunk:
    return Trunk(Holder(model), TargetTraits(), vocab_size=vocab_size, max_context_len=256)


def prefill(trunk: Trunk, token_ids: Sequence[int], turn: Turn) -> int:
    """Prompt in two chunks, the last token alone; the first drawn token."""
    for piece in (token_ids[:10], token_ids[10:-1], token_ids[-1:]):
        logits = trunk.forward_rows(piece).logits
    assert logits is not None
    token_id = turn.draw(logits[-1], len(token_ids))
    assert token_id is not None
    return token_id


@cache
def plain_tokens(trunk: str, sampling: str) -> list[int]:
    """What plain decoding emits."""
    prompt = prompt_of(trunk)
    target = trunk_on(executable(trunk, CPU_BACKEND), vocab_of(trunk))
    turn = Turn(prompt, SAMPLING[sampling], max_tokens=NUM_TOKENS)
    token_id = prefill(target, prompt, turn)
    while not turn.is_over:
        logits = target.forward_rows([token_id]).logits
        assert logits is not None
        drawn = turn.draw(logits[0], target.cached_len)
        assert drawn is not None
        token_id = drawn
    return turn.emitted


def vocab_of(trunk: str) -> int:
    return int(expected(trunk).logits.shape[1])


def speculator_of(spec: str, trunk: str, plain: Sequence[int], target: Trunk) -> Speculator:
    if spec == "ngram":
        return NgramSpeculator()
    request = SpeculatorRequest(target, None)
    made = drafter_factory(spec, prompt_of(trunk), plain)(request)
    assert not isinstance(made, Decline)
    return made


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("window", [1, 3, 7, 8, 9, 16])
@pytest.mark.parametrize("spec", ["oracle:16", "script:3,0,2,7", "garbage:1", "ngram"])
@pytest.mark.parametrize("trunk", TRUNKS)
def test_s70_stream_and_cache_are_plain_decodings_to_the_bit(
    trunk: str, spec: str, window: int, sampling: str
) -> None:
    model = executable(trunk, CPU_BACKEND)
    params = SAMPLING[sampling]
    plain = plain_tokens(trunk, sampling)
    prompt = prompt_of(trunk)
    target = trunk_on(model, vocab_of(trunk))
    execution = SpeculativeExecution(
        target,
        speculator_of(spec, trunk, plain, target),
        FixedWindow(window),
        clock=FakeClock(),
    )
    turn = Turn(prompt, params, max_tokens=NUM_TOKENS)
    token_id = prefill(target, prompt, turn)
    execution.seed_committed(prompt)
    while not turn.is_over:
        token_id = execution.step(token_id, turn.num_remaining, turn.draw)[-1]
    assert turn.emitted == plain
    assert target.holder.token_ids == [*prompt, *plain[:-1]]
    if window in (3, 9) and sampling == "greedy":
        assert cold_cache_agrees(target.holder, len(prompt), plain[-1])
