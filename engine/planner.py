"""Chooses the route of one engine step. Decides; carries nothing out."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import Request, RequestState
from engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Plan:
    """At most one chunk of prompt, then at most one decode step for everybody who decodes."""

    prefill: Request | None = None
    decode: tuple[Request, ...] = ()
    """Turns that get one plain row each, in one forward."""
    speculate: Request | None = None
    """The turn that drafts: alone in the engine."""
    may_arm: bool = False
    """Whether the turn that prefills is alone, so that a drafter may look on (S29)."""


def plan(scheduler: Scheduler, *, may_speculate: bool) -> Plan:
    """The next step of the turns that run.

    A step with several turns never speculates, nor one beside a prefilling or waiting newcomer: a
    verify would delay the newcomer's first token (ledger S46).
    """
    lone = scheduler.lone_request
    may_arm = lone is not None and may_speculate and lone.decline is None
    if lone is not None and may_arm and lone.state is RequestState.DECODING:
        return Plan(speculate=lone)
    prefill = scheduler.next_to_prefill()
    return Plan(prefill=prefill, decode=scheduler.decoding, may_arm=may_arm)
