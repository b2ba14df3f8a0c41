"""The one loop of speculative decoding: draft, verify, rollback, commit (ledger S06).

It serves every algorithm and every model, and knows neither by name. Each emitted token is drawn
from a target row whose inputs are the tokens plain decoding would have fed (S15).
Source: Leviathan et al. 2023, algorithm 1 (arXiv 2211.17192), with the draw from the target row in
place of rejection sampling: a draft is kept when the target's own draw equals it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np

from backends.base import BackendError, RowOutput, WantLogits
from engine.cache.holder import common_prefix_len
from engine.contracts import Clock
from engine.errors import EngineError
from engine.speculative.governor import CostGovernor, GovernorState, StepSample
from engine.speculative.rollback import WIDE_FORWARD_FAULTS, roll_back
from engine.speculative.speculator import DraftContext, Proposal, Speculator
from engine.speculative.stats import SpeculationStats
from engine.speculative.step import DrawRow, Role, Step
from engine.speculative.target import SpeculativeTarget
from engine.speculative.window import AdaptiveWindow, Window

log = logging.getLogger(__name__)


DRAFTER_FAULTS = (
    ArithmeticError,
    AssertionError,
    BackendError,
    EngineError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a broken drafter may raise: it is dropped, the answer goes on plainly (never fails)."""

DRAW_FAULTS = (EngineError, MemoryError, OSError)
"""What drawing from a row may raise; it ends the turn."""


