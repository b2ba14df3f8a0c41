"""What the engine and the models may ask of a backend, and how a backend fails.

Array kinds never leave a backend: logits and hidden rows come out as numpy float32, everything
else stays where the backend keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from backends.program import Program

LoadProgress = Callable[[float], None]
"""Called with the share done, 0 to 1."""


class BackendError(Exception):
    """A backend could not do what was asked; `hint` says what a person can do."""

    kind: ClassVar[Literal["failure", "bad_model", "does_not_fit"]] = "failure"
    """Decides the exit code, as the kinds of the engine's errors do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class BackendUnavailable(BackendError):
    """This backend cannot run here (no device, no library)."""


class UnsupportedWeight(BackendError):
    """A weight has a type or shape this backend has no kernel for; names tensor and type."""

    kind = "bad_model"


class OutOfDeviceMemory(BackendError):
    """Weights or cache do not fit; the message carries both numbers in bytes."""

    kind = "does_not_fit"


@dataclass(frozen=True, slots=True)
class BackendCaps:
    """What an executable promises."""

    name: str
    """native, torch-cpu, torch-cuda, mlx, reference."""
    device: str
    """A person's name for the device and the instruction set in use."""
    arithmetic: str
    """Names what decides the bits of a cache, and nothing else: stored caches are kept by it."""
    is_row_independent: bool
    """A row's bits do not depend on how many rows are forwarded with it (ledger S70)."""
    is_chunk_independent: bool
    """Prefill gives the same bits as row-by-row decoding, whatever the chunk boundaries."""
    max_rows: int
    """Most rows of one `forward`; longer prompts are cut into chunks by the caller."""


