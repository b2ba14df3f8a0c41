"""Which turns run, in what order they prefill, and who is alone. Moves states, computes nothing."""

from __future__ import annotations

from collections.abc import Callable

from engine.request import Request, RequestState


class Scheduler:
    """The turns in the engine, oldest first."""

    def __init__(self, *, max_running: int) -> None:
        self._max_running = max_running
        self._requests: list[Request] = []
        self._last_prefilled: Request | None = None

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every turn that has not ended, oldest first."""
        return tuple(self._requests)

    @property
    def is_idle(self) -> bool:
        """Whether there is no turn at all."""
        return not self._requests

    @property
    def decoding(self) -> tuple[Request, ...]:
        """Turns past their prompt."""
        return self._in_state(RequestState.DECODING)

    @property
    def lone_request(self) -> Request | None:
        """The turn that is alone in the engine: nobody prefills or waits beside it (S46)."""
        return self._requests[0] if len(self._requests) == 1 else None

    def add(self, request: Request) -> None:
        """Queue a turn behind the others."""
        self._requests.append(request)

    def find(self, request_id: str) -> Request | None:
        """The turn of this id, or None when it is unknown or over."""
        return next((r for r in self._requests if r.turn.request_id == request_id), None)

    def remove(self, request: Request) -> None:
        """The turn is over."""
        self._requests.remove(request)
        if self._last_prefilled is request:
            self._last_prefilled = None

    def next_to_start(self, has_room: Callable[[Request], bool]) -> Request | None:
        """The oldest waiting turn that may begin now.

        A chat answers one turn at a time, and with something running a turn waits for memory.
        """
        running = [r for r in self._requests if r.state is not RequestState.WAITING]
        if len(running) >= self._max_running:
            return None
        busy = {r.turn.chat_id for r in running}
        for request in self._in_state(RequestState.WAITING):
            if request.turn.chat_id in busy:
                continue
            # No younger turn may slip past one that waits for memory, or that one could starve.
            return request if not running or has_room(request) else None
        return None

    def next_to_prefill(self) -> Request | None:
        """Whose chunk of prompt comes next: turn by turn, so that a long prompt delays nobody."""
        prefilling = self._in_state(RequestState.PREFILLING)
        if not prefilling:
            return None
        last = self._last_prefilled
        index = (prefilling.index(last) + 1) % len(prefilling) if last in prefilling else 0
        self._last_prefilled = prefilling[index]
        return prefilling[index]

    def _in_state(self, state: RequestState) -> tuple[Request, ...]:
        return tuple(request for request in self._requests if request.state is state)
