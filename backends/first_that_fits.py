"""Backends tried in order until a model fits one: only the model decides how far a GPU reaches.

Knows no backend by name; `backends.select` says which ones and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from backends.base import (
    Backend,
    BackendUnavailable,
    Executable,
    LoadProgress,
    OutOfDeviceMemory,
    check_room,
)
from backends.program import Program


class FirstThatFits:
    """The first of several backends whose memory holds the model; each is made when it is tried."""

    def __init__(self, candidates: Sequence[tuple[str, Callable[[], Backend]]]) -> None:
        """By name, to say why one cannot run. Raises: BackendUnavailable when none can."""
        self._untried, self._made = list(candidates), list[Backend]()
        self._refusals: list[str] = []
        first = next(self._backends(), None)
        if first is None:
            reasons = "; ".join(dict.fromkeys(self._refusals))
            raise BackendUnavailable(
                f"no backend can run here ({reasons})",
                hint="reinstall foretell with a C compiler at hand",
            )
        self._chosen = first

    @property
    def name(self) -> str:
        """The name of the one that holds the model, before that of the first."""
        return self._chosen.name

    def placed_bytes(self, program: Program) -> int:
        """Main memory it takes on the one that was chosen; see `check_room`."""
        return self._chosen.placed_bytes(program)

    def check_room(self, program: Program, cache_bytes: int, freed_bytes: int) -> None:
        """Whether weights and caches will fit one of them once so much is given back.

        A GPU gains nothing by what a model in main memory gives back, nor the other way round.
        Raises: UnsupportedWeight, OutOfDeviceMemory with the reason of each.
        """
        reasons: list[str] = []
        was_in_main = self._chosen.placed_bytes(program) > 0
        for backend in self._backends():
            is_same = was_in_main == (backend.placed_bytes(program) > 0)
            try:
                check_room(backend, program, cache_bytes, freed_bytes if is_same else 0)
            except OutOfDeviceMemory as error:
                reasons.append(f"{backend.name}: {error}")
            else:
                return
        raise _fits_nowhere(reasons)

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
        for backend in self._backends():
            try:
                executable = backend.compile(program, progress=progress)
            except OutOfDeviceMemory as error:
                reasons.append(f"{backend.name}: {error}")
                continue
            self._chosen = backend
            if reasons:
                executable.notices.append(f"the model runs on {backend.name} ({reasons[0]})")
            return executable
        raise _fits_nowhere(reasons)

    def _backends(self) -> Iterator[Backend]:
        """Those that can run here, in order. State: each is made once, when it is reached."""
        yield from self._made
        while self._untried:
            name, make = self._untried.pop(0)
            try:
                self._made.append(make())
            except BackendUnavailable as error:
                self._refusals.append(f"{name}: {error}")
                continue
            yield self._made[-1]


def _fits_nowhere(reasons: Sequence[str]) -> OutOfDeviceMemory:
    return OutOfDeviceMemory("; ".join(reasons), hint="close other programs or use a smaller model")


if TYPE_CHECKING:
    _: type[Backend] = FirstThatFits
