"""Limits of the engine that the application sets once, when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits the application sets once."""

    holder_budget_bytes: int | None = None
    """Memory for the caches of all chats together; None takes a share of what is free where they
    lie, once a model is loaded."""
    max_running: int = 8
    """Turns that may run at once; more wait."""
    checkpoint_dir: Path | None = None
    """Where system prompts are kept between starts; None keeps them in memory only."""
