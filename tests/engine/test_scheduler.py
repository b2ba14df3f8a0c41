"""Who runs, who prefills next, and when a turn may draft."""

from __future__ import annotations

from engine.commands import SubmitTurn
from engine.planner import plan
from engine.prompt import Prompt
from engine.request import Request, RequestState
from engine.scheduler import Scheduler
from tests.engine.fakes_engine import GREEDY, FakeClock, fake_model

MODEL = fake_model()


def _request(name: str, chat_id: str | None = None, state: str = "waiting") -> Request:
    request = Request(
        SubmitTurn(name, chat_id or name, (1, 2), GREEDY),
        Prompt((1, 2)),
        MODEL,
        context_len=100,
        clock=FakeClock(),
        emit=lambda event: None,
    )
    request.state = RequestState(state)
    return request


def _scheduler(*requests: Request, max_running: int = 4) -> Scheduler:
    scheduler = Scheduler(max_running=max_running)
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_the_oldest_waiting_turn_starts_first() -> None:
    first, second = _request("a"), _request("b")
    assert _scheduler(first, second).next_to_start(lambda _: True) is first


def test_a_chat_that_answers_lets_its_next_turn_wait_and_others_pass() -> None:
    running = _request("a1", "a", "decoding")
    again, other = _request("a2", "a"), _request("b")
    assert _scheduler(running, again, other).next_to_start(lambda _: True) is other


def test_no_more_turns_run_than_allowed() -> None:
    running = [_request(str(n), state="decoding") for n in range(2)]
    scheduler = _scheduler(*running, _request("new"), max_running=2)
    assert scheduler.next_to_start(lambda _: True) is None


def test_nobody_slips_past_a_turn_that_waits_for_memory() -> None:
    running, big, small = _request("r", state="decoding"), _request("big"), _request("small")
    scheduler = _scheduler(running, big, small)
    assert scheduler.next_to_start(lambda request: request is small) is None
    scheduler.remove(running)
    assert scheduler.next_to_start(lambda _: False) is big


def test_prompts_are_forwarded_in_turns() -> None:
    a, b, c = (_request(name, state="prefilling") for name in "abc")
    scheduler = _scheduler(a, b, c)
    assert [scheduler.next_to_prefill() for _ in range(4)] == [a, b, c, a]
    scheduler.remove(a)
    assert scheduler.next_to_prefill() is b
    b.state = RequestState.DECODING
    assert scheduler.next_to_prefill() is c


def test_s46_only_a_turn_alone_in_the_engine_drafts() -> None:
    lone = _request("a", state="decoding")
    assert plan(_scheduler(lone), may_speculate=True).speculate is lone
    for state in ("waiting", "prefilling", "decoding"):
        company = _scheduler(lone, _request("b", state=state))
        step = plan(company, may_speculate=True)
        assert step.speculate is None
        assert lone in step.decode


def test_a_declined_turn_and_a_switched_off_engine_decode_plainly() -> None:
    lone = _request("a", state="decoding")
    assert plan(_scheduler(lone), may_speculate=False).decode == (lone,)
    lone.decline = "nothing to draft with"
    assert plan(_scheduler(lone), may_speculate=True).decode == (lone,)


def test_a_drafter_may_look_on_only_when_the_prompt_is_alone() -> None:
    lone = _request("a", state="prefilling")
    assert plan(_scheduler(lone), may_speculate=True).may_arm
    assert not plan(_scheduler(lone, _request("b")), may_speculate=True).may_arm
