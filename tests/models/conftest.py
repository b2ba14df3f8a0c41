"""Fixtures shared by the tests of model files."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from models.gguf_file import GgufFile
from models.tokenizer import GgufTokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(scope="session")
def smollm2_file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """The metadata of the real SmolLM2 file: vocabulary, flags, chat template; no tensors."""
    packed = FIXTURES / "vocabularies" / "smollm2.gguf.xz"
    path = tmp_path_factory.mktemp("vocabularies") / "smollm2.gguf"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return GgufFile.open(path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_file: GgufFile) -> GgufTokenizer:
    return GgufTokenizer.from_gguf(smollm2_file)
