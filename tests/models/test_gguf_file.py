"""The reader takes whole, sound files and says in one line what is wrong with any other."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from models.architectures import architecture_of
from models.config import ModelConfig
from models.errors import (
    BadGguf,
    ModelError,
    ModelMissing,
    SplitFile,
    UnsupportedArchitecture,
    UnsupportedQuantization,
)
from models.ggml_types import GGML_TYPES
from models.gguf_file import GgufFile
from models.tokenizer import GgufTokenizer
from tests.models.make_gguf import MadeGguf, MadeTensor, made

TRUNKS = Path(__file__).parent.parent / "fixtures" / "trunks"
NAMES = sorted(path.parent.name for path in TRUNKS.glob("*/model.gguf"))


def sound() -> MadeGguf:
    """Two tensors of 64 bytes behind a small header."""
    return made(
        {"general.architecture": "llama", "a.int": 7, "a.list": ["x", "ÿ"], "a.flag": True},
        one=np.arange(16).reshape(4, 4),
        two=np.arange(16).reshape(2, 8),
    )


def open_bytes(tmp_path: Path, raw: bytes, name: str = "model.gguf") -> GgufFile:
    path = tmp_path / name
    path.write_bytes(raw)
    return GgufFile.open(path)


@pytest.mark.parametrize("name", NAMES)
def test_metadata_and_tensors_equal_those_of_the_gguf_package(name: str) -> None:
    path = TRUNKS / name / "model.gguf"
    file, oracle = GgufFile.open(path), gguf.GGUFReader(path)
    for field in oracle.fields.values():
        if field.name.startswith("GGUF."):
            continue
        value, expected = file.metadata[field.name], field.contents()
        assert value.tolist() == expected if isinstance(value, np.ndarray) else value == expected
    assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        weight = file.weight(tensor.name)
        assert weight.type == tensor.tensor_type.name
        assert weight.shape == tuple(tensor.shape.tolist())[::-1]
        assert weight.data.tobytes() == tensor.data.tobytes()


def test_block_sizes_are_those_of_ggml() -> None:
    sizes = gguf.GGML_QUANT_SIZES
    assert {
        kind.name: (kind.block_len, kind.block_bytes) for kind in GGML_TYPES.values()
    }.items() <= {kind.name: size for kind, size in sizes.items()}.items()
    assert all(
        gguf.GGMLQuantizationType(number).name == GGML_TYPES[number].name for number in GGML_TYPES
    )


def test_tensor_views_are_not_copies(tmp_path: Path) -> None:
    file = GgufFile.open(sound().write(tmp_path / "model.gguf"))
    tracemalloc.start()
    weight = file.weight("one")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4096
    assert not weight.data.flags.owndata
    assert not weight.data.flags.writeable
    assert weight.data.shape == (4, 16)


def test_typed_access_gives_values_and_defaults(tmp_path: Path) -> None:
    file = GgufFile.open(sound().write(tmp_path / "model.gguf"))
    assert file.integer("a.int") == 7
    assert file.number("a.int") == 7.0
    assert file.flag("a.flag") is True
    assert file.strings("a.list") == ["x", "ÿ"]
    assert file.integer("absent", 3) == 3
    assert file.optional_integer("absent") is None
    assert file.strings("absent") == []
    assert file.optional_weight("absent") is None


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda f: f.integer("absent"), "key absent is missing"),
        (lambda f: f.integer("a.flag"), "a.flag should be an integer, found True"),
        (lambda f: f.text("a.int"), "a.int should be a string, found 7"),
        (lambda f: f.flag("a.int"), "a.int should be true or false"),
        (lambda f: f.number("a.list"), "a.list should be a number, found list"),
        (lambda f: f.strings("a.int"), "a.int should be an array of strings"),
        (lambda f: f.array("a.list", "f"), "a.list should be an array"),
        (lambda f: f.weight("three"), "tensor three is missing"),
        (lambda f: f.weight("one", (4, 5)), r"tensor one has shape \(4, 4\), expected \(4, 5\)"),
        (lambda f: f.vector("one", 16), "tensor one has shape"),
    ],
)
def test_misuse_names_key_or_tensor_and_values(tmp_path: Path, read, words: str) -> None:
    file = GgufFile.open(sound().write(tmp_path / "model.gguf"))
    with pytest.raises(BadGguf, match=words):
        read(file)


def test_vectors_are_float32_whatever_float_they_are_stored_as(tmp_path: Path) -> None:
    numbers = np.array([0.5, -2.0, 3.0, 1.0], np.float32)
    brain = (numbers.view(np.uint32) >> 16).astype("<u2")
    parts = sound()
    parts.tensors += [
        MadeTensor("half", numbers.astype("<f2"), type_id=1),
        MadeTensor("brain", brain, type_id=30),
        MadeTensor("whole", numbers),
        MadeTensor("number", np.zeros(4, "<i4"), type_id=26),
    ]
    file = GgufFile.open(parts.write(tmp_path / "model.gguf"))
    for name in ("half", "brain", "whole"):
        vector = file.vector(name, 4)
        assert vector.dtype == np.float32
        np.testing.assert_array_equal(vector, numbers)
    with pytest.raises(BadGguf, match="tensor number is I32, expected F32"):
        file.vector("number")


@pytest.mark.parametrize("keep", [1, 3, 4, 7, 20, 23])
def test_a_file_cut_in_its_header_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(BadGguf, match=r"truncated|not a GGUF"):
        open_bytes(tmp_path, sound().to_bytes()[:keep])


def test_a_norm_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    parts = made({}, norm=np.array([1.0, np.nan]))
    with pytest.raises(BadGguf, match="tensor norm has values that are not numbers"):
        GgufFile.open(parts.write(tmp_path / "model.gguf")).vector("norm")


def test_every_cut_is_refused_and_says_so(tmp_path: Path) -> None:
    raw = sound().to_bytes()
    for keep in range(5, len(raw)):
        with pytest.raises(BadGguf, match=r"truncated"):
            open_bytes(tmp_path, raw[:keep])


def test_a_missing_last_byte_names_tensor_and_sizes(tmp_path: Path) -> None:
    raw = sound().to_bytes()
    with pytest.raises(BadGguf, match="tensor two needs 64 bytes, 63 are present"):
        open_bytes(tmp_path, raw[:-1])


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadGguf, match=r"model.gguf is empty"):
        open_bytes(tmp_path, b"")


def test_a_web_page_under_the_name_is_not_a_gguf(tmp_path: Path) -> None:
    with pytest.raises(BadGguf, match=r"not a GGUF file \(it starts with b'<!DO'\)"):
        open_bytes(tmp_path, b"<!DOCTYPE html><p>404</p>")


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "version 1"), (99, "version 99"), (3 << 24, "big-endian"), (0, "big-endian")],
)
def test_other_versions_and_byte_orders_are_named(tmp_path: Path, version: int, words: str) -> None:
    parts = sound()
    parts.version = version
    with pytest.raises(BadGguf, match=words):
        GgufFile.open(parts.write(tmp_path / "model.gguf"))


def test_a_missing_file_and_a_folder_are_missing_models(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="there is no file"):
        GgufFile.open(tmp_path / "none.gguf")
    with pytest.raises(ModelMissing, match="is a folder"):
        GgufFile.open(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(BadGguf, match="not a regular file"):
        GgufFile.open(tmp_path / "pipe.gguf")


HUGE = 2**63 - 1


def with_string_len(length: int) -> bytes:
    raw = sound().to_bytes()
    at = raw.index(b"llama") - 8
    return raw[:at] + struct.pack("<Q", length) + raw[at + 8 :]


def with_array_len(length: int) -> bytes:
    raw = sound().to_bytes()
    at = raw.index(b"a.list") + len("a.list") + 4 + 4
    return raw[:at] + struct.pack("<Q", length) + raw[at + 8 :]


@pytest.mark.parametrize("size", [10_000, 2**31, 2**32 + 1, HUGE, 2**64 - 1])
def test_absurd_sizes_take_no_memory(tmp_path: Path, size: int) -> None:
    """Counts and lengths are compared with what the file can hold before anything is allocated."""
    tensors, keys, dims, offset = sound(), sound(), sound(), sound()
    tensors.num_tensors = keys.num_keys = size
    dims.tensors[0].ne = (4, size)
    offset.tensors[1].offset = size & ~31
    files = [part.to_bytes() for part in (tensors, keys, dims, offset)]
    files += [with_string_len(size), with_array_len(size)]
    for raw in files:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        tracemalloc.start()
        with pytest.raises(BadGguf):
            GgufFile.open(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


def test_an_array_longer_than_any_vocabulary_is_refused_though_the_file_could_hold_it(
    tmp_path: Path,
) -> None:
    path = sound().write(tmp_path / "model.gguf")
    raw = with_array_len((1 << 24) + 1)
    at = raw.index(b"a.list") + len("a.list") + 4
    with path.open("wb") as file:
        file.write(raw[:at] + struct.pack("<I", 0) + raw[at + 4 :])
        file.truncate(1 << 25)
    with pytest.raises(BadGguf, match="an array of 16777217 entries"):
        GgufFile.open(path)


@pytest.mark.parametrize("type_id", [4, 156, 255, 2**31])
def test_an_unknown_tensor_type_names_tensor_and_number(tmp_path: Path, type_id: int) -> None:
    parts = sound()
    parts.tensors[1].type_id = type_id
    file = GgufFile.open(parts.write(tmp_path / "model.gguf"))
    with pytest.raises(UnsupportedQuantization, match=f"tensor two has type {type_id}"):
        file.weight("two")
    assert file.weight("one").type == "F32"


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    parts = sound()
    parts.tensors[1].type_id = 2
    with pytest.raises(BadGguf, match=r"two of shape \(2, 8\) does not divide into Q4_0 blocks"):
        GgufFile.open(parts.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("ne", [(), (1, 1, 1, 1, 1), (0, 4), (16, 0)])
def test_shapes_nothing_has_are_refused(tmp_path: Path, ne: tuple[int, ...]) -> None:
    parts = sound()
    parts.tensors[0].ne = ne
    with pytest.raises(BadGguf, match="tensor one"):
        GgufFile.open(parts.write(tmp_path / "model.gguf"))


def test_duplicates_overlaps_and_odd_places_are_refused(tmp_path: Path) -> None:
    twice, over, odd, keys = sound(), sound(), sound(), sound()
    twice.tensors[1].name = "one"
    over.tensors[1].offset = 32
    odd.tensors[1].offset = 65
    keys.metadata.append(("a.int", 8))
    for parts, words in (
        (twice, "tensor one appears twice"),
        (over, "tensors one and two overlap"),
        (odd, "tensor two is at byte 65, not a multiple of 32"),
        (keys, "key a.int appears twice"),
    ):
        with pytest.raises(BadGguf, match=words):
            GgufFile.open(parts.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("alignment", [0, 3, 1 << 30, "x"])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment: object) -> None:
    parts = sound()
    parts.metadata.append(("general.alignment", alignment))
    with pytest.raises(BadGguf, match=r"general\.alignment"):
        GgufFile.open(parts.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["bad\nname", "", "x" * 300, "\x1b[31m"])
def test_names_that_would_spoil_a_message_are_refused(tmp_path: Path, name: str) -> None:
    parts = sound()
    parts.metadata.append((name, 1))
    with pytest.raises(BadGguf, match="is not a name") as caught:
        GgufFile.open(parts.write(tmp_path / "model.gguf"))
    assert str(caught.value).isprintable()


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    parts = sound()
    parts.metadata.append(("a.text", b"\xff\xfe"))
    with pytest.raises(BadGguf, match=r"metadata \(a\.text\) is not UTF-8"):
        GgufFile.open(parts.write(tmp_path / "model.gguf"))


def split_part(tmp_path: Path, number: int, count: int = 3, **changes: Any) -> Path:
    """Part `number` of a split model with one tensor in each part."""
    keys = {"split.count": count, "split.no": number - 1, "split.tensors.count": max(count, 1)}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    name = keys.pop("name", f"big-{number:05d}-of-{count:05d}.gguf")
    tensor = keys.pop("tensor", f"t{number}")
    own = {"general.architecture": "llama"} if number == 1 else {}
    return made(own | keys, **{tensor: np.full((2, 4), number)}).write(tmp_path / name)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_opens_the_whole_split_model(tmp_path: Path, number: int) -> None:
    paths = [split_part(tmp_path, part) for part in (1, 2, 3)]
    file = GgufFile.open(paths[number - 1])
    assert file.path == paths[0]
    assert file.architecture == "llama"
    assert list(file.tensors) == ["t1", "t2", "t3"]
    for part in (1, 2, 3):
        assert (file.weight(f"t{part}").data.view("<f4") == part).all()
    assert file.num_bytes == sum(path.stat().st_size for path in paths)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    split_part(tmp_path, 1)
    last = split_part(tmp_path, 3)
    words = "part 3 of 3, missing are big-00002-of-00003.gguf"
    with pytest.raises(SplitFile, match=words):
        GgufFile.open(last)
    many = split_part(tmp_path, 1, count=9)
    with pytest.raises(SplitFile, match=r"big-00004-of-00009\.gguf and 5 more"):
        GgufFile.open(many)


def test_a_renamed_part_says_so(tmp_path: Path) -> None:
    with pytest.raises(SplitFile, match="one of 3 parts of a model and was renamed"):
        GgufFile.open(split_part(tmp_path, 2, name="mine.gguf"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split__no": 2}, "big-00002-of-00003.gguf is not part 2 of 3"),
        ({"split__count": 4}, "big-00002-of-00003.gguf is not part 2 of 3"),
        ({"tensor": "t1"}, "have 2 different tensors, 3 belong to the model"),
    ],
)
def test_a_part_of_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    first = split_part(tmp_path, 1)
    split_part(tmp_path, 2, **changes)
    split_part(tmp_path, 3)
    with pytest.raises(SplitFile, match=words):
        GgufFile.open(first)


def test_parts_that_lack_a_promised_tensor_are_refused(tmp_path: Path) -> None:
    first = split_part(tmp_path, 1, split__tensors__count=4)
    split_part(tmp_path, 2)
    split_part(tmp_path, 3)
    with pytest.raises(SplitFile, match="have 3 different tensors, 4 belong to the model"):
        GgufFile.open(first)


def test_a_cut_part_is_named(tmp_path: Path) -> None:
    first, second, _ = (split_part(tmp_path, part) for part in (1, 2, 3))
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(BadGguf, match="tensor t2 needs 32 bytes, 31 are present"):
        GgufFile.open(first)


def test_a_single_part_and_a_merged_file_open(tmp_path: Path) -> None:
    assert GgufFile.open(split_part(tmp_path, 1, count=1)).has_tensor("t1")
    assert GgufFile.open(split_part(tmp_path, 1, count=0, name="merged.gguf")).has_tensor("t1")


def use(path: Path) -> None:
    """Everything a load does before the backend."""
    file = GgufFile.open(path)
    config = ModelConfig.from_gguf(file)
    tokenizer = GgufTokenizer.from_gguf(file)
    tokenizer.encode("two  words\n<s>é")
    for token_id in range(len(tokenizer.vocabulary)):
        tokenizer.piece(token_id)
    architecture_of(file).build(file, config)


@pytest.mark.parametrize("name", NAMES)
def test_random_damage_raises_nothing_but_one_line_model_errors(tmp_path: Path, name: str) -> None:
    """Seeded cuts and byte changes, most of them in the header, where sizes live."""
    raw = (TRUNKS / name / "model.gguf").read_bytes()
    header_len = GgufFile.open(TRUNKS / name / "model.gguf").parts[0].header.data_start
    path = tmp_path / "model.gguf"
    messages = []
    for seed in range(30):
        rng = random.Random(f"{name} {seed}")
        damaged = bytearray(raw)
        if seed % 3 == 0:
            del damaged[rng.randrange(len(raw)) :]
        for _ in range(rng.choice([1, 1, 2, 8]) if seed % 3 else 0):
            where = rng.randrange(min(header_len, 3000 if seed % 3 == 1 else header_len))
            damaged[where % len(damaged)] = rng.choice([0, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            use(path)
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) >= 10
    assert all(message.isprintable() and len(message) < 600 for message in messages)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    file = GgufFile.open(made({"general.architecture": "mamba7"}).write(tmp_path / "m.gguf"))
    with pytest.raises(UnsupportedArchitecture, match="architecture 'mamba7'") as caught:
        architecture_of(file)
    assert "gemma3" in caught.value.hint
    assert "llama" in caught.value.hint
