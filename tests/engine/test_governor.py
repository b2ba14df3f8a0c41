"""The cost governor, number by number, on told costs."""

from __future__ import annotations

import random

import pytest

from engine.speculative.governor import CostGovernor, GovernorPolicy, GovernorState, StepSample

PLAIN_MS = 10.0
WINNING = StepSample(ms=20.0, num_tokens=4, num_accepted=3)
LOSING = StepSample(ms=40.0, num_tokens=2, num_accepted=1)
MATCHLESS = StepSample(ms=12.0, num_tokens=1, num_accepted=0)


def measured() -> CostGovernor:
    """A governor with its baseline taken, at the start of its first probe."""
    governor = CostGovernor()
    for _ in range(governor.policy.baseline_steps):
        assert not governor.may_draft
        governor.record_plain(PLAIN_MS)
    assert governor.may_draft
    return governor


def probe(governor: CostGovernor, sample: StepSample) -> int:
    """Speculative steps until the probe ends."""
    num = 0
    while governor.state is GovernorState.PROBING and governor.may_draft:
        governor.record_speculative(sample)
        num += 1
    return num


def sit_out(governor: CostGovernor) -> int:
    """Plain steps until the park ends."""
    num = 0
    while governor.state is GovernorState.PARKED:
        assert not governor.may_draft
        governor.record_plain(PLAIN_MS)
        num += 1
    return num


def parked() -> CostGovernor:
    governor = measured()
    probe(governor, LOSING)
    return governor


def test_s33_loss_parks_and_win_holds() -> None:
    governor = measured()
    probe(governor, LOSING)
    assert governor.state is GovernorState.PARKED
    governor = measured()
    probe(governor, WINNING)
    assert governor.state is GovernorState.HOLDING
    assert governor.may_draft


def test_s34_probe_is_eight_steps_and_three_after_a_loss() -> None:
    governor = measured()
    assert probe(governor, LOSING) == 8
    sit_out(governor)
    assert probe(governor, LOSING) == 3


def test_s34_win_restores_the_full_probe() -> None:
    governor = parked()
    sit_out(governor)
    assert probe(governor, WINNING) == 3
    governor.count_interlude(64)  # the hold runs out without eight steps of its own
    for _ in range(3):
        governor.record_plain(PLAIN_MS)
    assert probe(governor, WINNING) == 8


def test_s35_parks_double_from_32_to_256() -> None:
    governor = measured()
    lengths = []
    for _ in range(6):
        probe(governor, LOSING)
        lengths.append(sit_out(governor))
    assert lengths == [32, 64, 128, 256, 256, 256]


def test_s35_new_request_caps_the_park_at_32_and_forgets_the_backoff() -> None:
    governor = measured()
    for _ in range(3):
        probe(governor, LOSING)
        sit_out(governor)
    probe(governor, LOSING)  # parks 256
    governor.begin_request()
    assert sit_out(governor) == 32
    assert probe(governor, LOSING) == 3  # one loss is remembered: the re-probe stays short
    assert sit_out(governor) == 32  # and parks 32, not 256


def test_s35_new_request_does_not_lengthen_a_park_that_is_nearly_over() -> None:
    governor = parked()
    for _ in range(30):
        governor.record_plain(PLAIN_MS)
    governor.begin_request()
    assert sit_out(governor) == 2


def test_s36_four_steps_in_a_row_that_accept_nothing_end_a_probe() -> None:
    governor = measured()
    governor.record_speculative(WINNING)
    assert probe(governor, StepSample(1.0, 1, 0)) == 4
    assert governor.state is GovernorState.PARKED
    assert governor.num_losses == 1


def test_s36_one_accepted_draft_starts_the_count_again() -> None:
    governor = measured()
    for sample in (MATCHLESS, MATCHLESS, MATCHLESS, WINNING, MATCHLESS, MATCHLESS, MATCHLESS):
        governor.record_speculative(sample)
        assert governor.state is GovernorState.PROBING


def test_s37_win_is_held_64_steps_then_three_plain_steps_refresh_the_baseline() -> None:
    governor = measured()
    probe(governor, WINNING)
    num = 0
    while governor.may_draft:
        governor.record_speculative(WINNING)
        num += 1
    assert num == 64
    num = 0
    while not governor.may_draft:
        governor.record_plain(PLAIN_MS)
        num += 1
    assert num == 3
    assert governor.state is GovernorState.HOLDING
    assert governor.num_wins == 2


def test_s37_refreshed_baseline_can_end_a_win() -> None:
    """The plain step became cheaper meanwhile: the last eight speculative steps now lose."""
    governor = measured()
    probe(governor, WINNING)
    while governor.may_draft:
        governor.record_speculative(WINNING)
    for _ in range(3):
        governor.record_plain(5.1)  # a speculative token takes 5 ms, too little of a gain
    assert governor.state is GovernorState.PARKED


def test_s37_last_eight_steps_that_lose_park_at_once() -> None:
    governor = measured()
    probe(governor, WINNING)
    for _ in range(20):
        governor.record_speculative(WINNING)
    num = 0
    while governor.state is GovernorState.HOLDING:
        governor.record_speculative(LOSING)
        num += 1
    assert num <= 8
    assert governor.state is GovernorState.PARKED


def test_s37_hold_does_not_judge_before_eight_steps() -> None:
    governor = measured()
    probe(governor, WINNING)
    for _ in range(7):
        governor.record_speculative(LOSING)
    assert governor.state is GovernorState.HOLDING


