"""A model loads whole or not at all, and a drafter that does not fit is refused with the reason."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from backends import base
from backends.base import Backend, Executable, LoadProgress, OutOfDeviceMemory
from backends.program import Program
from backends.reference import ReferenceBackend, ReferenceExecutable
from engine.contracts import LoadedModel
from engine.speculative.options import SpeculationOptions
from engine.speculative.target import TargetTraits
from models import architectures
from models.architectures import DRAFTER_ARCHITECTURES
from models.config import ModelConfig
from models.drafters import DrafterFile, check_drafter, open_drafter
from models.errors import (
    BadGguf,
    DoesNotFit,
    DrafterMismatch,
    ModelError,
    ModelMissing,
    UnsupportedArchitecture,
    UnsupportedQuantization,
)
from models.gguf_file import GgufFile
from models.loader import CheckedFile, Loader, inspect
from models.summary import content_hash, quantization
from tests.models.make_gguf import made
from tests.real_models import SMOLLM2_BYTES, find_model

TRUNKS = Path(__file__).parent.parent / "fixtures" / "trunks"
NAMES = ("llama", "qwen3", "qwen3moe", "gemma3", "gemma4-dense", "gemma4-moe", "gemma4-ple")
TARGET = TRUNKS / "gemma4-dense" / "model.gguf"


class CountingBackend(ReferenceBackend):
    """Counts compiles, so that a refusal can be shown to come before."""

    def __init__(self) -> None:
        self.num_compiled = 0

    def compile(
        self,
        program: Program,
        *,
        progress: LoadProgress | None = None,
        reads: Executable | None = None,
    ) -> ReferenceExecutable:
        self.num_compiled += 1
        return super().compile(program, progress=progress, reads=reads)


def load(path: Path, *, drafter: Path | None = None, **settings: Any) -> LoadedModel:
    loader = Loader(settings.pop("backend", ReferenceBackend), **settings)
    options = SpeculationOptions(drafter_path=str(drafter) if drafter else None)
    return loader(path, name="toy", speculation=options, progress=lambda stage, share: None)


@pytest.mark.parametrize("name", NAMES)
def test_every_trunk_loads_and_forwards(name: str) -> None:
    model = load(TRUNKS / name / "model.gguf")
    assert model.name == "toy"
    assert model.quantization == "F32"
    assert model.vocab_size == 512
    assert model.max_context_len == 512
    assert model.template is None
    assert model.draft_head is None
    assert model.draft_head_refusal is None
    assert model.traits.refusal is None
    assert model.num_parameters > 50_000


def test_the_backend_is_made_once_and_only_when_needed() -> None:
    made_backends = []

    def factory() -> ReferenceBackend:
        made_backends.append(ReferenceBackend())
        return made_backends[-1]

    loader = Loader(factory)
    assert not made_backends
    for _ in range(2):
        loader(
            TRUNKS / "llama" / "model.gguf",
            name="toy",
            speculation=SpeculationOptions(),
            progress=lambda stage, share: None,
        )
    assert len(made_backends) == 1


def test_progress_names_its_stage_and_never_goes_back() -> None:
    seen: list[tuple[str, float]] = []
    Loader(ReferenceBackend)(
        TRUNKS / "llama" / "model.gguf",
        name="toy",
        speculation=SpeculationOptions(),
        progress=lambda stage, share: seen.append((stage, share)),
    )
    assert [stage for stage, _ in seen] == ["reading", "placing weights", "placing weights"]
    assert [share for _, share in seen] == [0.0, 0.0, 1.0]


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let so much main memory be available."""
    monkeypatch.setattr(base, "available_bytes", lambda: num_bytes)


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 1000)
    backend = CountingBackend()
    words = r"^model\.gguf does not fit with 512 tokens of context: 0\.0 GB .* 0\.0 GB of memory"
    with pytest.raises(DoesNotFit, match=words) as caught:
        load(TRUNKS / "llama" / "model.gguf", backend=lambda: backend)
    assert caught.value.kind == "does_not_fit"
    assert backend.num_compiled == 0


