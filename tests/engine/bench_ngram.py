"""Accepted tokens per verify of look-up policies on recorded texts; run by hand.

    python -m tests.engine.bench_ngram [MODEL.gguf]

The text is replayed: each step drafts from what stands before, and the answer itself judges. `gain`
is the speed against plain decoding when a forward of R rows costs 1 + 0.1 (R - 1) plain steps. The
tokenizer is the model's; without a file, words and punctuation marks stand for tokens.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from engine.speculative.ngram import NgramIndex, NgramPolicy, NgramSpeculator
from engine.speculative.speculator import DraftContext
from engine.speculative.window import AdaptiveWindow
from tests.engine.recorded_texts import RECORDED

ROW_SHARE = 0.1
"""Cost of one more row, in plain steps."""


class Outcome:
    """Counters of one replayed answer."""

    def __init__(self) -> None:
        self.num_tokens = self.num_verifies = self.num_plain = 0
        self.num_accepted = self.num_right = 0
        self.cost = 0.0
        self.propose_us: list[float] = []

    @property
    def accepted_per_verify(self) -> float:
        return self.num_accepted / self.num_verifies if self.num_verifies else 0.0

    @property
    def gain(self) -> float:
        return self.num_tokens / self.cost


def replay(
    drafter: NgramSpeculator, prompt: Sequence[int], answer: Sequence[int], window: int | None
) -> Outcome:
    """Draft an answer that is known; `window` None chooses it per step."""
    out = Outcome()
    chooser = AdaptiveWindow()
    for num_rows in (1, 2, 3, 5, 9, 16):
        for _ in range(3):
            chooser.costs.record(num_rows, cost_of(num_rows))
    text = [*prompt, *answer]
    drafter.commit(prompt, None, 0)
    pos = len(prompt)  # text[pos] is the newest token, not committed yet
    while pos + 1 < len(text):
        limit = min(window or chooser.max_drafts, len(text) - pos - 2)
        drafts: Sequence[int] = ()
        if limit > 0:
            start = perf_counter()
            proposal = drafter.propose(DraftContext(text[pos], pos, limit, 0.0))
            out.propose_us.append((perf_counter() - start) * 1e6)
            drafts = proposal.token_ids
            if window is None:
                num = chooser.choose(
                    proposal.prefix_probs,
                    len(drafts),
                    num_right=out.num_right,
                    num_verifies=out.num_verifies,
                )
                drafts = drafts[:num]
        num = 0
        while num < len(drafts) and drafts[num] == text[pos + 1 + num]:
            num += 1
        drafter.commit(text[pos : pos + 1 + num], None, pos)
        if window is None and limit > 0:
            judged = proposal.token_ids[: len(drafts) + 1]
            right = num
            if num == len(drafts) < len(judged):
                right += judged[num] == text[pos + 1 + num]
            out.num_right += right
            chooser.acceptance.record(proposal.prefix_probs, min(len(judged), num + 1), right)
        pos += num + 1
        out.num_tokens += num + 1
        out.cost += cost_of(len(drafts) + 1)
        out.num_accepted += num
        if drafts:
            out.num_verifies += 1
        else:
            out.num_plain += 1
    return out


def cost_of(num_rows: int) -> float:
    return 1.0 + ROW_SHARE * (num_rows - 1)


def tokenize(path: str | None) -> Callable[[str], list[int]]:
    if path is not None:
        from models.gguf_file import GgufFile
        from models.tokenizer import GgufTokenizer

        return GgufTokenizer.from_gguf(GgufFile.open(Path(path))).encode
    known: dict[str, int] = {}
    return lambda text: [
        known.setdefault(word, len(known)) for word in re.findall(r" ?\w+|\s+|[^\w\s]", text)
    ]


class ExhaustiveIndex(NgramIndex):
    """Chooses among all places where the longest suffix stood."""

    def find(self, min_order: int) -> int | None:
        latest = super().find(min_order)
        if latest is None:
            return None
        ids, end = self.ids, len(self.ids)
        order = max(
            table.order
            for table in self._tables
            if table.order <= latest
            and ids[latest - table.order : latest] == ids[end - table.order :]
        )
        suffix = ids[end - order :]
        return self.choose([i for i in range(order, end) if ids[i - order : i] == suffix])

    def choose(self, places: list[int]) -> int:
        raise NotImplementedError


class FrequentIndex(ExhaustiveIndex):
    """The token that followed most often, at its latest place."""

    def choose(self, places: list[int]) -> int:
        counts = Counter(self.ids[i] for i in places)
        return max(places, key=lambda i: (counts[self.ids[i]], i))


class OldestIndex(ExhaustiveIndex):
    """The first place."""

    def choose(self, places: list[int]) -> int:
        return places[0]


def with_index(index: type[NgramIndex]) -> NgramSpeculator:
    drafter = NgramSpeculator()
    drafter._index = index(drafter.policy.orders)
    return drafter


class Unfollowing(NgramSpeculator):
    """Says nothing where no indexed suffix matches."""

    def _picked_up(self) -> int | None:
        return None


class Poolless(NgramSpeculator):
    """Forgets an answer that is written anew."""

    def _branch_off(self, live_len: int) -> None:
        super()._branch_off(live_len)
        self._index = NgramIndex(self.policy.orders)
        self._index.extend(self._live)


def with_policy(**changes: object) -> NgramSpeculator:
    return NgramSpeculator(policy=replace(NgramPolicy(), **changes))  # type: ignore[arg-type]


POLICIES: dict[str, Callable[[], NgramSpeculator]] = {
    "shipped": NgramSpeculator,
    "most frequent": lambda: with_index(FrequentIndex),
    "oldest": lambda: with_index(OldestIndex),
    "no follow": Unfollowing,
    "no pool": Poolless,
    "orders 2": lambda: with_policy(orders=(2,)),
    "orders 3": lambda: with_policy(orders=(3,)),
    "orders 3,2": lambda: with_policy(orders=(3, 2)),
    "orders 4,3,2": lambda: with_policy(orders=(4, 3, 2)),
    "orders 8,4,2": lambda: with_policy(orders=(8, 4, 2)),
    "orders 8,5,3": lambda: with_policy(orders=(8, 5, 3)),
    "orders 16,8,5,3": lambda: with_policy(orders=(16, 8, 5, 3)),
    "orders 16..2": lambda: with_policy(orders=(16, 8, 5, 3, 2)),
}


def main() -> None:
    encode = tokenize(sys.argv[1] if len(sys.argv) > 1 else None)
    for name, make in POLICIES.items():
        for window in (8, 15, None):
            cells = []
            for recorded in RECORDED:
                prompt, answer = encode(recorded.prompt), encode(recorded.answer)
                out = replay(make(), prompt, answer, window)
                cells.append(f"{recorded.kind} {out.accepted_per_verify:5.2f} {out.gain:4.2f}x")
            prompt, answer = encode(RECORDED[-1].prompt), encode(RECORDED[-1].answer)
            again = make()
            replay(again, prompt, answer, window)
            out = replay(again, prompt, answer, window)
            cells.append(f"regenerate {out.accepted_per_verify:5.2f} {out.gain:4.2f}x")
            print(f"{name:18} w={window or 'auto'!s:4} | " + " | ".join(cells))  # noqa: T201


if __name__ == "__main__":
    main()
