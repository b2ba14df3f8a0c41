"""Choosing a backend: the first that runs, with the reasons of those that do not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from backends import select
from backends.base import Backend, BackendUnavailable
from backends.reference import ReferenceBackend


def refuse(reason: str) -> Backend:
    raise BackendUnavailable(reason)


def test_auto_takes_the_first_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = ReferenceBackend()
    monkeypatch.setattr(select, "has_cuda_device", lambda: False)
    monkeypatch.setattr(select, "_native", lambda threads: reference)
    monkeypatch.setattr(select, "_mlx", lambda: refuse("no mlx"))
    assert select.select_backend() is reference


def test_when_none_runs_the_error_gives_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "has_cuda_device", lambda: False)
    monkeypatch.setattr(select, "_native", lambda threads: refuse("no compiler"))
    monkeypatch.setattr(select, "_torch", lambda device: refuse("no torch"))
    monkeypatch.setattr(select, "_mlx", lambda: refuse("no mlx"))
    with pytest.raises(BackendUnavailable, match=r"native: no compiler; torch: no torch"):
        select.select_backend()


def test_a_named_backend_is_not_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_native", lambda threads: refuse("no compiler"))
    with pytest.raises(BackendUnavailable, match="no compiler"):
        select.select_backend("native")
    with pytest.raises(BackendUnavailable, match=r"no backend 'abacus'"):
        select.select_backend("abacus")


def test_every_backend_is_described_with_device_or_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "has_cuda_device", lambda: False)
    monkeypatch.setattr(select, "_native", lambda threads: refuse("no compiler"))
    rows = {row.name: row for row in select.describe_backends()}
    assert set(rows) == {"mlx", "cuda", "native", "torch"}
    assert rows["native"].text == "not available: no compiler"
    assert not rows["cuda"].is_available


def test_the_native_backend_is_chosen_and_loaded_without_torch() -> None:
    """`ask` on a CPU must not pay 2 s for a library it does not use."""
    script = (
        "import sys\n"
        "from backends import select\n"
        "select.has_cuda_device = lambda: False\n"
        "select._mlx = lambda: select._factory('none')\n"
        "assert select.select_backend().name == 'native'\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'mlx' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