def test_what_the_backend_makes_of_the_weights_decides_whether_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Types without kernels grow up to eight times when they are placed."""
    free(monkeypatch, 2_400_000_000)
    backend = CountingBackend()
    backend.placed_bytes = lambda program: 8_000_000_000  # type: ignore[method-assign]
    with pytest.raises(DoesNotFit, match=r"8\.0 GB are needed, 2\.4 GB"):
        load(TRUNKS / "llama" / "model.gguf", backend=lambda: backend)
    assert backend.num_compiled == 0


class FullDevice(CountingBackend):
    """A GPU: main memory is nothing to it, its own has room for what a model gives back."""

    def placed_bytes(self, program: Program) -> int:
        return 0

    def check_room(self, program: Program, cache_bytes: int, freed_bytes: int) -> None:
        if cache_bytes > freed_bytes:
            raise OutOfDeviceMemory("the card is full", hint="close a game")


def test_a_device_with_memory_of_its_own_is_asked_before_the_model_in_use_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 0)
    backend = FullDevice()
    with pytest.raises(DoesNotFit, match=r"the card is full") as caught:
        check(backend)
    assert caught.value.hint == "close a game"
    assert backend.num_compiled == 0
    assert check(backend, freed_bytes=10_000_000).place().name == "toy"


def test_tables_that_are_only_looked_up_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay in the mapped file; the per-layer table is half of a Gemma 4 E4B file."""
    path = TRUNKS / "gemma4-ple" / "model.gguf"
    file = GgufFile.open(path)
    table = file.tensors["per_layer_token_embd.weight"].num_bytes
    assert table > 150_000
    cache = 4 * (2 * 2 * 16 * 16) * 2 + 2 * (2 * 4 * 32 * 512)
    enough = sum(info.num_bytes for info in file.tensors.values()) - table + cache
    free(monkeypatch, enough)
    assert load(path).num_parameters
    free(monkeypatch, enough - 50_000)
    with pytest.raises(DoesNotFit):
        load(path)


def check(backend: Backend, *, freed_bytes: int = 0) -> CheckedFile:
    return Loader(lambda: backend).check(
        TRUNKS / "llama" / "model.gguf",
        name="toy",
        speculation=SpeculationOptions(),
        progress=lambda stage, share: None,
        freed_bytes=freed_bytes,
    )


def test_memory_that_the_model_in_use_will_give_back_counts_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 1000)
    assert check(ReferenceBackend(), freed_bytes=10_000_000).place().name == "toy"


def test_a_file_is_checked_without_a_weight_placed() -> None:
    backend = CountingBackend()
    checked = check(backend)
    assert backend.num_compiled == 0
    checked.place()
    assert backend.num_compiled == 1


