"""The speculation settings a person can change, also in the middle of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError

AUTO = "auto"
"""Whatever drafter the checkpoint carries, else ngram where it is profitable (ledger S13)."""
MAX_WINDOW = 64
"""Largest window a person may ask for, in drafts per step (ledger S43)."""
DEFAULT_WINDOW = 8
"""Drafts per step when nobody says otherwise; a trunk's preferred window narrows it (S23)."""


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Which drafter guesses, how far, and when it may."""

    is_enabled: bool = True
    algorithm: str = AUTO
    """A name known to the registry, or `auto`."""
    window: int | None = None
    """Most drafts per step, 1 to 64; None leaves it to the trunk's preference and the governor."""
    min_draft_prob: float | None = None
    """Confidence gate, 0 to 1; None takes the algorithm's own default (ledger S14)."""
    drafter_path: str | None = None
    """A drafter file that wins over a block the checkpoint carries (ledger S45)."""
    use_governor: bool = True
    """False forces drafting, for measurement (ledger S41)."""

    def __post_init__(self) -> None:
        """Raises: EngineError naming the setting and its value when one is out of range."""
        if self.window is not None and not 1 <= self.window <= MAX_WINDOW:
            raise EngineError(
                f"spec-draft {self.window} is out of range", hint=f"use 1 to {MAX_WINDOW}"
            )
        if self.min_draft_prob is not None and not 0.0 <= self.min_draft_prob <= 1.0:
            raise EngineError(f"spec-pmin {self.min_draft_prob} is out of range", hint="use 0 to 1")
