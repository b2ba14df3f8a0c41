"""The assistant drafter is what its formulas say, whatever has happened to its target's cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.base import BackendError, OutOfDeviceMemory, Segment
from backends.program import Program
from backends.reference import ReferenceBackend
from engine.cache.holder import Holder
from engine.contracts import LoadedModel
from engine.diagnostics import draft_after
from engine.speculative.draft_head import top_confidence
from engine.speculative.options import SpeculationOptions
from engine.speculative.trunk import Trunk
from models.errors import UnsupportedArchitecture
from models.gemma4_assistant import AssistantHead
from models.loader import Loader, inspect
from tests.models.assistant_formulas import Draft, run_assistant, run_trunk
from tests.models.tiny_assistant import (
    VOCAB,
    WIDTH,
    WINDOW,
    assistant_tensors,
    trunk_tensors,
    write_assistant,
    write_trunk,
)
from tests.models.trunk_fixtures import BACKENDS, TRUNKS_DIR, available

TRUNK, ASSISTANT = trunk_tensors(), assistant_tensors()
LENGTHS = (2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 5 * WINDOW, 150)
"""Text lengths around the window, after several wraps of it, and beyond a native key block."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both files, written once."""
    folder = tmp_path_factory.mktemp("assistant")
    write_trunk(folder, TRUNK)
    write_assistant(folder, ASSISTANT)
    return folder


@pytest.fixture(scope="module")
def model_on(folder: Path) -> Callable[[str], LoadedModel]:
    """The trunk with its drafter on a backend, loaded once."""

    @cache
    def loaded(backend: str) -> LoadedModel:
        return load(folder / "trunk.gguf", folder / "assistant.gguf", backend)

    return loaded


def load(path: Path, drafter: Path, backend: str = "reference") -> LoadedModel:
    return Loader(lambda: available(backend))(
        path,
        name="tiny",
        speculation=SpeculationOptions(drafter_path=str(drafter)),
        progress=lambda stage, share: None,
    )


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed + length).integers(4, VOCAB, length).tolist()


def formulas(token_ids: list[int], num: int) -> list[Draft]:
    return run_assistant(ASSISTANT, TRUNK, token_ids[:-1], token_ids[-1], num)


