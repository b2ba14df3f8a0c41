"""Names of algorithms and how each is made: the only place that lists them (ledger S05)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.speculative.block_speculator import make_block
from engine.speculative.draft_head import DraftHead, DraftHeadKind
from engine.speculative.head_speculator import make_head
from engine.speculative.ngram import make_ngram
from engine.speculative.options import AUTO, SpeculationOptions
from engine.speculative.speculator import Decline, Speculator
from engine.speculative.target import SpeculativeTarget, TargetTraits

NGRAM = "ngram"
DRAFT_HEAD = "draft-head"
BLOCK = "block"


@dataclass(frozen=True, slots=True)
class SpeculatorRequest:
    """What a factory may build from. A new ingredient is a new field."""

    target: SpeculativeTarget
    draft_head: DraftHead | None
    options: SpeculationOptions


Factory = Callable[[SpeculatorRequest], Speculator | Decline]


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: Factory
    requires_draft_head: bool


class SpeculatorRegistry:
    """Maps a name to a factory."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def register(self, name: str, factory: Factory, *, requires_draft_head: bool = False) -> None:
        """Add an algorithm; `requires_draft_head` lets a missing head be said up front."""
        self._entries[name] = _Entry(factory, requires_draft_head)

    @property
    def names(self) -> tuple[str, ...]:
        """Every known name, in the order of registration."""
        return tuple(self._entries)

    def resolve(
        self, options: SpeculationOptions, traits: TargetTraits, draft_head: DraftHead | None
    ) -> str | Decline:
        """The algorithm that would serve this model, or why none does; makes nothing.

        The trunk's refusal comes first: then nothing drafts, whatever was asked for (S09).
        """
        if not options.is_enabled:
            return Decline("speculation is off")
        if traits.refusal is not None:
            return Decline(traits.refusal)
        if options.algorithm == AUTO:
            return self._resolve_auto(traits, draft_head)
        entry = self._entries.get(options.algorithm)
        if entry is None:
            known = ", ".join((AUTO, *self._entries))
            return Decline(f"spec-type {options.algorithm} is unknown; known are {known}")
        if entry.requires_draft_head and draft_head is None:
            return Decline(f"{options.algorithm} needs a draft head and this model has none")
        if not entry.requires_draft_head and not traits.is_speculation_profitable:
            return Decline(f"{options.algorithm} would not pay on this model")
        return options.algorithm

    def create(self, name: str, request: SpeculatorRequest) -> Speculator | Decline:
        """Make a resolved algorithm for one chat."""
        return self._entries[name].factory(request)

    def available(self, traits: TargetTraits, draft_head: DraftHead | None) -> tuple[str, ...]:
        """Names that can serve a model, what `auto` means first."""
        auto = self.resolve(SpeculationOptions(), traits, draft_head)
        found = [
            name
            for name in self._entries
            if self.resolve(SpeculationOptions(algorithm=name), traits, draft_head) == name
            and self._fits(name, draft_head)
        ]
        return tuple(sorted(found, key=lambda name: name != auto))

    def _resolve_auto(self, traits: TargetTraits, draft_head: DraftHead | None) -> str | Decline:
        """The drafter the checkpoint carries, else ngram where it pays (S13)."""
        if draft_head is not None:
            return BLOCK if draft_head.kind is DraftHeadKind.BLOCK else DRAFT_HEAD
        if not traits.is_speculation_profitable:
            return Decline("drafting without a draft head would not pay on this model")
        return NGRAM

    def _fits(self, name: str, draft_head: DraftHead | None) -> bool:
        if draft_head is None or not self._entries[name].requires_draft_head:
            return True
        is_block = draft_head.kind is DraftHeadKind.BLOCK
        return name not in (BLOCK, DRAFT_HEAD) or (name == BLOCK) == is_block


def default_registry() -> SpeculatorRegistry:
    """The shipped algorithms."""
    registry = SpeculatorRegistry()
    registry.register(NGRAM, lambda _: make_ngram())
    registry.register(
        DRAFT_HEAD,
        lambda request: make_head(request.draft_head, request.target),
        requires_draft_head=True,
    )
    registry.register(
        BLOCK,
        lambda request: make_block(request.draft_head, request.target),
        requires_draft_head=True,
    )
    return registry
