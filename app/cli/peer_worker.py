"""llama.cpp as a measured peer: one process, one model, orders as JSON lines on stdin.

Runs under any Python that has llama-cpp-python, on its own: it imports nothing of this program.
Calls llama.cpp's C interface directly, so that no Python work is counted against it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np


class Peer:
    """A loaded model with one sequence."""

    def __init__(self, path: str, threads: int, context_len: int) -> None:
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        self._quiet = quiet  # ctypes callbacks die with their last reference
        llama_cpp.llama_log_set(quiet, None)
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context_len
        context.n_batch = context.n_ubatch = 512
        context.n_threads = context.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )

    def clear(self) -> None:
        """Forget everything that was decoded."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def forward(self, token_ids: list[int]) -> None:
        """Append tokens; logits of the last one."""
        array = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        batch = llama_cpp.llama_batch_get_one(array, len(token_ids))
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def verify(self, token_ids: list[int], start: int) -> None:
        """Score every row of a window at position `start`, then take the rows back."""
        batch = llama_cpp.llama_batch_init(len(token_ids), 0, 1)
        for row, token_id in enumerate(token_ids):
            batch.token[row] = token_id
            batch.pos[row] = start + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = 1
        batch.n_tokens = len(token_ids)
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_batch_free(batch)
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, 0, start, -1)

    def argmax(self) -> int:
        """The likeliest next token."""
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax())


def measure(peer: Peer, order: dict[str, Any]) -> dict[str, Any]:
    """Run one order: prefill, then decode greedily; or rows: windows on top of a prompt."""
    prompt: list[int] = order["prompt"]
    peer.clear()
    start = time.perf_counter()
    peer.forward(prompt)
    token_id = peer.argmax()
    prefill_s = time.perf_counter() - start
    if order["op"] == "rows":
        times = []
        for _ in range(order["repeat"]):
            start = time.perf_counter()
            peer.verify([token_id] * order["rows"], len(prompt))
            times.append(time.perf_counter() - start)
        return {"step_ms": sorted(times)[len(times) // 2] * 1e3}
    token_ids = [token_id]
    start = time.perf_counter()
    for _ in range(order["count"] - 1):
        peer.forward([token_id])
        token_id = peer.argmax()
        token_ids.append(token_id)
    decode_s = time.perf_counter() - start
    return {"prefill_ms": prefill_s * 1e3, "decode_ms": decode_s * 1e3, "token_ids": token_ids}


def main() -> None:
    """Answer orders until stdin ends."""
    options = json.loads(sys.stdin.readline())
    peer = Peer(options["path"], options["threads"], options["context_len"])
    version = getattr(llama_cpp, "__version__", "")
    sys.stdout.write(json.dumps({"name": f"llama-cpp-python {version}"}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(measure(peer, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
