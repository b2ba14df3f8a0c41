"""Where tests marked `weights` find real model files; they are skipped where there is none.

Files are known by their size, whatever they are called, in the folder `FORETELL_TEST_MODELS` names
or in the model folder of this user.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.paths import Paths

SMOLLM2_BYTES = 98_362_432
GEMMA3_270M_BYTES = 253_113_024


def find_model(num_bytes: int) -> Path:
    """The real model file of this size; skips the test where there is none."""
    folder = os.environ.get("FORETELL_TEST_MODELS")
    places = [Path(folder)] if folder else [Paths(None).models_dir]
    for place in places:
        for path in sorted(place.glob("*.gguf")):
            if path.stat().st_size == num_bytes:
                return path
    pytest.skip(f"no model file of {num_bytes} bytes (set FORETELL_TEST_MODELS to its folder)")
