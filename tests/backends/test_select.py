"""Choosing a backend: the first that runs, with the reasons of those that do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from backends import base, select
from backends.base import Backend, BackendUnavailable, OutOfDeviceMemory, check_room
from backends.first_that_fits import FirstThatFits
from backends.program import Program
from backends.reference import ReferenceBackend, ReferenceExecutable
from tests.backends.tiny_programs import drafter, everything
from tests.cpu_backend import needs_native


def refuse(reason: str) -> Backend:
    raise BackendUnavailable(reason)


@pytest.fixture
def only_what_a_test_names(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """On a machine without a GPU, where nothing is installed."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(select, "has_cuda_device", lambda: False)
    monkeypatch.setattr(select, "_native", lambda threads: refuse("no compiler"))
    monkeypatch.setattr(select, "_torch", lambda device, may_stay_packed=True: refuse("no torch"))
    monkeypatch.setattr(select, "_mlx", lambda: refuse("no mlx"))
    return monkeypatch


def test_auto_takes_the_first_that_runs(only_what_a_test_names: pytest.MonkeyPatch) -> None:
    only_what_a_test_names.setattr(select, "_native", lambda threads: ReferenceBackend())
    only_what_a_test_names.setattr(select, "_torch", lambda device: Small())
    assert select.select_backend().name == "reference"


@pytest.mark.usefixtures("only_what_a_test_names")
def test_when_none_runs_the_error_gives_every_reason_once() -> None:
    words = r"\(cuda: the driver finds no NVIDIA GPU; native: no compiler; torch: no torch\)$"
    with pytest.raises(BackendUnavailable, match=words):
        select.select_backend()


class Small(ReferenceBackend):
    """Holds nothing; counts what was tried."""

    name = "small"  # type: ignore[assignment]
    num_tried = 0

    def compile(self, program: Program, **settings: Any) -> ReferenceExecutable:
        self.num_tried += 1
        raise OutOfDeviceMemory("9 bytes do not fit: 8 are free")


def small_gpu(monkeypatch: pytest.MonkeyPatch, small: Small) -> None:
    monkeypatch.setattr(select, "has_cuda_device", lambda: True)
    monkeypatch.setattr(select, "_torch", lambda device, may_stay_packed=True: small)


def small_mac(monkeypatch: pytest.MonkeyPatch, small: Small) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(select, "_mlx", lambda: small)


def small_cpu(monkeypatch: pytest.MonkeyPatch, small: Small) -> None:
    monkeypatch.setattr(select, "_native", lambda threads: small)
    monkeypatch.setattr(select, "_torch", lambda device: ReferenceBackend())


@pytest.mark.parametrize("machine", [small_gpu, small_mac, small_cpu])
def test_a_model_goes_where_it_fits_and_its_drafter_goes_with_it(
    only_what_a_test_names: pytest.MonkeyPatch,
    machine: Callable[[pytest.MonkeyPatch, Small], None],
) -> None:
    small = Small()
    only_what_a_test_names.setattr(select, "_native", lambda threads: ReferenceBackend())
    machine(only_what_a_test_names, small)
    backend = select.select_backend()
    assert backend.name == "small"
    target = backend.compile(everything("F32"))
    assert backend.name == "reference"
    assert target.notices == ["the model runs on reference (small: 9 bytes do not fit: 8 are free)"]
    assert backend.compile(drafter("F32"), reads=target).notices == []
    assert small.num_tried == 1


def test_a_model_that_fits_nowhere_is_refused_with_every_reason() -> None:
    backend = FirstThatFits([("a", Small), ("b", lambda: refuse("no compiler")), ("c", Small)])
    with pytest.raises(OutOfDeviceMemory, match=r"^small: 9 bytes .*; small: 9 bytes .*"):
        backend.compile(everything("F32"))


class Card(ReferenceBackend):
    """A GPU with a fixed amount free, counted in bytes of caches."""

    name = "card"  # type: ignore[assignment]

    def placed_bytes(self, program: Program) -> int:
        return 0

    def check_room(self, program: Program, cache_bytes: int, freed_bytes: int) -> None:
        if cache_bytes > 100 + freed_bytes:
            raise OutOfDeviceMemory(f"only {100 + freed_bytes} bytes")


@pytest.mark.parametrize(
    ("cache_bytes", "freed_bytes", "main_bytes", "fits"),
    [
        (100, 0, 0, True),
        (200, 100, 0, True),
        (200, 0, 0, False),
        (200, 0, 10**9, True),
        (200, 99, 0, False),
        (10**6, 10**6 - 101, 200, False),
    ],
)
def test_each_is_asked_for_its_own_memory_before_the_model_in_use_goes(
    monkeypatch: pytest.MonkeyPatch,
    cache_bytes: int,
    freed_bytes: int,
    main_bytes: int,
    fits: bool,
) -> None:
    """What the card gives back is no main memory."""
    monkeypatch.setattr(base, "available_bytes", lambda: main_bytes)
    backend = FirstThatFits(
        [("a", Card), ("b", lambda: refuse("no compiler")), ("c", ReferenceBackend)]
    )
    if fits:
        check_room(backend, everything("F32"), cache_bytes, freed_bytes)
        return
    with pytest.raises(OutOfDeviceMemory, match=r"^card: only \d+ bytes; reference: .* are needed"):
        check_room(backend, everything("F32"), cache_bytes, freed_bytes)


@pytest.mark.parametrize("error", [ImportError("No module named 'x'"), OSError("[WinError 126]")])
def test_a_package_that_cannot_be_loaded_is_a_reason_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """torch raises OSError where a system library is missing."""

    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name in ("backends.torch_backend.backend", "backends.mlx_backend.backend"):
                raise error

    for name in ("torch", "mlx"):
        monkeypatch.delitem(sys.modules, f"backends.{name}_backend.backend", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    rows = {row.name: row for row in select.describe_backends()}
    for name in ("torch", "mlx"):
        assert rows[name].text.startswith(f"not available: {name} cannot be imported: {error}")


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


@needs_native
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
