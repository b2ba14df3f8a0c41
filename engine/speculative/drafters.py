"""Drafters for diagnosis that force every acceptance pattern: oracle, script, garbage.

They follow a recorded plain stream, so no trained head is needed to accept everything, a given
number per round, or nothing sensible at all. Never chosen by `auto`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import EngineError
from engine.speculative.options import MAX_WINDOW
from engine.speculative.registry import Factory, SpeculatorRequest
from engine.speculative.speculator import DraftContext, Proposal, Speculator, SpeculatorTraits

Guess = Callable[[DraftContext, int], Sequence[int]]
"""(context, vocabulary size) -> drafted ids, valid or not."""


class ForcedSpeculator:
    """Proposes what a function says, whatever happened before."""

    def __init__(self, name: str, guess: Guess, vocab_size: int) -> None:
        self._guess = guess
        self._vocab_size = vocab_size
        self._traits = SpeculatorTraits(
            name=name,
            max_drafts=MAX_WINDOW,
            default_min_draft_prob=0.0,
            can_arm_after_prefix_reuse=True,
        )

    @property
    def traits(self) -> SpeculatorTraits:
        """Needs nothing, arms anywhere."""
        return self._traits

    def propose(self, context: DraftContext) -> Proposal:
        """What the function says."""
        return Proposal(self._guess(context, self._vocab_size))

    def commit(self, token_ids: Sequence[int], hidden: np.ndarray | None, start_pos: int) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""


def drafter_factory(spec: str, prompt_ids: Sequence[int], plain_ids: Sequence[int]) -> Factory:
    """A registry factory for `oracle:K`, `script:3,0,2` or `garbage:SEED`.

    `plain_ids` is the stream plain decoding emits after the prompt; positions are absolute.
    Raises: EngineError naming the spec when it is none of the three.
    """
    kind, _, argument = spec.partition(":")
    plain = [*prompt_ids, *plain_ids]
    try:
        match kind:
            case "oracle":
                num = int(argument)
                return _factory(spec, lambda: _oracle(plain, num))
            case "script":
                accepts = [int(part) for part in argument.split(",")]
                return _factory(spec, lambda: _script(plain, accepts))
            case "garbage":
                seed = int(argument)
                return _factory(spec, lambda: _garbage(plain, seed))
    except ValueError:
        pass
    raise EngineError(
        f"drafter {spec} is unknown", hint="use oracle:K, script:3,0,2 or garbage:SEED"
    )


def _factory(name: str, make_guess: Callable[[], Guess]) -> Factory:
    def make(request: SpeculatorRequest) -> Speculator:
        return ForcedSpeculator(name, make_guess(), request.target.vocab_size)

    return make


def _plain_at(plain: Sequence[int], pos: int, num: int) -> list[int]:
    """`num` tokens of the plain stream from `pos` on; past its end any valid id will do.

    So a window reaches beyond the token that ends the answer, and its rows there are rejected.
    """
    found = list(plain[pos : pos + num])
    return [*found, *[plain[-1]] * (num - len(found))]


def _oracle(plain: Sequence[int], num: int) -> Guess:
    """The next `num` tokens of the plain stream: everything is accepted."""
    return lambda context, _: _plain_at(plain, context.pos + 1, num)


def _script(plain: Sequence[int], accepts: Sequence[int]) -> Guess:
    """In round i (around again at the end) accepts[i] right drafts, then a wrong one."""
    rounds = cycle(accepts)

    def guess(context: DraftContext, vocab_size: int) -> list[int]:
        drafts = _plain_at(plain, context.pos + 1, next(rounds) + 1)
        drafts[-1] = (drafts[-1] + 1) % vocab_size
        return drafts

    return guess


def _garbage(plain: Sequence[int], seed: int) -> Guess:
    """Every bad sort of proposal at random: none, too long, id -1, id V, repeats, noise."""
    rng = random.Random(seed)

    def guess(context: DraftContext, vocab_size: int) -> list[int]:
        noise = [rng.randrange(vocab_size) for _ in range(context.max_drafts)]
        sorts: tuple[list[int], ...] = (
            [],
            noise * 2,
            [*_plain_at(plain, context.pos + 1, 1), -1, *noise],
            [noise[0], vocab_size, *noise],
            [noise[0]] * context.max_drafts,
            noise[: rng.randrange(context.max_drafts + 1)],
        )
        return rng.choice(sorts)

    return guess


if TYPE_CHECKING:
    _: type[Speculator] = ForcedSpeculator
