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


def plan(scheduler: Scheduler, *, may_speculate: bool) -> Plan:
    """The next step of the turns that run.

    A step with several turns never speculates, nor one beside a prefilling or waiting newcomer: a
    verify would delay the newcomer's first token (ledger S46).
    """
    lone = scheduler.lone_request
    is_decoding = lone is not None and lone.state is RequestState.DECODING
    if lone is not None and is_decoding and may_speculate and lone.decline is None:
        return Plan(speculate=lone)
    return Plan(prefill=scheduler.next_to_prefill(), decode=scheduler.decoding)
