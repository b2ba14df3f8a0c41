"""The engine's promises on a real executable: tiny random models, one with a window that wraps."""

from __future__ import annotations

import pytest

from engine.contracts import LoadedModel
from engine.sampling_params import SamplingParams
from engine.speculative.options import SpeculationOptions
from tests.cpu_backend import CPU_BACKEND
from tests.engine.fakes_engine import GREEDY, PLAIN, EngineRig, fake_model
from tests.models.trunk_fixtures import executable, expected

DRAFTING = SpeculationOptions(algorithm="ngram", use_governor=False)
SAMPLED = SamplingParams(temperature=0.9, seed=4, repeat_penalty=1.1)
NUM_TOKENS = 48


def _model(trunk: str) -> LoadedModel:
    real = executable(trunk, CPU_BACKEND)
    return fake_model(executable=real, vocab_size=expected(trunk).logits.shape[1], name=trunk)  # type: ignore[arg-type]


def _prompts(trunk: str) -> dict[str, tuple[int, ...]]:
    """Three prompts that repeat themselves, so that a look-up finds something."""
    ids = expected(trunk).token_ids
    return {chat: tuple(ids[n : n + 12] * 3) for n, chat in enumerate("abc")}


@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("trunk", ["llama", "gemma3"])
def test_s70_streams_are_the_same_drafted_in_company_and_regenerated(
    trunk: str, sampling: SamplingParams, options: SpeculationOptions
) -> None:
    settings = {"sampling": sampling, "max_tokens": NUM_TOKENS}
    prompts = _prompts(trunk)
    alone = {
        chat: EngineRig(model=_model(trunk)).ask(prompt, chat, **settings)
        for chat, prompt in prompts.items()
    }
    company = EngineRig(model=_model(trunk), speculation=options)
    turns = {chat: company.submit(ids, chat, **settings) for chat, ids in prompts.items()}
    company.run()
    for chat, prompt in prompts.items():
        assert company.finished(turns[chat]).token_ids == alone[chat].token_ids
        again = company.ask(prompt, chat, **settings)
        assert again.token_ids == alone[chat].token_ids
        assert again.stats.reused_tokens == len(prompt) - 1


@pytest.mark.parametrize("trunk", ["llama", "gemma3"])
def test_a_greedy_turn_is_llama_cpps_stream_wherever_the_choice_is_clear(trunk: str) -> None:
    stored = expected(trunk)
    rig = EngineRig(model=_model(trunk), speculation=DRAFTING)
    end = rig.ask(tuple(stored.token_ids), max_tokens=len(stored.greedy))
    num_clear = next(
        (n for n, gap in enumerate(stored.greedy_gap) if gap <= 0.02), len(stored.greedy)
    )
    assert num_clear > 5
    assert list(end.token_ids[:num_clear]) == stored.greedy[:num_clear]
