"""How a turn draws its tokens: plain values, validated where they are made."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one turn's sampler. Temperature 0 (or top_k 1) is greedy.

    Defaults for models whose publisher recommends nothing. Source: Ollama, docs/modelfile.md
    (temperature 0.8, top_k 40, top_p 0.9, min_p 0); its repeat penalty of 1.1 is left out, since it
    forbids what a quotation needs.
    """

    temperature: float = 0.8
    top_k: int = 40
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 0.9
    """Keep the likeliest tokens until their probabilities sum to this; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one; 0 drops none."""
    repeat_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen in the last `penalty_window`."""
    presence_penalty: float = 0.0
    """Subtract from the logits of tokens seen at least once in the window."""
    frequency_penalty: float = 0.0
    """Subtract per occurrence in the window."""
    penalty_window: int = 64
    """How many of the last tokens (prompt included) the penalties look at; 0 looks at all."""
    seed: int = 0
    """Position p of attempt a draws with a random number keyed by (seed, a, p) only."""

    def __post_init__(self) -> None:
        """Raises: EngineError naming the field and its value when one is out of range."""
        checks = (
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("top-p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, up to 1"),
            ("min-p", self.min_p, 0.0 <= self.min_p < 1.0, "0 up to below 1"),
            (
                "repeat-penalty",
                self.repeat_penalty,
                0.0 < self.repeat_penalty <= 10.0,
                "above 0 to 10",
            ),
            (
                "presence-penalty",
                self.presence_penalty,
                abs(self.presence_penalty) <= 10.0,
                "-10 to 10",
            ),
            (
                "frequency-penalty",
                self.frequency_penalty,
                abs(self.frequency_penalty) <= 10.0,
                "-10 to 10",
            ),
            ("penalty-window", self.penalty_window, self.penalty_window >= 0, "0 (all) or more"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "0 to 2^63 - 1"),
        )
        for name, value, is_valid, allowed in checks:
            if not is_valid:
                raise EngineError(f"{name} {value} is out of range", hint=f"use {allowed}")

    @property
    def is_greedy(self) -> bool:
        """Whether every draw is the argmax (after penalties)."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