class SpeculativeExecution:
    """A speculator armed on one chat's target."""

    def __init__(
        self,
        target: SpeculativeTarget,
        speculator: Speculator,
        window: Window,
        *,
        governor: CostGovernor | None = None,
        costs: AdaptiveWindow | None = None,
        min_draft_prob: float | None = None,
        clock: Clock,
    ) -> None:
        """`governor` None forces drafting; `costs` learns whether or not it picks the window."""
        traits = speculator.traits
        self.target = target
        self.governor = governor
        self.dropped: str | None = None
        """Why the drafter was dropped, once it was."""
        self._speculator = speculator
        self._window = window
        self._costs = costs
        self._clock = clock
        self._min_draft_prob = (
            traits.default_min_draft_prob if min_draft_prob is None else min_draft_prob
        )
        self._committed: list[int] = []
        """What the drafter was told the cache holds."""
        self.stats = SpeculationStats(clock, algorithm=traits.name)

    @property
    def prefills_through_context(self) -> bool:
        """Whether the prompt's hidden rows have to be captured (S29)."""
        traits = self._speculator.traits
        return traits.needs_hidden and not traits.can_arm_after_prefix_reuse and not self.dropped

    @property
    def wants_prompts_last_row(self) -> bool:
        """Whether the hidden row of the prompt's last token lets it draft at once."""
        traits = self._speculator.traits
        return traits.needs_hidden and traits.can_arm_after_prefix_reuse and not self.dropped

    @property
    def governor_line(self) -> str:
        """What the governor did in this turn (S40); "" when it is off."""
        return self.governor.describe() if self.governor is not None else ""

    @property
    def governor_state(self) -> Literal["off", "probing", "holding", "parked"]:
        """What the governor is doing; "off" without one."""
        return self.governor.state.value if self.governor is not None else "off"

    def can_continue(self, cached_ids: Sequence[int]) -> bool:
        """Whether it can go on behind these tokens: not without prompt rows it needs."""
        num_known = common_prefix_len(self._committed, cached_ids)
        has_gap = num_known < len(cached_ids)
        return not self.dropped and not (self.prefills_through_context and has_gap)

    def begin_turn(self) -> None:
        """A new request on the same chat: fresh counters, a park is cut short (S35)."""
        self.stats = SpeculationStats(self._clock, algorithm=self._speculator.traits.name)
        if self.governor is not None:
            self.governor.begin_request()

    def prefill(self, token_ids: Sequence[int], *, want_logits: WantLogits = "last") -> RowOutput:
        """Forward one chunk of the prompt and let the drafter see its hidden rows (S26, S29).

        Shapes: token_ids [R] -> logits [rows wanted, V] float32.
        State:  cache grows by R; nothing changes when it raises.
        """
        start = self.target.cached_len
        output = self.target.forward_rows(
            token_ids,
            want_logits=want_logits,
            want_hidden=self._speculator.traits.needs_hidden,
        )
        self._tell(token_ids, output.hidden, start)
        return output

    def seed_committed(
        self, token_ids: Sequence[int], last_hidden: np.ndarray | None = None
    ) -> None:
        """Tell the drafter which tokens the cache holds, without hidden rows (S27, S30).

        What it was told before and still stands is not told again: a next turn costs its new
        tokens only, and a drafter keeps the rows it has of them.
        Shapes: last_hidden [F], the row of the last token where it is at hand.
        """
        assert len(token_ids) == self.target.cached_len, "seed with exactly the cached tokens"
        num_known = common_prefix_len(self._committed, token_ids)
        if num_known == len(token_ids) == len(self._committed):
            return
        with self.stats.phase("catch_up"):
            if last_hidden is None:
                self._tell(token_ids[num_known:], None, num_known)
            else:
                self._tell(token_ids[num_known:-1], None, num_known)
                self._tell(token_ids[-1:], last_hidden[None], len(token_ids) - 1)

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Tell the drafter the tokens that plain steps elsewhere put into the cache (S47)."""
        start = self.target.cached_len - len(token_ids)
        assert start == len(self._committed), "catch up from where the drafter stopped"
        with self.stats.phase("catch_up"):
            self._tell(token_ids, None, start)
        if self.governor is not None:
            self.governor.count_interlude(len(token_ids))

    def step(self, last_token_id: int, max_tokens: int, draw: DrawRow) -> list[int]:
        """Emit between 1 and `max_tokens` tokens after `last_token_id`, which is not cached yet.

        Returns: the emitted ids; the last one is not cached.
        State:  the cache grows by as many tokens as are emitted. When it raises, it holds no draft
                that was not emitted.
        Raises: BackendError, EngineError from the target or from `draw`, never from the drafter.
        """
        began = self._clock()
        step = self._draft(last_token_id, max_tokens)
        drafted = self._clock()
        self._verify(step, draw)
        self._rollback(step, len(step.drawn))
        self._commit(step)
        self._account(step, (drafted - began) * 1e3, (self._clock() - drafted) * 1e3)
        return step.drawn

    # -- draft

    def _draft(self, last_token_id: int, max_tokens: int) -> Step:
        base, governor = self.target.cached_len, self.governor
        may_draft = governor is None or governor.may_draft
        is_parked = governor is not None and governor.state is GovernorState.PARKED
        role = Role.NEITHER if may_draft else Role.BASELINE
        step = Step(base, [last_token_id], is_parked, role)
        if self.dropped or not (may_draft or self._speculator.traits.is_free):
            return step
        try:
            self._plan_window(step, max_tokens, may_draft=may_draft)
        except DRAFTER_FAULTS as error:
            self._drop(error)
            step.make_plain()
        return step

    def _plan_window(self, step: Step, max_tokens: int, *, may_draft: bool) -> None:
        """Let the drafter propose and the window policy choose. State: the step's rows."""
        num = min(
            self._window.max_drafts,
            self._speculator.traits.max_drafts,
            max_tokens - 1,
            self.target.max_context_len - step.base - 1,
        )
        if num < 1:
            return
        gates = self._min_draft_prob, self._window.min_prefix_prob
        step.proposal = self._propose(DraftContext(step.rows[0], step.base, num, *gates))
        if may_draft or self._wakes(step.proposal):
            self._choose(step)

    def _choose(self, step: Step) -> None:
        proposal = step.proposal
        num = self._window.choose(
            proposal.prefix_probs,
            len(proposal.token_ids),
            num_right=self.stats.num_right,
            num_verifies=self.stats.verify_steps,
        )
        step.rows.extend(proposal.token_ids[:num])
        step.role = Role.NEITHER if self.governor is None else Role.SPECULATIVE
        step.is_parked = False

    def _propose(self, context: DraftContext) -> Proposal:
        start = self._clock()
        with self.stats.phase("draft"):
            proposal = self._speculator.propose(context)
        ids = [int(i) for i in proposal.token_ids[: context.max_drafts]]
        if self._costs is not None:
            self._costs.record_draft(len(ids), (self._clock() - start) * 1e3)
        # A draft outside the vocabulary must not reach the embedding; what follows it hangs on it.
        num = next((n for n, i in enumerate(ids) if not 0 <= i < self.target.vocab_size), len(ids))
        return Proposal(ids[:num], proposal.prefix_probs)

    def _wakes(self, proposal: Proposal) -> bool:
        """Whether drafts of a parked drafter that costs nothing promise enough to end the park."""
        governor, costs = self.governor, self._costs
        if governor is None or costs is None or governor.state is not GovernorState.PARKED:
            return False
        if not costs.promises_to_pay(
            proposal.prefix_probs,
            len(proposal.token_ids),
            num_right=self.stats.num_right,
            num_verifies=self.stats.verify_steps,
        ):
            return False
        governor.wake()
        return governor.may_draft

    # -- verify

    def _verify(self, step: Step, draw: DrawRow) -> None:
        """Forward the rows once and draw from them until a draw differs from its draft."""
        output = self._forward(step)
        try:
            with self.stats.phase("sample"):
                step.draw(output, draw)
        except DRAW_FAULTS:
            # The row that could not be drawn is that of an emitted token, those behind it are not.
            self._rollback(step, len(step.drawn) + 1)
            raise
        if output.hidden is not None:
            # The arrays are the target's until its next forward, and a rollback may be one.
            step.hidden = output.hidden[: len(step.drawn)].copy()

    def _forward(self, step: Step) -> RowOutput:
        """Score the step's rows; a verify that fails becomes a plain step, with a notice."""
        if not step.num_drafts:
            with self.stats.phase("plain"):
                return self._forward_rows(step)
        try:
            with self.stats.phase("snapshot"):
                step.snapshot = self.target.snapshot_state()
            with self.stats.phase("verify"):
                return self._forward_rows(step)
        except WIDE_FORWARD_FAULTS as error:
            self._drop(error)
            step.make_plain()
            return self._forward(step)

    def _forward_rows(self, step: Step) -> RowOutput:
        return self.target.forward_rows(step.rows, want_hidden=self._wants_hidden(step))

    def _wants_hidden(self, step: Step) -> bool:
        """Whether to capture hidden rows: not in a parked step that a drafter can resume after."""
        traits = self._speculator.traits
        if not traits.needs_hidden or self.dropped:
            return False
        return not (step.role is Role.BASELINE and traits.can_arm_after_prefix_reuse)

    # -- rollback

    def _rollback(self, step: Step, num_kept: int) -> None:
        """Take the rejected rows back. State: the cache holds base + num_kept tokens."""
        if step.num_drafts:
            with self.stats.phase("rollback"):
                roll_back(self.target, step.rows, num_kept, step.snapshot)

    # -- commit

    def _commit(self, step: Step) -> None:
        with self.stats.phase("catch_up"):
            self._tell(step.rows[: len(step.drawn)], step.hidden, step.base)

    def _tell(self, token_ids: Sequence[int], hidden: np.ndarray | None, start: int) -> None:
        begins_anew = start == 0 and bool(self._committed)
        del self._committed[start:]
        self._committed.extend(token_ids)
        if self.dropped:
            return
        try:
            if begins_anew:
                self._speculator.reset()
            self._speculator.commit(token_ids, hidden, start)
        except DRAFTER_FAULTS as error:
            self._drop(error)

    def _drop(self, error: BaseException) -> None:
        name = self._speculator.traits.name
        log.warning("drafter %s dropped", name, exc_info=error)
        reason = str(error) or type(error).__name__
        self.dropped = f"{name} stopped drafting: {reason}"

    # -- accounting

    def _account(self, step: Step, draft_ms: float, rest_ms: float) -> None:
        if step.num_drafts:
            self.stats.count_verify(step.num_drafts, step.num_accepted)
        else:
            self.stats.count_plain(is_parked=step.is_parked)
        log.debug("%s governor=%s", step, self.governor_state)
        try:
            self._teach(step, draft_ms, rest_ms)
        except DRAFTER_FAULTS as error:
            self._drop(error)

    def _teach(self, step: Step, draft_ms: float, rest_ms: float) -> None:
        """Tell the window what the rows cost and brought, the governor what the whole step did.

        A head that drafts and then verifies nothing has paid for its passes, not for a dear row.
        """
        self.stats.num_right += step.num_right
        if self._costs is not None:
            self._costs.costs.record(len(step.rows), rest_ms)
            probs = step.proposal.prefix_probs
            self._costs.acceptance.record(probs, step.num_judged, step.num_right)
        if self.governor is None:
            return
        if step.role is Role.SPECULATIVE:
            ms = draft_ms + rest_ms
            self.governor.record_speculative(StepSample(ms, len(step.drawn), step.num_accepted))
        elif step.role is Role.BASELINE:
            self.governor.record_plain(rest_ms)
