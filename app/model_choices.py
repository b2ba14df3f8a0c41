"""What was chosen with a model, so that it comes back when the next one cannot be loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model as it was given to the engine, with the settings that belong to it."""

    name: str
    """What the model is called."""
    setting: str
    """What finds it at the next start: a name or a path."""
    drafter_path: str | None
    recommended: Mapping[str, float]
    """What its publisher recommends for the sampler."""


class ModelChoices:
    """The loads the engine was asked for; it answers them in order, each once."""

    def __init__(self) -> None:
        self.loaded: ModelChoice | None = None
        """What the engine has."""
        self._pending: deque[ModelChoice] = deque()

    @property
    def is_settled(self) -> bool:
        """Whether every load was answered."""
        return not self._pending

    def begin(self, choice: ModelChoice) -> None:
        """The engine was asked for it."""
        self._pending.append(choice)

    def end(self, name: str, *, is_loaded: bool) -> None:
        """The engine answered a load; those before it are answered too."""
        names = [choice.name for choice in self._pending]
        if name not in names:
            return
        for _ in range(names.index(name) + 1):
            choice = self._pending.popleft()
        self.loaded = choice if is_loaded else self.loaded
