"""A deterministic little model without weights, with caches that refuse what real ones cannot do.

The logits of a row are a hash of every token its cache can see, so a wrong cache changes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from backends.base import BackendCaps, BackendError, RowOutput, Segment
from engine.commands import LoadModel, Message, SubmitTurn
from engine.contracts import LoadedModel
from engine.engine import InferenceEngine
from engine.events import EngineEvent, TextDelta, TurnFailed, TurnFinished
from engine.options import EngineOptions
from engine.sampling_params import SamplingParams
from engine.speculative.options import SpeculationOptions
from engine.speculative.registry import SpeculatorRegistry
from engine.speculative.target import TargetTraits

BOS, EOS, USER, ASSISTANT, SYSTEM, END = 256, 257, 258, 259, 260, 261
VOCAB = 264
NAMES = {BOS: b"<bos>", EOS: b"<eos>", USER: b"<u>", ASSISTANT: b"<a>", SYSTEM: b"<s>", END: b"<e>"}
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
E = TypeVar("E")
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SpeculationOptions(is_enabled=False)


class ByteTokenizer:
    """One token per byte, and a few control tokens."""

    eog_ids = frozenset({EOS, END})
    bos_id = BOS
    adds_bos = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def piece(self, token_id: int, *, with_control: bool = False) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return NAMES.get(token_id, b"") if with_control else b""


class FakeTemplate:
    """<s>system<e><u>user<e><a>answer<e>...; may open the answer with text it later leaves out."""

    has_thinking_switch = False

    def __init__(self, opening: str = "") -> None:
        self._opening = list(opening.encode())

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> list[int]:
        marks = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
        ids = [BOS]
        for message in messages:
            ids += [marks[message.role], *message.content.encode(), END]
        return ids + ([ASSISTANT, *self._opening] if add_generation_prompt else [])


class FakeClock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class LinearCache:
    """Keeps every position; rewinds anywhere."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._states = [1]

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.ids)

    def ensure_capacity(self, length: int) -> None:
        pass

    def can_rewind_to(self, length: int) -> bool:
        return 0 <= length <= self.length

    def rewind_to(self, length: int) -> None:
        if not self.can_rewind_to(length):
            raise BackendError(f"cannot rewind from {self.length} to {length}")
        del self.ids[length:], self._states[length + 1 :]

    def clone(self) -> LinearCache:
        copy = type(self)()
        copy.ids, copy._states = list(self.ids), list(self._states)
        return copy

    def append(self, token_id: int) -> None:
        self.ids.append(token_id)
        self._states.append(_fold(self._states[-1], token_id))

    def begin_forward(self) -> None:
        pass

    def state(self) -> int:
        return self._states[-1]

    def export_state(self) -> Mapping[str, np.ndarray]:
        return {"ids": np.array(self.ids, dtype=np.int64)}

    def import_state(self, state: Mapping[str, np.ndarray], length: int) -> None:
        ids = state["ids"]
        if ids.shape != (length,):
            raise BackendError(f"an export of {len(ids)} tokens is not one of {length}")
        self.rewind_to(0)
        for token_id in ids:
            self.append(int(token_id))


class RingCache(LinearCache):
    """Sees the last `window` tokens and can give back `slack` evicted ones."""

    window, slack = 24, 16

    def __init__(self) -> None:
        super().__init__()
        self.oldest = 0

    def can_rewind_to(self, length: int) -> bool:
        if length == 0:
            return True
        return length <= self.length and max(0, length - self.window) >= self.oldest

    def rewind_to(self, length: int) -> None:
        super().rewind_to(length)
        if length == 0:
            self.oldest = 0

    def append(self, token_id: int) -> None:
        super().append(token_id)
        self.oldest = max(self.oldest, self.length - self.window - self.slack)

    def clone(self) -> RingCache:
        copy = cast("RingCache", super().clone())
        copy.oldest = self.oldest
        return copy

    def state(self) -> int:
        first = max(0, self.length - self.window)
        assert first >= self.oldest, "read a position that was evicted"
        state = 1
        for token_id in self.ids[first:]:
            state = _fold(state, token_id)
        return state ^ self.length

    def import_state(self, state: Mapping[str, np.ndarray], length: int) -> None:
        super().import_state(state, length)
        self.oldest = max(0, length - self.window)


