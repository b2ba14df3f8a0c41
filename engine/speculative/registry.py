"""Names of algorithms and how each is made: the only place that lists them (ledger S05)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.speculative.block_speculator import BlockSpeculator
from engine.speculative.draft_head import DraftHead, DraftHeadKind
from engine.speculative.head_speculator import HeadSpeculator
from engine.speculative.ngram import NgramSpeculator
from engine.speculative.options import AUTO, SpeculationOptions
from engine.speculative.speculator import Decline, Speculator
from engine.speculative.target import SpeculativeTarget, TargetTraits

_HOW_IT_DRAFTS = {
    DraftHeadKind.PER_TOKEN: "drafts token by token",
    DraftHeadKind.BLOCK: "drafts whole blocks",
}


@dataclass(frozen=True, slots=True)
class SpeculatorRequest:
    """What a factory may build from. A new ingredient is a new field."""

    target: SpeculativeTarget
    draft_head: DraftHead | None

    @property
    def head(self) -> DraftHead:
        """The draft head of an algorithm that was registered as requiring one."""
        assert self.draft_head is not None, "made without the head that it requires"
        return self.draft_head


Factory = Callable[[SpeculatorRequest], Speculator | Decline]


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: Factory
    requires: DraftHeadKind | None


class SpeculatorRegistry:
    """Maps a name to a factory."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def register(
        self, name: str, factory: Factory, *, requires: DraftHeadKind | None = None
    ) -> None:
        """Add an algorithm; `requires` lets a missing or another head be said up front.

        The first one of a kind is what `auto` takes for a head of this kind; the first one that
        requires none is what it takes for a model without a head.
        """
        self._entries[name] = _Entry(factory, requires)

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
        if entry.requires is None:
            if not traits.is_speculation_profitable:
                return Decline(f"{options.algorithm} would not pay on this model")
            return options.algorithm
        if draft_head is None:
            return Decline(f"{options.algorithm} needs a draft head and this model has none")
        if draft_head.kind is not entry.requires:
            how, fitting = _HOW_IT_DRAFTS[draft_head.kind], self._first_for(draft_head.kind)
            return Decline(f"{draft_head.name} {how}; use spec-type {fitting}")
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
        ]
        return tuple(sorted(found, key=lambda name: name != auto))

    def _resolve_auto(self, traits: TargetTraits, draft_head: DraftHead | None) -> str | Decline:
        """The drafter the checkpoint carries, else ngram where it pays (S13)."""
        if draft_head is None and not traits.is_speculation_profitable:
            return Decline("drafting without a draft head would not pay on this model")
        return self._first_for(draft_head.kind if draft_head else None)

    def _first_for(self, kind: DraftHeadKind | None) -> str:
        return next(name for name, entry in self._entries.items() if entry.requires is kind)


def default_registry() -> SpeculatorRegistry:
    """The shipped algorithms."""
    registry = SpeculatorRegistry()
    registry.register("ngram", lambda _: NgramSpeculator())
    registry.register(
        "draft-head",
        lambda request: HeadSpeculator(request.head, request.target),
        requires=DraftHeadKind.PER_TOKEN,
    )
    registry.register(
        "block",
        lambda request: BlockSpeculator(request.head, request.target),
        requires=DraftHeadKind.BLOCK,
    )
    return registry
