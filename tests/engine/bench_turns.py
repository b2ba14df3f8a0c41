"""The four bench turns on a real model with told step costs; run by hand.

    python -m tests.engine.bench_turns MODEL.gguf [row share of a plain step, 0.12]

The tokens are the model's own, the clock is not: a forward of R rows takes 10 (1 + share (R - 1))
ms. So policies can be compared to the percent on a machine that is busy with other things.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from backends.base import RowOutput, WantLogits
from engine.cache.holder import Holder
from engine.commands import Message
from engine.contracts import LoadedModel
from engine.speculative.execution import SpeculativeExecution
from engine.speculative.options import SpeculationOptions
from engine.speculative.registry import default_registry
from engine.speculative.runtime import SpeculationRuntime
from engine.speculative.speculator import Decline
from engine.speculative.trunk import Trunk
from tests.engine.fakes_speculative import FakeClock, Turn

PROMPTS = Path(__file__).parents[2] / "assets" / "bench_prompts"
LENGTHS = {"one_word": 16, "prose": 160, "quote_file": 200, "quote_answer": 200}
PLAIN_MS = 10.0


class TimedTrunk(Trunk):
    """A trunk whose forwards take told time."""

    clock: FakeClock
    row_share: float

    def forward_rows(
        self,
        token_ids: Sequence[int],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
    ) -> RowOutput:
        self.clock.advance_ms(PLAIN_MS * (1 + self.row_share * (len(token_ids) - 1)))
        return super().forward_rows(token_ids, want_hidden=want_hidden, want_logits=want_logits)


class Chat:
    """One conversation on one holder, decoded with speculation and timed by told costs."""

    def __init__(self, model: LoadedModel, runtime: SpeculationRuntime, clock: FakeClock) -> None:
        self.model, self.runtime, self.clock = model, runtime, clock
        self.messages: list[Message] = []
        self.execution: SpeculativeExecution | None = None

    def run(self, trunk: TimedTrunk, prompt: str, max_tokens: int) -> tuple[float, int]:
        """Simulated milliseconds of decoding, and tokens after the first one."""
        self.messages.append(Message("user", prompt))
        assert self.model.template is not None
        ids = self.model.template.encode(self.messages)
        turn = Turn(ids, stop_ids=list(self.model.tokenizer.eog_ids), max_tokens=max_tokens)
        keep = min(trunk.holder.common_len(ids), len(ids) - 1)
        trunk.rewind_to(keep)
        logits = None
        for start in range(keep, len(ids), 256):
            logits = trunk.forward_rows(ids[start : start + 256]).logits
        assert logits is not None
        token_id = turn.draw(logits[-1], len(ids))
        execution = self._armed(trunk)
        execution.seed_committed(trunk.holder.token_ids)
        began = self.clock.now
        while not turn.is_over:
            assert token_id is not None
            token_id = execution.step(token_id, turn.num_remaining, turn.draw)[-1]
        text = b"".join(self.model.tokenizer.piece(i) for i in turn.emitted)
        self.messages.append(Message("assistant", text.decode(errors="replace")))
        return (self.clock.now - began) * 1e3, len(turn.emitted) - 1

    def _armed(self, trunk: TimedTrunk) -> SpeculativeExecution:
        if self.execution is None:
            armed = self.runtime.arm(trunk, max_tokens=99)
            assert not isinstance(armed, Decline)
            self.execution = armed
        else:
            self.execution.begin_turn()
        return self.execution


def bench(model: LoadedModel, row_share: float, options: SpeculationOptions) -> list[str]:
    clock = FakeClock()
    runtime = SpeculationRuntime(
        default_registry(), model.traits, None, options=options, clock=clock
    )
    cells = []
    for _ in range(2):  # the second chat finds governor and costs warm
        chat = Chat(model, runtime, clock)
        trunk = TimedTrunk(
            Holder(model.executable),
            model.traits,
            vocab_size=model.vocab_size,
            max_context_len=model.max_context_len,
        )
        trunk.clock, trunk.row_share = clock, row_share
        for name, num in LENGTHS.items():
            ms, num_tokens = chat.run(trunk, (PROMPTS / f"{name}.txt").read_text().strip(), num)
            gain = num_tokens * PLAIN_MS / ms if ms else 1.0
            assert chat.execution is not None
            stats = chat.execution.stats
            cells.append(
                f"{name:13} {gain:5.2f}x  {stats.draft_n_accepted}/{stats.draft_n} in "
                f"{stats.verify_steps} verifies, {stats.plain_steps} plain "
                f"({stats.parked_steps} parked)  {chat.execution.governor_line}"
            )
    return cells


def main() -> None:
    from backends.select import select_backend
    from models.loader import Loader

    path = Path(sys.argv[1])
    row_share = float(sys.argv[2]) if len(sys.argv) > 2 else 0.12
    loader = Loader(lambda: select_backend("auto"))
    options = SpeculationOptions()
    model = loader(path, name=path.stem, speculation=options, progress=lambda *_: None)
    for label, used in {
        "adaptive": options,
        "window 8": SpeculationOptions(window=8),
        "forced 8": SpeculationOptions(window=8, use_governor=False),
    }.items():
        print(label)  # noqa: T201
        for line in bench(model, row_share, used):
            print("  " + line)  # noqa: T201


if __name__ == "__main__":
    main()
