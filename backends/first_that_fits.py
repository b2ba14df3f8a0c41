"""Backends tried in order until a model fits one: only the model decides how far a GPU reaches.

Knows no backend by name; `backends.select` says which ones and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from backends.base import (
    Backend,
    BackendUnavailable,
    Executable,
    LoadProgress,
    OutOfDeviceMemory,
)
from backends.program import Program


class FirstThatFits:
    """The first of several backends whose memory holds the model; each is made when it is tried."""

    def __init__(self, candidates: Sequence[Callable[[], Backend]]) -> None:
        """Raises: BackendUnavailable when the first cannot run here."""
        self._first, self._others = candidates[0](), candidates[1:]
        self._chosen = self._first

    @property
    def name(self) -> str:
        """The name of the one that holds the model, before that of the first."""
        return self._chosen.name

    def placed_bytes(self, program: Program) -> int:
        """Main memory it takes on the first; each checks for itself."""
        return self._first.placed_bytes(program)

    def compile(
        self,
        program: Program,
        *,
        progress: LoadProgress | None = None,
        reads: Executable | None = None,
    ) -> Executable:
        """Put the weights where they fit. State: a drafter goes where its target went.

        Raises: UnsupportedWeight, OutOfDeviceMemory with the reason of each.
        """
        if reads is not None:
            return self._chosen.compile(program, progress=progress, reads=reads)
        reasons: list[str] = []
        for make in (lambda: self._first, *self._others):
            try:
                backend = make()
                executable = backend.compile(program, progress=progress)
            except BackendUnavailable:
                continue
            except OutOfDeviceMemory as error:
                reasons.append(f"{backend.name}: {error}")
                continue
            self._chosen = backend
            if reasons:
                executable.notices.append(f"the model runs on {backend.name} ({reasons[0]})")
            return executable
        raise OutOfDeviceMemory(
            "; ".join(reasons), hint="close other programs or use a smaller model"
        )


if TYPE_CHECKING:
    _: type[Backend] = FirstThatFits
