"""Several chats at once: aggregate rate and first token, drafting on and off (ledger S63).

The events are stamped by the caller as they are read; nothing here sleeps by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from engine.bench import GREEDY
from engine.commands import Message, SubmitTurn
from engine.events import EngineEvent, TurnFinished

NUM_CHATS = (1, 2, 4)
STAGGERS_MS = (0, 600)
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table: so many chats, so far apart, in one mode."""

    num_chats: int
    stagger_ms: int
    is_speculative: bool


@dataclass(frozen=True, slots=True)
class CellResult:
    """What one run of a cell gave."""

    cell: Cell
    tok_s: float
    """Emitted tokens of all chats over the time from the first submit to the last finish, /s."""
    ttft_ms: float
    """Median time to first token over the chats."""
    token_ids: tuple[tuple[int, ...], ...]


def turns_of(cell: Cell, prompts: Sequence[str], run: str) -> list[SubmitTurn]:
    """One turn per chat, each with its own prompt."""
    return [
        SubmitTurn(
            request_id=f"{run}-{i}",
            chat_id=f"{run}-{i}",
            prompt=(Message("user", prompts[i % len(prompts)]),),
            sampling=GREEDY,
            max_tokens=MAX_TOKENS,
        )
        for i in range(cell.num_chats)
    ]


def run_cell(
    cell: Cell,
    turns: Sequence[SubmitTurn],
    *,
    submit: Callable[[SubmitTurn], None],
    next_event: Callable[[], EngineEvent],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> CellResult:
    """Submit the turns, `stagger_ms` apart, and wait until all have finished."""
    finished: dict[str, TurnFinished] = {}
    start = clock()
    for number, turn in enumerate(turns):
        if number:
            sleep(cell.stagger_ms / 1e3)
        submit(turn)
    while len(finished) < len(turns):
        event = next_event()
        if isinstance(event, TurnFinished):
            finished[event.request_id] = event
    seconds = clock() - start
    ordered = [finished[turn.request_id] for turn in turns]
    return CellResult(
        cell=cell,
        tok_s=sum(len(turn.token_ids) for turn in ordered) / seconds,
        ttft_ms=median(turn.stats.ttft_ms for turn in ordered),
        token_ids=tuple(turn.token_ids for turn in ordered),
    )


def cells() -> list[tuple[int, int]]:
    """(chats, stagger in ms) of the table."""
    return [(n, stagger) for n in NUM_CHATS for stagger in STAGGERS_MS if n > 1 or stagger == 0]
