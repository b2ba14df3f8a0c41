"""`foretell bench peers`: the same file on the same machine, run in turns with other engines.

A peer lives in a process of its own, in any Python that has it: this one, or the one named by
FORETELL_PEER_PYTHON. A peer that is not installed is skipped, and that is said.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import psutil

from app.bench_report import MeasuredModel, prompts
from app.cli.flags import load_command
from app.cli.kept_runs import keep_run, say_tables
from app.cli.output import CommandFailed, note, say, say_json
from app.machine import machine_name
from app.settings import Settings
from app.wiring import Wiring
from backends.base import Executable, Segment
from engine.contracts import LoadedModel

PROMPT_LEN = 512
COUNT = 64
CONTEXT_LEN = 1024
VERIFY_ROWS = 8
ROWS_REPEAT = 9
_PROBE = "import llama_cpp, numpy"


@dataclass(frozen=True, slots=True)
class Figures:
    """One engine, one pass."""

    prefill_ms: float
    decode_tok_s: float
    row_ms: float
    """One-row step on top of the prompt."""
    verify_ms: float
    """Step of `VERIFY_ROWS` rows on top of the prompt."""
    token_ids: tuple[int, ...]


class PeerProcess:
    """A peer worker with a model loaded."""

    def __init__(self, python: str, path: Path, threads: int) -> None:
        worker = Path(__file__).with_name("peer_worker.py")
        self._process = subprocess.Popen(
            [python, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        options = {"path": str(path), "threads": threads, "context_len": CONTEXT_LEN}
        self.name: str = self._ask(options)["name"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def measure(self, prompt: list[int]) -> Figures:
        """One pass: prefill, greedy decode, one-row and many-row steps."""
        decoded = self._ask({"op": "decode", "prompt": prompt, "count": COUNT})
        rows = {
            count: self._ask(
                {"op": "rows", "prompt": prompt, "rows": count, "repeat": ROWS_REPEAT}
            )["step_ms"]
            for count in (1, VERIFY_ROWS)
        }
        return Figures(
            prefill_ms=decoded["prefill_ms"],
            decode_tok_s=(COUNT - 1) / decoded["decode_ms"] * 1e3,
            row_ms=rows[1],
            verify_ms=rows[VERIFY_ROWS],
            token_ids=tuple(decoded["token_ids"]),
        )

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "opened with a pipe"
        assert self._process.stdout is not None, "opened with a pipe"
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise CommandFailed("the peer's process ended", hint="see its message above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run_peers(args: argparse.Namespace, wiring: Wiring, settings: Settings) -> None:
    """Alternate our engine and the peer; report medians and the ratios' spread."""
    command = load_command(settings, wiring)
    python = wiring.environment.peer_python or sys.executable
    if subprocess.run([python, "-c", _PROBE], capture_output=True, check=False).returncode != 0:
        reason = f"{python} has no llama-cpp-python (see FORETELL_PEER_PYTHON)"
        if args.json:
            say_json({"peer": "llama.cpp", "skipped": reason})
        else:
            say(f"llama.cpp: skipped, {reason}")
        return
    threads = settings.threads or psutil.cpu_count(logical=False) or 1
    model = wiring.loader(settings)(
        command.path, name=command.name, speculation=command.speculation, progress=lambda *_: None
    )
    prompt = _prompt_ids(model)
    ours: list[Figures] = []
    theirs: list[Figures] = []
    with PeerProcess(python, command.path, threads) as peer:
        note(f"{model.name}: {model.executable.caps.device} against {peer.name}, {threads} threads")
        peer.measure(prompt)
        measure_ours(model.executable, prompt)
        for index in range(args.passes):
            ours.append(measure_ours(model.executable, prompt))
            theirs.append(peer.measure(prompt))
            note(
                f"pass {index + 1}: {ours[-1].decode_tok_s:.1f} / {theirs[-1].decode_tok_s:.1f} tok/s"
            )
        name = peer.name
    report = _peer_report(model.name, name, ours, theirs)
    measured = MeasuredModel(model.name, model.content_hash, model.executable.caps.device)
    keep_run(wiring, settings, "peers", measured, report)
    if args.json:
        say_json(report)
    else:
        say(f"{model.name}, {machine_name()}, {args.passes} alternating passes")
        say_tables("peers", report)


def measure_ours(executable: Executable, prompt: list[int]) -> Figures:
    """The same pass on our executable, greedy, without the engine around it."""
    cache = executable.new_cache()
    start = time.perf_counter()
    token_id = _argmax(executable, prompt, cache)
    prefill_ms = (time.perf_counter() - start) * 1e3
    token_ids = [token_id]
    start = time.perf_counter()
    for _ in range(COUNT - 1):
        token_id = _argmax(executable, [token_id], cache)
        token_ids.append(token_id)
    decode_s = time.perf_counter() - start
    cache.rewind_to(len(prompt))
    rows_ms = {}
    for count in (1, VERIFY_ROWS):
        times = []
        for _ in range(ROWS_REPEAT):
            start = time.perf_counter()
            executable.forward([Segment([token_id] * count, cache)])
            times.append((time.perf_counter() - start) * 1e3)
            cache.rewind_to(len(prompt))
        rows_ms[count] = median(times)
    return Figures(
        prefill_ms, (COUNT - 1) / decode_s, rows_ms[1], rows_ms[VERIFY_ROWS], tuple(token_ids)
    )


def _argmax(executable: Executable, token_ids: list[int], cache: Any) -> int:
    logits = executable.forward([Segment(token_ids, cache)], want_logits="last").logits
    assert logits is not None, "the last row's logits were asked for"
    return int(logits[-1].argmax())


def _prompt_ids(model: LoadedModel) -> list[int]:
    return model.tokenizer.encode(prompts()["quote_file"] * 8)[:PROMPT_LEN]


def _peer_report(
    model: str, peer: str, ours: list[Figures], theirs: list[Figures]
) -> dict[str, Any]:
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "model": model,
        "peer": peer,
        "machine": machine_name(),
        "ratios": {
            "prefill": [t.prefill_ms / o.prefill_ms for o, t in pairs],
            "decode": [o.decode_tok_s / t.decode_tok_s for o, t in pairs],
        },
        "rows": {
            name: {"foretell": [figure(o) for o in ours], "peer": [figure(t) for t in theirs]}
            for name, figure in _FIGURES.items()
        },
    }


_FIGURES: dict[str, Callable[[Figures], float]] = {
    "prefill tok/s": lambda figures: PROMPT_LEN / figures.prefill_ms * 1e3,
    "decode tok/s": lambda figures: figures.decode_tok_s,
    "8 rows / 1 row": lambda figures: figures.verify_ms / figures.row_ms,
}
