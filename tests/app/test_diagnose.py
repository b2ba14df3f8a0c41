"""`foretell diagnose` and `models show` on tiny models: what a person can check by hand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from app.cli.main import main
from app.cli.output import BAD_MODEL, DOES_NOT_FIT, FAILURE, MISSING, OK
from tests.models.assistant_formulas import run_assistant
from tests.models.test_trunks_match_fixtures import assert_logits_match
from tests.models.tiny_assistant import (
    VOCAB,
    assistant_tensors,
    trunk_tensors,
    write_assistant,
    write_trunk,
)
from tests.models.trunk_fixtures import TRUNKS_DIR, expected


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))


def listed(token_ids: list[int]) -> str:
    return ",".join(map(str, token_ids))


@pytest.mark.parametrize("rows", [1, 7, 9])
@pytest.mark.parametrize("trunk", ["gemma3", "gemma4-dense", "gemma4-ple", "gemma4-moe"])
def test_s18_logits_are_the_stored_ones_whatever_the_rows_of_a_forward(
    tmp_path: Path, trunk: str, rows: int
) -> None:
    """48 tokens, three windows of 16."""
    out, stored = tmp_path / "logits.npz", expected(trunk)
    model = TRUNKS_DIR / trunk / "model.gguf"
    argv = ["diagnose", "logits", str(model), "--tokens", listed(stored.token_ids)]
    assert main([*argv, "--rows", str(rows), "--out", str(out)]) == OK
    with np.load(out) as written:
        assert_logits_match(trunk, written["logits"], stored.logits)


def test_s51_draft_writes_what_the_drafter_proposes(tmp_path: Path) -> None:
    trunk, assistant = trunk_tensors(), assistant_tensors()
    model, drafter = write_trunk(tmp_path, trunk), write_assistant(tmp_path, assistant)
    token_ids = np.random.default_rng(4).integers(4, VOCAB, 40).tolist()
    out = tmp_path / "draft.npz"
    argv = ["diagnose", "draft", str(model), "--draft-model", str(drafter)]
    assert main([*argv, "--tokens", listed(token_ids), "--out", str(out)]) == OK
    with np.load(out) as written:
        ids, logits = written["draft_ids"], written["draft_logits"]
        confidences = written["confidences"]
    drafts = run_assistant(assistant, trunk, token_ids[:-1], token_ids[-1], len(ids))
    assert ids.tolist() == [draft.token_id for draft in drafts]
    np.testing.assert_allclose(logits, [d.logits for d in drafts], rtol=0, atol=1e-4)
    np.testing.assert_allclose(confidences, [d.confidence for d in drafts], rtol=0, atol=1e-4)


def test_s51_draft_with_a_drafter_that_does_not_fit_says_why_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = write_assistant(tmp_path, assistant_tensors())
    out, model = tmp_path / "draft.npz", TRUNKS_DIR / "gemma3" / "model.gguf"
    argv = ["diagnose", "draft", str(model), "--draft-model", str(drafter), "--tokens", "5,6"]
    assert main([*argv, "--out", str(out)]) == BAD_MODEL
    assert "drafts for gemma4, model.gguf is gemma3" in capsys.readouterr().err
    assert not out.exists()


def test_show_prints_the_weights_and_what_1k_tokens_of_cache_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before loading; a window counts as far as it fills: 6 layers of 16 tokens, one of 1024."""
    assert main(["models", "show", str(TRUNKS_DIR / "gemma3" / "model.gguf")]) == OK
    shown = capsys.readouterr().out
    assert re.search(r"weight bytes +\S+ [kM]B", shown)
    per_token = 2 * 4 * 2 * 32
    assert re.search(rf"cache bytes per 1k tokens +{per_token * (6 * 16 + 1024) // 1000} kB", shown)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(2, "No such file or directory"), MISSING),
        (OSError(28, "No space left on device"), DOES_NOT_FIT),
        (PermissionError(13, "Permission denied"), FAILURE),
    ],
)
def test_an_output_that_cannot_be_written_leaves_with_the_code_of_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: OSError,
    code: int,
) -> None:
    """Each of them was "file missing"."""

    def fail(file: object, **arrays: object) -> None:
        raise error

    monkeypatch.setattr(np, "savez", fail)
    model, out = TRUNKS_DIR / "llama" / "model.gguf", tmp_path / "o.npz"
    argv = ["diagnose", "logits", str(model), "--tokens", "1,2"]
    assert main([*argv, "--out", str(out)]) == code
    assert capsys.readouterr().err == f"foretell: {out}: cannot be written: {error.strerror}\n"
    assert list(tmp_path.glob("o.npz*")) == []