def assert_drafts(
    expected: list[Draft], ids: np.ndarray, logits: np.ndarray, confidences: np.ndarray
) -> None:
    assert ids.tolist() == [draft.token_id for draft in expected]
    np.testing.assert_allclose(logits, [d.logits for d in expected], rtol=0, atol=1e-4)
    np.testing.assert_allclose(confidences, [d.confidence for d in expected], rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tiny_trunk_is_what_its_formulas_say(
    model_on: Callable[[str], LoadedModel], backend: str
) -> None:
    executable, token_ids = model_on(backend).executable, text(60)
    output = executable.forward([Segment(token_ids, executable.new_cache())], want_hidden=True)
    expected = run_trunk(TRUNK, token_ids)
    assert output.logits is not None
    np.testing.assert_allclose(output.logits, expected.logits, rtol=0, atol=1e-4)
    assert output.hidden is not None
    np.testing.assert_allclose(output.hidden, expected.hidden, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_s51_proposals_match_the_formulas_within_1e_4(
    model_on: Callable[[str], LoadedModel], backend: str, length: int
) -> None:
    ids, logits, confidences = draft_after(model_on(backend), text(length))
    assert len(ids) > 1
    assert_drafts(formulas(text(length), len(ids)), ids, logits, confidences)


class Chat:
    """A target and the drafter's state on it."""

    def __init__(self, model: LoadedModel, cache: Any = None, token_ids: tuple[int, ...] = ()):
        holder = Holder(model.executable, cache, token_ids)
        self.trunk = Trunk(holder, model.traits, vocab_size=model.vocab_size, max_context_len=1024)
        assert model.draft_head is not None
        self.head = model.draft_head
        self.state = self.head.new_state(self.trunk)
        self.hidden = np.zeros(WIDTH, np.float32)

    def feed(self, token_ids: list[int]) -> None:
        """Forward; keep the last row's hidden."""
        hidden = self.trunk.forward_rows(token_ids, want_hidden=True).hidden
        assert hidden is not None
        self.hidden = hidden[-1].copy()

    def drafts(self, last_id: int, num: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, logits, confidences = [], [], []
        token_id, hidden = last_id, self.hidden
        for i in range(num):
            step = self.head.draft_step(self.state, token_id, hidden, self.trunk.cached_len + i)
            ids.append(step.token_id)
            logits.append(self.head.last_logits(self.state)[0])
            confidences.append(step.confidence)
            token_id, hidden = step.token_id, step.hidden
        return np.array(ids), np.array(logits), np.array(confidences)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_rejected", [1, 2, 15])
def test_s18_rejected_rows_are_not_seen_by_the_next_draft(
    model_on: Callable[[str], LoadedModel], backend: str, num_rejected: int
) -> None:
    """Before the window is full, when it is, and after it wrapped several times."""
    for length in (8, WINDOW, 3 * WINDOW + 5):
        chat, token_ids = Chat(model_on(backend)), text(length)
        chat.feed(token_ids[:-2])
        chat.feed(token_ids[-2:-1])
        chat.trunk.forward_rows(text(num_rejected, seed=7))
        chat.trunk.rewind_to(length - 1)
        assert_drafts(formulas(token_ids, 4), *chat.drafts(token_ids[-1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_s32_drafting_changes_nothing_and_resumes_after_any_gap(
    model_on: Callable[[str], LoadedModel], backend: str
) -> None:
    """Drafts, then tokens the head is never told of, then drafts again from one hidden row."""
    chat, token_ids = Chat(model_on(backend)), text(90)
    chat.feed(token_ids[:20])
    before = {k: v.copy() for k, v in chat.trunk.cache.export_state().items()}
    chat.drafts(token_ids[20], num=20)
    after = chat.trunk.cache.export_state()
    assert chat.trunk.cache.length == 20
    assert all(np.array_equal(before[key], after[key]) for key in before)
    chat.trunk.forward_rows(token_ids[20:60], want_logits="none")
    chat.feed(token_ids[60:-1])
    assert_drafts(formulas(token_ids, 4), *chat.drafts(token_ids[-1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_s32_drafts_on_a_clone_of_a_shared_prefix(
    model_on: Callable[[str], LoadedModel], backend: str
) -> None:
    model, token_ids = model_on(backend), text(44)
    first = Chat(model)
    first.feed(token_ids[:40])
    clone = first.trunk.cache.clone()
    first.feed(text(9, seed=3))
    second = Chat(model, clone, tuple(token_ids[:40]))
    second.feed(token_ids[40:-1])
    assert_drafts(formulas(token_ids, 4), *second.drafts(token_ids[-1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_drafter_is_never_run_on_an_empty_cache_or_without_its_row(
    model_on: Callable[[str], LoadedModel], backend: str
) -> None:
    chat = Chat(model_on(backend))
    with pytest.raises(BackendError, match="empty cache"):
        chat.drafts(5)
    chat.feed([5, 6])
    chat.hidden = np.zeros(WIDTH + 1, np.float32)
    with pytest.raises(BackendError, match=r"needs hidden rows \(1, 64\), got \(1, 65\)"):
        chat.drafts(7)


def test_s51_shared_layers_store_nothing_and_neither_does_the_drafter(
    model_on: Callable[[str], LoadedModel],
) -> None:
    """Six trunk layers and four of the drafter, four slots."""
    cache = model_on("reference").executable.new_cache()
    assert sum(key.startswith("k.") for key in cache.export_state()) == 4


def test_confidence_is_the_best_of_the_softmax_over_the_ten_largest_logits() -> None:
    rng = np.random.default_rng(1)
    for spread, size in ((0.1, 700), (1.0, 703), (8.0, 5000), (60.0, 5041), (3.0, 20)):
        logits = (spread * rng.standard_normal(size)).astype(np.float32)
        best = np.sort(logits.astype(np.float64))[-10:]
        expected = 1 / np.exp(best - best[-1]).sum()
        assert top_confidence(logits) == pytest.approx(expected, abs=1e-6)
    assert top_confidence(np.array([2.0, 2.0], np.float32)) == pytest.approx(0.5)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_a_drafter_may_be_kept_in_another_precision_than_its_targets_cache(
    folder: Path, tmp_path: Path, backend: str
) -> None:
    """A half-precision trunk keeps a half-precision cache, which a float32 drafter looks at."""
    halves = {
        name: data.astype(np.float16) if data.ndim == 2 else data for name, data in TRUNK.items()
    }
    model = load(write_trunk(tmp_path, halves), folder / "assistant.gguf", backend)
    for length in (WINDOW, 5 * WINDOW):
        expected = run_assistant(ASSISTANT, halves, text(length)[:-1], text(length)[-1], 1)
        _, logits, _ = draft_after(model, text(length))
        np.testing.assert_allclose(logits[0], expected[0].logits, rtol=0, atol=0.02)
    model.close()


# -- what does not fit is refused with the reason, and the trunk answers without it


def without(tensors: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: data for key, data in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention__head_count_kv": 2}, r"\(kv heads, head dim, window\) \(2, 16, 16\).*\(1, 16"),
        ({"attention__key_length": 16}, "attention.key_length 16, trunk.gguf has 32"),
        ({"attention__key_length_swa": 8}, "attention.key_length_swa 8, trunk.gguf has 16"),
        ({"attention__sliding_window": 32}, "attention.sliding_window 32, trunk.gguf has 16"),
        ({"rope__freq_base_swa": 2e4}, "rope.freq_base_swa 20000.0, trunk.gguf has 10000.0"),
        ({"embedding_length_out": 32}, "a hidden size 32, trunk.gguf has 64"),
        ({"attention__sliding_window_pattern": None}, "sliding_window_pattern is missing"),
        ({"attention__head_count": 3}, "tensor blk.0.attn_q.weight has shape"),
        ({"block_count": 5, "attention__sliding_window_pattern": [True] * 5}, "blk.3.*shape"),
    ],
)
def test_s51_a_drafter_of_another_shape_is_refused_with_the_reason(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    assert_refused(folder / "trunk.gguf", write_assistant(tmp_path, ASSISTANT, **changes), words)


def assert_refused(trunk: Path, drafter: Path, words: str) -> None:
    """With the reason; the trunk is there and answers."""
    model = load(trunk, drafter)
    assert model.draft_head is None
    assert model.draft_head_refusal is not None
    assert re.search(words, model.draft_head_refusal), model.draft_head_refusal
    cache = model.executable.new_cache()
    assert model.executable.forward([Segment([5], cache)]).logits is not None


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output_norm.weight",
        "nextn.pre_projection.weight",
        "nextn.post_projection.weight",
        "blk.3.attn_q_norm.weight",
        "blk.0.ffn_down.weight",
    ],
)
def test_s51_a_drafter_without_one_of_its_tensors_is_refused_by_its_name(
    folder: Path, tmp_path: Path, name: str
) -> None:
    path = write_assistant(tmp_path, without(ASSISTANT, name))
    assert_refused(folder / "trunk.gguf", path, f"tensor {name} is missing")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_s51_a_truncated_drafter_is_refused(folder: Path, tmp_path: Path, share: float) -> None:
    path = write_assistant(tmp_path, ASSISTANT)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert_refused(folder / "trunk.gguf", path, r"assistant\.gguf.*truncated")


def test_s51_a_drafter_for_another_architecture_or_another_size_is_refused(folder: Path) -> None:
    for trunk, words in (
        ("llama", "drafts for gemma4, model.gguf is llama"),
        ("gemma3", "drafts for gemma4, model.gguf is gemma3"),
        ("gemma4-dense", "a vocabulary of 96, model.gguf has 512"),
    ):
        assert_refused(TRUNKS_DIR / trunk / "model.gguf", folder / "assistant.gguf", words)


def test_s51_a_whole_model_is_no_drafter(folder: Path) -> None:
    assert_refused(folder / "trunk.gguf", folder / "trunk.gguf", "is a whole gemma4 model")


def test_a_drafter_is_no_model_and_says_how_to_use_it(folder: Path) -> None:
    path = folder / "assistant.gguf"
    assert inspect(path).unsupported == (
        "assistant.gguf is a drafter (gemma4-assistant), not a model of its own"
    )
    with pytest.raises(UnsupportedArchitecture) as caught:
        load(path, path)
    assert "--draft-model" in caught.value.hint


def test_rotation_factors_may_be_missing_since_the_keys_are_the_targets(
    folder: Path, tmp_path: Path
) -> None:
    """Some files omit them; the queries turn as the keys did."""
    path = write_assistant(tmp_path, without(ASSISTANT, "rope_freqs.weight"))
    ids, logits, confidences = draft_after(load(folder / "trunk.gguf", path), text(40))
    assert_drafts(formulas(text(40), len(ids)), ids, logits, confidences)


def test_a_drafter_that_cannot_be_placed_leaves_the_model_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_any = ReferenceBackend.compile

    def compile_targets(self: ReferenceBackend, program: Program, **kwargs: Any) -> Any:
        if not program.grows_cache:
            raise OutOfDeviceMemory("the weights need 9 bytes, 8 are free")
        return compile_any(self, program, **kwargs)

    monkeypatch.setattr(ReferenceBackend, "compile", compile_targets)
    assert_refused(folder / "trunk.gguf", folder / "assistant.gguf", "need 9 bytes, 8 are free")


def test_closing_a_model_closes_its_drafter(folder: Path) -> None:
    model = load(folder / "trunk.gguf", folder / "assistant.gguf")
    draft_after(model, text(5))
    assert isinstance(model.draft_head, AssistantHead)
    assert model.draft_head.executable.weight_bytes > 0
    model.close()
    assert model.draft_head.executable.weight_bytes == 0