class Cache(Protocol):
    """One chat's keys, values and recurrent state on a backend. Knows no token ids.

    Every method that changes the cache says so under State.
    """

    @property
    def length(self) -> int:
        """Valid positions, in tokens."""

    @property
    def num_bytes(self) -> int:
        """Memory held, capacity included."""

    def ensure_capacity(self, length: int) -> None:
        """Make room for `length` tokens.

        State: capacity only. Raises: OutOfDeviceMemory; the cache is then unchanged.
        """

    def can_rewind_to(self, length: int) -> bool:
        """Whether `rewind_to(length)` is exact (a ring or recurrent state may have moved on).

        What has moved on stays so: below a length that is not exact only 0 is.
        """

    def rewind_to(self, length: int) -> None:
        """Drop every position >= length. State: length, ring, recurrent state.

        Raises: BackendError where `can_rewind_to` is false; the cache is then unchanged.
        """

    def clone(self) -> Cache:
        """An independent copy that shares no buffer.

        State: self unchanged. Raises: OutOfDeviceMemory.
        """

    def export_state(self) -> Mapping[str, np.ndarray]:
        """Valid contents in logical order, for tests and for saving. State: unchanged.

        Keys `k.<slot>` and `v.<slot>` [n, G, D] in the stored type, window slots the last n only;
        `positions.<slot>` [n] int64. Raises: OutOfDeviceMemory, MemoryError.
        """

    def import_state(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Replace the contents by an export of a cache of the same program. State: everything.

        Raises: OutOfDeviceMemory; BackendError on a shape or type that does not fit. The cache is
                then unchanged.
        """


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one chat in a forward: appended at `cache.length`, in order."""

    token_ids: Sequence[int]
    cache: Cache


def check_token_ids(segments: Sequence[Segment], vocab_size: int) -> None:
    """Raises: BackendError naming the first id that no row of the vocabulary belongs to."""
    for segment in segments:
        for token_id in segment.token_ids:
            if not 0 <= token_id < vocab_size:
                raise BackendError(
                    f"token {token_id} is not in the vocabulary of {vocab_size} tokens"
                )


def check_given(
    program: Program, segments: Sequence[Segment], hidden: np.ndarray | None
) -> np.ndarray | None:
    """The hidden rows a drafter's forward is given; None for a program that takes none.

    Shapes: float32 [R, program.given_size].
    Raises: BackendError when they are missing or misfit, or where a program that only reads
            meets a cache with nothing in it.
    """
    if not program.grows_cache and any(segment.cache.length == 0 for segment in segments):
        raise BackendError("a drafter cannot look at an empty cache")
    if not program.given_size:
        return None
    shape = (sum(len(segment.token_ids) for segment in segments), program.given_size)
    if hidden is None or hidden.shape != shape:
        found = "none" if hidden is None else hidden.shape
        raise BackendError(f"a drafter needs hidden rows {shape}, got {found}")
    return hidden.astype("float32", order="C", copy=False)


@dataclass(frozen=True, slots=True)
class RowOutput:
    """Results of a forward. Arrays are the executable's own and valid until its next forward."""

    logits: np.ndarray | None
    """float32 [rows wanted, V], segments in order; None when none were wanted."""
    hidden: np.ndarray | None
    """float32 [R, E] of every row, post final norm; None when not wanted."""
    argmax: np.ndarray | None = None
    """int32 [rows wanted], first largest logit of each, where the backend finds it on the way."""

    def best_of(self, row: int) -> int | None:
        """The first largest logit's id of one of the wanted rows, where it is known."""
        return None if self.argmax is None else int(self.argmax[row])


WantLogits = Literal["all", "last", "none"]
"""Of every row, of the last row of each segment, or of none."""


def wanted_rows(segments: Sequence[Segment], want_logits: WantLogits) -> Sequence[int]:
    """Rows of a forward whose logits are wanted, in order; a range where it is every row."""
    ends = list(accumulate(len(segment.token_ids) for segment in segments))
    match want_logits:
        case "all":
            return range(ends[-1])
        case "last":
            return [end - 1 for end in ends]
        case "none":
            return []


class Executable(Protocol):
    """A program with its weights on a device."""

    notices: list[str]
    """What a person may want to know about the placing, one sentence each."""

    @property
    def caps(self) -> BackendCaps:
        """What this executable promises."""

    @property
    def weight_bytes(self) -> int:
        """Memory the weights take on the device."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory one token takes in the slots that keep every position."""

    @property
    def free_bytes(self) -> int:
        """Memory that is free now where its caches lie."""

    def new_cache(self) -> Cache:
        """An empty cache."""

    def forward(
        self,
        segments: Sequence[Segment],
        *,
        want_logits: WantLogits = "all",
        want_hidden: bool = False,
        hidden: np.ndarray | None = None,
    ) -> RowOutput:
        """Append each segment's tokens to its cache and compute the wanted rows in one pass.

        Shapes: R = total tokens <= caps.max_rows; logits [rows wanted, V] float32; `hidden`
                [R, program.given_size] float32, for a drafter.
        State:  each cache grows by its segment's tokens, a drafter's by none; nothing changes
                when it raises.
        Raises: OutOfDeviceMemory, BackendError.
        """

    def close(self) -> None:
        """Release the weights; using the executable afterwards is a bug."""


class Backend(Protocol):
    """A way to run programs on this machine."""

    @property
    def name(self) -> str:
        """The name shown by `doctor`."""

    def placed_bytes(self, program: Program) -> int:
        """Main memory that placing a program's weights takes; 0 where they lie elsewhere."""

    def compile(
        self,
        program: Program,
        *,
        progress: LoadProgress | None = None,
        reads: Executable | None = None,
    ) -> Executable:
        """Put a program's weights into the layout the kernels want.

        `reads`: for a drafter, its target's executable, whose caches it looks at and whose
        weights it may share.
        Raises: UnsupportedWeight, OutOfDeviceMemory.
        """


@runtime_checkable
class JudgesRoom(Protocol):
    """A backend that knows its own memory: a device's, or that of several backends."""

    def check_room(self, program: Program, cache_bytes: int, freed_bytes: int) -> None:
        """As the function `check_room`. Raises: OutOfDeviceMemory, UnsupportedWeight."""


def check_room(backend: Backend, program: Program, cache_bytes: int, freed_bytes: int) -> None:
    """Asked before the model in use goes: whether weights and caches will fit where it lay.

    `freed_bytes` is what it will give back. Backends that know no better are in main memory.
    Raises: OutOfDeviceMemory, UnsupportedWeight.
    """
    if isinstance(backend, JudgesRoom):
        backend.check_room(program, cache_bytes, freed_bytes)
        return
    needed, free = backend.placed_bytes(program) + cache_bytes, available_bytes() + freed_bytes
    if needed > free:
        raise OutOfDeviceMemory(
            f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB of memory are available",
            hint="close other programs, or use a smaller model or quantization",
        )


def available_bytes() -> int:
    """Main memory that can be taken without swapping."""
    import psutil  # deferred: 20 ms that only a load needs

    return int(psutil.virtual_memory().available)
