"""The CPU backend of this machine: the native library, or torch where no compiler was at hand."""

from __future__ import annotations

import pytest

from backends.base import BackendUnavailable
from backends.native.library import load_library


def _why_not_native() -> str:
    try:
        load_library()
    except BackendUnavailable as error:
        return str(error)
    return ""


needs_native = pytest.mark.skipif(bool(_why_not_native()), reason=_why_not_native())
"""For tests of the native library itself."""
CPU_BACKEND = "torch-cpu" if _why_not_native() else "native"
"""For promises every CPU backend keeps; a key of `tests.models.trunk_fixtures.BACKENDS`."""