def test_s38_step_without_a_proposal_counts_as_a_speculative_token() -> None:
    """A head under its gate never filled the probe, so the head ran unparked on every step."""
    governor = measured()
    baseline = governor.plain_ms_per_token
    for _ in range(4):
        governor.record_speculative(MATCHLESS)
    assert governor.state is GovernorState.PARKED
    assert governor.plain_ms_per_token == baseline


def test_s39_parked_steps_feed_the_baseline_except_the_first_of_each_park() -> None:
    governor = parked()
    governor.record_plain(1000.0)  # pays the switch from the verify kernels
    assert governor.plain_ms_per_token == PLAIN_MS
    for _ in range(31):
        governor.record_plain(5.0)
    assert governor.plain_ms_per_token is not None
    assert 5.0 <= governor.plain_ms_per_token < 5.5


def test_s39_first_steps_of_several_parks_are_all_left_out() -> None:
    governor = parked()
    for _ in range(3):
        governor.record_plain(1000.0)
        governor.record_plain(PLAIN_MS)
        governor.wake()
        probe(governor, LOSING)
    assert governor.plain_ms_per_token == PLAIN_MS


def test_s39_speculative_steps_never_touch_the_baseline() -> None:
    governor = measured()
    for sample in (WINNING, StepSample(500.0, 1, 0), LOSING):
        governor.record_speculative(sample)
    assert governor.plain_ms_per_token == PLAIN_MS


def test_one_slow_plain_step_does_not_move_the_baseline() -> None:
    """A hiccup of the machine must not make drafting look like a win."""
    governor = parked()
    for ms in (10.0, 10.0, 10.0, 300.0, 10.0, 10.0):
        governor.record_plain(ms)
    assert governor.plain_ms_per_token == PLAIN_MS


def test_first_and_dearest_step_of_a_full_probe_do_not_decide() -> None:
    """The first verify warms kernels up, and one hiccup is no evidence."""
    governor = measured()
    for ms in (500.0, 20.0, 20.0, 300.0, 20.0, 20.0, 20.0, 20.0):
        governor.record_speculative(StepSample(ms, 4, 3))
    assert governor.state is GovernorState.HOLDING


def test_s40_line_reads_as_specified() -> None:
    governor = CostGovernor()
    assert governor.describe() == "plain=- spec=- wins=0 losses=0 parked=0"
    for _ in range(3):
        governor.record_plain(15.3)
    probe(governor, StepSample(58.2, 2, 1))
    sit_out(governor)
    probe(governor, StepSample(58.2, 2, 1))
    for _ in range(64):
        governor.record_plain(15.3)
    assert governor.describe() == "plain=15.3ms/tok spec=29.1ms/tok wins=0 losses=2 parked=96"


def test_s40_counts_start_again_with_each_request() -> None:
    governor = parked()
    sit_out(governor)
    governor.begin_request()
    assert "wins=0 losses=0 parked=0" in governor.describe()


def test_s47_interlude_counts_against_a_park_and_a_hold() -> None:
    governor = parked()
    governor.count_interlude(30)
    assert sit_out(governor) == 2
    governor = measured()
    probe(governor, WINNING)
    governor.count_interlude(64)
    assert not governor.may_draft  # the hold is over: the baseline is due


def test_s47_interlude_is_no_probe() -> None:
    governor = measured()
    governor.record_speculative(WINNING)
    governor.count_interlude(500)
    assert governor.state is GovernorState.PROBING
    assert probe(governor, WINNING) == 7


def test_wake_ends_a_park_with_a_short_probe() -> None:
    governor = parked()
    governor.record_plain(PLAIN_MS)
    governor.wake()
    assert governor.may_draft
    assert probe(governor, WINNING) == 3
    assert governor.state is GovernorState.HOLDING


def test_park_after_many_losses_ends_when_the_text_turns() -> None:
    """C4: 30 losing rounds, then winning ones: it drafts again within the longest park."""
    governor = measured()
    for _ in range(30):
        probe(governor, LOSING)
        sit_out(governor)
    assert governor.may_draft
    assert probe(governor, WINNING) == 3
    assert governor.state is GovernorState.HOLDING


@pytest.mark.parametrize("seed", range(20))
def test_random_costs_never_break_the_governor(seed: int) -> None:
    """Whatever it is told, it is in one of its states and a park ends within 256 steps."""
    rng = random.Random(seed)
    governor = CostGovernor(GovernorPolicy())
    num_plain_in_a_row = 0
    for _ in range(3000):
        if rng.random() < 0.01:
            governor.begin_request()
        if governor.may_draft:
            accepted = rng.randrange(4)
            governor.record_speculative(StepSample(rng.uniform(5, 60), accepted + 1, accepted))
            num_plain_in_a_row = 0
        else:
            governor.record_plain(rng.uniform(5, 20))
            num_plain_in_a_row += 1
        assert num_plain_in_a_row <= 256 + 3


def test_verdict_needs_a_margin_but_a_hold_does_not() -> None:
    """At the pivot a probe loses and a hold stays, so noise cannot make it flap."""
    pivot = StepSample(ms=PLAIN_MS * 2 * 0.98, num_tokens=2, num_accepted=1)
    governor = measured()
    probe(governor, pivot)
    assert governor.state is GovernorState.PARKED
    governor = measured()
    probe(governor, WINNING)
    for _ in range(30):
        governor.record_speculative(pivot)
    assert governor.state is GovernorState.HOLDING