class RecurrentCache(LinearCache):
    """Folds every token into one state; can go back only within its last forward, or to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.floor = 0

    def begin_forward(self) -> None:
        self.floor = self.length

    def can_rewind_to(self, length: int) -> bool:
        return length == 0 or self.floor <= length <= self.length

    def rewind_to(self, length: int) -> None:
        super().rewind_to(length)
        self.floor = min(self.floor, length)

    def clone(self) -> RecurrentCache:
        copy = cast("RecurrentCache", super().clone())
        copy.floor = self.length
        return copy


def _fold(state: int, token_id: int) -> int:
    state = (state ^ token_id + 1) * _MIX & _MASK
    return state ^ state >> 29


@lru_cache(maxsize=10_000)
def _noise(state: int) -> np.ndarray:
    return np.random.default_rng(state).normal(scale=3.0, size=VOCAB).astype(np.float32)


@dataclass
class FakeExecutable:
    """Forwards rows; counts them; fails when told to."""

    make_cache: Callable[[], LinearCache] = LinearCache
    period: int = 0
    """Greater than 0 repeats one alphabet: a model that drafts well from its own text."""
    eos_bias: float = -20.0
    is_chunk_independent: bool = True
    device: str = "fake device"
    arithmetic: str = "fake"
    fail_at: int | None = None
    """Number of the forward that raises."""
    fails_half_way: bool = False
    """A broken backend: rows stay in the cache when it raises."""
    error: Exception = field(default_factory=lambda: BackendError("the device is gone"))
    num_forwards: int = 0
    num_rows: int = 0
    num_logit_rows: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    on_forward: Callable[[], None] = lambda: None
    is_closed: bool = False
    weight_bytes: int = 1000
    notices: list[str] = field(default_factory=list)
    cache_bytes_per_token: int = 8
    free_bytes: int = 1 << 34

    @property
    def caps(self) -> BackendCaps:
        return BackendCaps(
            "fake", self.device, self.arithmetic, True, self.is_chunk_independent, 64
        )

    def new_cache(self) -> LinearCache:
        return self.make_cache()

    def forward(
        self, segments: Sequence[Segment], *, want_logits: str = "all", want_hidden: bool = False
    ) -> RowOutput:
        assert not self.is_closed, "forward after close"
        self.on_forward()
        self.num_forwards += 1
        fails = self.num_forwards == self.fail_at
        if fails and not self.fails_half_way:
            raise self.error
        assert sum(len(s.token_ids) for s in segments) <= self.caps.max_rows
        rows, hidden = [], []
        for segment in segments:
            cache = segment.cache
            cache.begin_forward()
            for i, token_id in enumerate(segment.token_ids):
                cache.append(token_id)
                is_last = i == len(segment.token_ids) - 1
                if want_logits == "all" or (want_logits == "last" and is_last):
                    rows.append(self.logits(cache))
                hidden.append(np.full(4, cache.state() % 97, dtype=np.float32))
        if fails:
            raise self.error
        self.shapes.append(tuple(len(s.token_ids) for s in segments))
        self.num_rows += sum(self.shapes[-1])
        self.num_logit_rows += len(rows)
        logits = np.stack(rows) if rows else None
        best = None if logits is None else logits.argmax(axis=1).astype(np.int32)
        return RowOutput(logits, np.stack(hidden) if want_hidden else None, best)

    def logits(self, cache: LinearCache) -> np.ndarray:
        row = _noise(cache.state()).copy()
        row[256:] += self.eos_bias
        if self.period:
            row[97 + cache.length % self.period] += 30.0
        return row

    def close(self) -> None:
        self.is_closed = True


def fake_model(executable: FakeExecutable | None = None, **changes: object) -> LoadedModel:
    """A loaded model over the fake executable."""
    fields: dict[str, object] = {
        "name": "tiny",
        "architecture": "fake",
        "quantization": "F32",
        "num_parameters": 1,
        "content_hash": "c0ffee",
        "executable": executable or FakeExecutable(),
        "traits": TargetTraits(),
        "tokenizer": ByteTokenizer(),
        "template": FakeTemplate(),
        "max_context_len": 4096,
        "vocab_size": VOCAB,
    }
    return LoadedModel(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class FakeLoader:
    """Hands out a model, or raises when it is read or placed."""

    model: LoadedModel = field(default_factory=fake_model)
    error: Exception | None = None
    place_error: Exception | None = None
    freed_bytes: int = 0
    """What the engine said it would give back."""

    def check(
        self,
        path: Path,
        *,
        name: str,
        speculation: object,
        progress: Callable[[str, float], None],
        freed_bytes: int = 0,
    ) -> FakeLoader:
        progress("reading", 0.0)
        self.freed_bytes = freed_bytes
        if self.error:
            raise self.error
        return self

    def place(self) -> LoadedModel:
        if self.place_error:
            raise self.place_error
        return self.model


def of_type(events: Sequence[EngineEvent], kind: type[E]) -> list[E]:
    """The events of one kind."""
    return [event for event in events if isinstance(event, kind)]


class EngineRig:
    """A synchronous engine over the fake model, with every event it reported."""

    def __init__(
        self,
        executable: FakeExecutable | None = None,
        *,
        model: LoadedModel | None = None,
        speculation: SpeculationOptions = PLAIN,
        context_len: int | None = None,
        system_prompt: str = "",
        registry: SpeculatorRegistry | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.events: list[EngineEvent] = []
        self.model = model or fake_model(executable or FakeExecutable())
        self.executable = cast("FakeExecutable", self.model.executable)
        if isinstance(self.model.executable, FakeExecutable):
            self.executable.on_forward = self._pass_time
        self.loader = FakeLoader(self.model)
        self.engine = InferenceEngine(
            self.loader,
            self.events.append,
            clock=self.clock,
            registry=registry,
            options=options,
        )
        self.engine.apply(
            LoadModel(
                Path("tiny.gguf"),
                "tiny",
                context_len=context_len,
                speculation=speculation,
                system_prompt=system_prompt,
            )
        )
        self._num_turns = 0

    def submit(self, prompt: object, chat_id: str = "chat", **fields: object) -> str:
        """Queue a turn; its request id. A list is taken as (role, content) pairs."""
        if isinstance(prompt, list):
            prompt = tuple(Message(role, content) for role, content in prompt)
        self._num_turns += 1
        request_id = f"turn-{self._num_turns}"
        settings: dict[str, object] = {"sampling": GREEDY, "max_tokens": 12, **fields}
        self.engine.apply(SubmitTurn(request_id, chat_id, prompt, **settings))  # type: ignore[arg-type]
        return request_id

    def run(self, num_steps: int | None = None) -> None:
        """Step until idle, background work included, or so many times."""
        left = num_steps
        while (left is None or left > 0) and self._step():
            left = None if left is None else left - 1

    def _step(self) -> bool:
        return self.engine.step() or self.engine.work_in_background()

    def _pass_time(self) -> None:
        self.clock.now += 0.01

    def ask(self, prompt: object, chat_id: str = "chat", **fields: object) -> TurnFinished:
        """Submit a turn and run it to its end."""
        request_id = self.submit(prompt, chat_id, **fields)
        self.run()
        return self.finished(request_id)

    def finished(self, request_id: str) -> TurnFinished:
        """How a turn ended; fails the test when it did not."""
        ends = [e for e in of_type(self.events, TurnFinished) if e.request_id == request_id]
        assert len(ends) == 1, [e for e in self.events if not isinstance(e, TextDelta)]
        deltas = [e.text for e in of_type(self.events, TextDelta) if e.request_id == request_id]
        assert "".join(deltas) == ends[0].text
        return ends[0]

    def failed(self, request_id: str) -> TurnFailed:
        """How a turn failed; fails the test when it did not."""
        (end,) = (e for e in of_type(self.events, TurnFailed) if e.request_id == request_id)
        return end

    def check_holder(self, prompt_ids: Sequence[int], end: TurnFinished) -> None:
        """The COLD check: the chat's cache holds prompt and answer but its last token."""
        holder = self.engine.holder(end.chat_id)
        assert holder is not None
        assert holder.token_ids == [*prompt_ids, *end.token_ids[:-1]]
        assert holder.is_intact
        fresh = self.executable.make_cache()
        for token_id in holder.token_ids:
            fresh.append(token_id)
        assert holder.cache.state() == fresh.state()  # type: ignore[attr-defined]