@pytest.mark.parametrize(
    ("breaking", "error", "kind"),
    [
        (lambda raw: raw[: len(raw) // 2], BadGguf, "bad_model"),
        (lambda raw: raw.replace(b"llama", b"lhama"), UnsupportedArchitecture, "bad_model"),
        (lambda raw: raw.replace(b"blk.1.ffn_up", b"blk.7.ffn_up"), BadGguf, "bad_model"),
    ],
)
def test_a_file_that_cannot_be_used_is_never_placed(
    tmp_path: Path, breaking: Callable[[bytes], bytes], error: type[ModelError], kind: str
) -> None:
    backend = CountingBackend()
    path = tmp_path / "model.gguf"
    path.write_bytes(breaking((TRUNKS / "llama" / "model.gguf").read_bytes()))
    with pytest.raises(error) as caught:
        load(path, backend=lambda: backend)
    assert caught.value.kind == kind
    assert backend.num_compiled == 0


def test_a_missing_file_is_told_from_a_bad_one(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing) as caught:
        load(tmp_path / "none.gguf")
    assert caught.value.kind == "missing"


def test_the_content_hash_tells_fine_tunes_of_one_header_apart(tmp_path: Path) -> None:
    header = {"general.architecture": "llama"}
    weights = np.random.default_rng(0).normal(size=(64, 64))
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    made(header, w=weights).write(paths[0])
    made(header, w=weights).write(paths[1])
    made(header, w=weights + 1e-3).write(paths[2])
    first, same, other = (content_hash(GgufFile.open(path)) for path in paths)
    assert first == same != other
    changed = made(header | {"general.name": "x"}, w=weights).write(tmp_path / "d.gguf")
    assert content_hash(GgufFile.open(changed)) != first


def test_quantization_is_the_files_name_for_it_or_its_most_frequent_type(tmp_path: Path) -> None:
    named = made({"general.file_type": 15}, w=np.zeros((2, 2))).write(tmp_path / "a.gguf")
    assert quantization(GgufFile.open(named)) == "Q4_K_M"
    for file_type in (None, 4711):
        keys = {} if file_type is None else {"general.file_type": file_type}
        path = made(keys, w=np.zeros((2, 2)), n=np.zeros(2)).write(tmp_path / "b.gguf")
        assert quantization(GgufFile.open(path)) == "F32"


def test_inspect_says_what_a_model_is_and_needs() -> None:
    found = inspect(TARGET)
    assert (found.architecture, found.display_name, found.license) == ("gemma4", "G4D", None)
    assert (found.quantization, found.weight_types) == ("F32", (("F32", 85),))
    assert (found.context_len, found.vocab_size, found.has_chat_template) == (512, 512, False)
    assert found.file_bytes == TARGET.stat().st_size
    assert found.weight_bytes == found.num_parameters * 4
    # 4 windowed layers of 16 tokens, 2 growing ones of 1024; keys and values, float32 as the file.
    assert found.cache_bytes_per_1k_tokens == 4 * (8 * 2 * 16 * 16) + 2 * (8 * 1 * 32 * 1024)
    assert found.unsupported is None


@pytest.mark.parametrize("name", NAMES)
def test_s23_the_window_a_trunk_prefers_is_shown_and_goes_with_the_model(name: str) -> None:
    path = TRUNKS / name / "model.gguf"
    preferred = 7 if name.startswith("gemma4") else None
    assert inspect(path).preferred_window == preferred
    assert load(path).traits.preferred_window == preferred


def test_inspect_describes_what_it_cannot_run(tmp_path: Path) -> None:
    path = made({"general.architecture": "mamba7", "mamba7.context_length": 99}).write(
        tmp_path / "other.gguf"
    )
    found = inspect(path)
    assert found.unsupported == "other.gguf: architecture 'mamba7' is not supported"
    assert (found.context_len, found.display_name) == (99, "other")


def test_inspect_describes_a_file_with_a_type_from_the_future(tmp_path: Path) -> None:
    """E2: listed as unsupported, with tensor and type; loading says the same."""
    raw = (TRUNKS / "llama" / "model.gguf").read_bytes()
    at = raw.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 16
    path = tmp_path / "future.gguf"
    path.write_bytes(raw[:at] + (156).to_bytes(4, "little") + raw[at + 4 :])
    found = inspect(path)
    assert found.unsupported is not None
    assert "tensor blk.1.ffn_up.weight has type 156" in found.unsupported
    assert ("type 156", 1) in found.weight_types
    with pytest.raises(UnsupportedQuantization, match=r"blk\.1\.ffn_up\.weight has type 156"):
        load(path)


def test_inspect_refuses_what_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<html>")
    with pytest.raises(BadGguf):
        inspect(path)


@pytest.mark.weights
def test_the_default_model_is_described_as_published() -> None:
    found = inspect(find_model(SMOLLM2_BYTES))
    assert (found.architecture, found.quantization, found.license) == (
        "llama",
        "Q4_1",
        "apache-2.0",
    )
    assert (found.num_parameters, found.context_len) == (134_515_008, 8192)
    assert found.has_chat_template
    assert found.cache_bytes_per_1k_tokens == 30 * 4 * 3 * 64 * 1024
    assert found.unsupported is None


def test_every_listed_architecture_has_its_module() -> None:
    for name in architectures.ARCHITECTURES:
        module = __import__(architectures.ARCHITECTURES[name], fromlist=["build"])
        assert callable(module.build)
        assert callable(module.traits)


def test_the_table_names_the_module_that_writes_a_drafter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second kind that is run is one more line, and is never built as the first."""
    for name in architectures.RUN_DRAFTERS:
        assert architectures.drafter_architecture(name) is not None
    module = ModuleType("sketch")
    module.build = lambda file, target, target_name: target  # type: ignore[attr-defined]
    module.make_head = lambda executable: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sketch", module)
    monkeypatch.setitem(
        architectures.RUN_DRAFTERS, "dflash", architectures.RunDrafter("sketch", "dflash", "gemma4")
    )
    target = GgufFile.open(TARGET)
    program = architectures.architecture_of(target).build(target, ModelConfig.from_gguf(target))
    found = open_drafter(drafter(tmp_path, "dflash"), target, program, None)
    assert isinstance(found, DrafterFile)
    assert found.program is program


def drafter(tmp_path: Path, kind: str = "gemma4-assistant", **changes: Any) -> Path:
    """A drafter header that fits the gemma4 target, vocabulary included; None removes a key."""
    target = GgufFile.open(TARGET)
    size_key = DRAFTER_ARCHITECTURES.get(kind, "embedding_length")
    keys: dict[str, Any] = {
        "general.architecture": kind,
        f"{kind}.{size_key}": 64,
        f"{kind}.attention.key_length": 32,
        f"{kind}.attention.key_length_swa": 16,
        f"{kind}.attention.sliding_window": 16,
    }
    keys |= {key: value for key, value in target.metadata.items() if key.startswith("tokenizer.")}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    return made(keys, w=np.zeros((2, 2))).write(tmp_path / "drafter.gguf")


def refusal_of(path: Path, target_refusal: str | None = None) -> str:
    """What the loader is told of a drafter that does not serve the target."""
    target = GgufFile.open(TARGET)
    program = architectures.architecture_of(target).build(target, ModelConfig.from_gguf(target))
    refusal = open_drafter(path, target, program, target_refusal)
    assert isinstance(refusal, str)
    return refusal


def texts(change: Callable[[list[str]], list[str]]) -> list[str]:
    return change(list(GgufFile.open(TARGET).strings("tokenizer.ggml.tokens")))


def test_a_drafter_that_fits_passes_the_check(tmp_path: Path) -> None:
    target = GgufFile.open(TARGET)
    check_drafter(GgufFile.open(drafter(tmp_path)), target)
    check_drafter(GgufFile.open(drafter(tmp_path, "dflash")), target)
    check_drafter(GgufFile.open(drafter(tmp_path, tokenizer__ggml__tokens=None)), target)


def test_a_named_drafter_is_never_dropped_in_silence(tmp_path: Path) -> None:
    """Whoever names a drafter either has it or is told why not."""
    model = load(TARGET, drafter=drafter(tmp_path))
    assert model.draft_head is not None or model.draft_head_refusal


def test_vocabularies_that_differ_in_padding_only_fit(tmp_path: Path) -> None:
    padded = texts(lambda t: [*t, *(f"[PAD{i}]" for i in range(8))])
    path = drafter(
        tmp_path,
        "dflash",
        tokenizer__ggml__tokens=padded,
        tokenizer__ggml__token_type=None,
        tokenizer__ggml__scores=None,
    )
    check_drafter(GgufFile.open(path), GgufFile.open(TARGET))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "llama"}, "is a whole llama model, not a drafter"),
        ({"general__architecture": "sketch"}, "'sketch' is not a known kind of drafter"),
        (
            {"gemma4-assistant__embedding_length_out": 96},
            "wants a hidden size 96, model.gguf has 64",
        ),
        ({"gemma4-assistant__embedding_length_out": None}, "embedding_length_out is missing"),
        ({"gemma4-assistant__attention__key_length": 64}, "attention.key_length 64"),
        ({"gemma4-assistant__attention__sliding_window": 32}, "attention.sliding_window 32"),
        ({"gemma4-assistant__rope__freq_base": 5e5}, "rope.freq_base 500000.0, model.gguf has"),
        (
            {"tokenizer__ggml__model": "llama"},
            "a tokenizer of kind 'llama', model.gguf has 'gemma4'",
        ),
        ({"tokenizer__ggml__eos_token_id": 9}, "the EOS id 9, model.gguf has 1"),
        ({"tokenizer__ggml__bos_token_id": 9}, "the BOS id 9, model.gguf has 2"),
    ],
)
def test_s45_a_drafter_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = drafter(tmp_path, **changes)
    refusal = refusal_of(path)
    assert words in refusal
    assert "drafter.gguf" in refusal


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: [*t[:99], "other", *t[100:]], "token 99 as 'other'"),
        (lambda t: [*t[:40], t[41], t[40], *t[42:]], "token 40 as"),
        (lambda t: [*t, *(f"[PAD{i}]" for i in range(200))], "a vocabulary of 712"),
    ],
)
def test_s45_a_drafter_with_another_vocabulary_is_refused(
    tmp_path: Path, change: Callable[[list[str]], list[str]], words: str
) -> None:
    """D1: equal widths say nothing; the message names the first difference."""
    path = drafter(
        tmp_path,
        tokenizer__ggml__tokens=texts(change),
        tokenizer__ggml__token_type=None,
        tokenizer__ggml__scores=None,
    )
    with pytest.raises(DrafterMismatch, match=words):
        check_drafter(GgufFile.open(path), GgufFile.open(TARGET))


def test_s43_the_architecture_decides_what_a_drafter_is_not_its_name(tmp_path: Path) -> None:
    path = drafter(tmp_path).rename(tmp_path / "dflash.gguf")
    with pytest.raises(
        DrafterMismatch, match=r"dflash\.gguf drafts for gemma4, model\.gguf is llama"
    ):
        check_drafter(GgufFile.open(path), GgufFile.open(TRUNKS / "llama" / "model.gguf"))


@pytest.mark.parametrize("keep", [0, 1, 20, 0.01, 0.5, -32])
def test_a_cut_drafter_leaves_a_working_plain_model(tmp_path: Path, keep: float) -> None:
    """D3: the drafter's loader checks what the main one checks."""
    path = drafter(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(keep * len(raw))] if 0 < keep < 1 else raw[: int(keep)])
    model = load(TARGET, drafter=path)
    assert model.draft_head is None
    assert model.draft_head_refusal is not None
    assert re.search(r"drafter\.gguf.*(truncated|empty|not a GGUF)", model.draft_head_refusal)
    assert model.executable.new_cache().length == 0


def test_a_missing_drafter_leaves_a_working_plain_model(tmp_path: Path) -> None:
    model = load(TARGET, drafter=tmp_path / "none.gguf")
    assert model.draft_head_refusal is not None
    assert "there is no file" in model.draft_head_refusal


def test_s09_a_trunk_that_refuses_speculation_does_not_open_its_drafter(tmp_path: Path) -> None:
    refusal = TargetTraits(refusal="cannot reproduce its own decode").refusal
    missing = tmp_path / "none.gguf"
    assert refusal_of(missing, refusal) == refusal


def test_the_loader_imports_no_device_library() -> None:
    code = "import models.loader, sys; print({'torch', 'mlx', 'gguf'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=TRUNKS.parents[2],
    )
    assert done.stdout.strip() == "set()"
