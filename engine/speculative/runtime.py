"""Speculation for one loaded model: which algorithm serves it, what is shared, how a chat is armed.

The executor asks this and nothing else. Shared by every chat: the governor and the step costs,
because their verdict is about the (model, drafter, backend) triple (ledger S33).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contracts import Clock
from engine.speculative.draft_head import DraftHead
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.governor import CostGovernor
from engine.speculative.options import SpeculationOptions
from engine.speculative.registry import SpeculatorRegistry, SpeculatorRequest
from engine.speculative.speculator import Decline
from engine.speculative.target import SpeculativeTarget, TargetTraits
from engine.speculative.window import AdaptiveWindow, FixedWindow, Window

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Shared:
    """What every chat of one (model, drafter, backend) measures together."""

    window: AdaptiveWindow
    governor: CostGovernor = field(default_factory=CostGovernor)


class SpeculationRuntime:
    """Arms chats of one loaded model under the options in force."""

    def __init__(
        self,
        registry: SpeculatorRegistry,
        traits: TargetTraits,
        draft_head: DraftHead | None,
        *,
        options: SpeculationOptions,
        clock: Clock,
    ) -> None:
        self.options = options
        self._registry = registry
        self._traits = traits
        self._draft_head = draft_head
        self._clock = clock
        self._shared: dict[str, _Shared] = {}
        self._late_declines: dict[str, Decline] = {}
        """What a factory found only when the first chat was to be armed, by algorithm."""

    def set_options(self, options: SpeculationOptions) -> None:
        """Another policy from the next arming on; costs measured so far stay valid (S42)."""
        self.options = options

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Names that can serve this model, what `auto` means first."""
        return self._registry.available(self._traits, self._draft_head)

    @property
    def algorithm(self) -> str | None:
        """The algorithm that serves under the options in force, or None."""
        resolved = self._resolve()
        return None if isinstance(resolved, Decline) else resolved

    @property
    def decline(self) -> str | None:
        """Why nothing drafts under the options in force, or None."""
        resolved = self._resolve()
        return resolved.reason if isinstance(resolved, Decline) else None

    def arm(
        self, target: SpeculativeTarget, *, max_tokens: int, committed_ids: Sequence[int] = ()
    ) -> SpeculativeExecution | Decline:
        """A speculator on one chat, told every token its cache holds (S27, S30)."""
        if max_tokens < 2:
            return Decline("an answer of one token leaves nothing to draft")
        name = self._resolve()
        if isinstance(name, Decline):
            return name
        speculator = self._registry.create(name, SpeculatorRequest(target, self._draft_head))
        if isinstance(speculator, Decline):
            log.warning("no drafting by %s: %s", name, speculator.reason)
            self._late_declines[name] = speculator
            return speculator
        traits = speculator.traits
        if committed_ids and traits.needs_hidden and not traits.can_arm_after_prefix_reuse:
            return Decline(f"{traits.name} needs the hidden rows of the whole prompt")
        shared = self._shared_for(name)
        execution = SpeculativeExecution(
            target,
            speculator,
            self._window(shared),
            governor=shared.governor if self.options.use_governor else None,
            costs=shared.window,
            min_draft_prob=self.options.min_draft_prob,
            clock=self._clock,
        )
        execution.begin_turn()
        if committed_ids:
            execution.seed_committed(committed_ids)
        return execution

    def _window(self, shared: _Shared) -> Window:
        """How far to draft: the number a person typed, else the measured best (S23)."""
        if self.options.window is not None:
            return FixedWindow(self.options.window)
        return shared.window if self.options.use_governor else FixedWindow(shared.window.fixed)

    def _resolve(self) -> str | Decline:
        name = self._registry.resolve(self.options, self._traits, self._draft_head)
        return name if isinstance(name, Decline) else self._late_declines.get(name, name)

    def _shared_for(self, name: str) -> _Shared:
        if name not in self._shared:
            window = AdaptiveWindow(preferred=self._traits.preferred_window)
            self._shared[name] = _Shared(window)
        return self._shared[name]
