"""`foretell bench concurrent`: 1, 2 and 4 chats, together and staggered, drafting on and off."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from statistics import median

from app.bench_report import MeasuredModel, prompts
from app.cli.flags import load_command
from app.cli.headless import HeadlessEngine
from app.cli.kept_runs import keep_run, say_tables
from app.cli.output import note, say_json
from app.machine import machine_name
from app.settings import Settings
from app.wiring import Wiring
from engine.bench_concurrent import Cell, CellResult, cells, run_cell, turns_of


def run_concurrent(args: argparse.Namespace, wiring: Wiring, settings: Settings) -> None:
    """Every cell in both modes, the first mode alternating from pass to pass.

    Raises: KeyboardInterrupt after Ctrl-C, when the cells that are whole are printed.
    """
    is_stopped = False
    texts = [prompts()[name] for name in ("quote_file", "prose", "one_word", "quote_file")]
    results: list[tuple[int, CellResult]] = []
    with HeadlessEngine(lambda on_event: wiring.start_engine(settings, on_event)) as engine:
        info = engine.load(load_command(settings, wiring))
        note(f"{info.name} on {info.device}")
        try:
            for index, cell in _order(args.passes):
                results.append((index, _run(engine, settings, cell, texts, index)))
                note(_progress(index, results[-1][1]))
        except KeyboardInterrupt:
            note("stopped; what follows is what was done")
            is_stopped = True
    rows = [row for n, stagger in cells() if (row := _row(results, n, stagger))]
    report = {"model": info.name, "machine": machine_name(), "rows": rows}
    if rows:
        measured = MeasuredModel(info.name, info.content_hash, info.device)
        keep_run(wiring, settings, "concurrent", measured, report)
    if args.json:
        say_json(report)
    else:
        say_tables("concurrent", report)
    if is_stopped:
        raise KeyboardInterrupt


def _order(passes: int) -> Iterator[tuple[int, Cell]]:
    for index in range(passes):
        for num_chats, stagger_ms in cells():
            for is_speculative in (False, True) if index % 2 == 0 else (True, False):
                yield index, Cell(num_chats, stagger_ms, is_speculative)


def _run(
    engine: HeadlessEngine, settings: Settings, cell: Cell, texts: list[str], index: int
) -> CellResult:
    options = dataclasses.replace(settings.speculation, is_enabled=cell.is_speculative)
    engine.update_speculation(options)
    run = f"conc-{index}-{cell.num_chats}-{cell.stagger_ms}-{int(cell.is_speculative)}"
    turns = turns_of(cell, texts, run)
    result = run_cell(
        cell,
        turns,
        submit=engine.submit,
        next_event=engine.next_event,
        clock=time.perf_counter,
        sleep=time.sleep,
    )
    for turn in turns:
        engine.forget(turn.chat_id)
    return result


def _row(
    results: list[tuple[int, CellResult]], num_chats: int, stagger_ms: int
) -> dict[str, float] | None:
    """Medians over the whole pairs of a cell, or None while there is none."""
    by_mode: dict[bool, dict[int, CellResult]] = {False: {}, True: {}}
    for index, result in results:
        if (result.cell.num_chats, result.cell.stagger_ms) == (num_chats, stagger_ms):
            by_mode[result.cell.is_speculative][index] = result
    pairs = [(plain, by_mode[True][i]) for i, plain in by_mode[False].items() if i in by_mode[True]]
    if not pairs:
        return None
    ratios = [spec.tok_s / plain.tok_s for plain, spec in pairs]
    return {
        "num_chats": num_chats,
        "stagger_ms": stagger_ms,
        "plain_tok_s": median(plain.tok_s for plain, _ in pairs),
        "spec_tok_s": median(spec.tok_s for _, spec in pairs),
        "ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "ttft_ratio": median(spec.ttft_ms / plain.ttft_ms for plain, spec in pairs),
        "streams_match": all(plain.token_ids == spec.token_ids for plain, spec in pairs),
    }


def _progress(index: int, result: CellResult) -> str:
    cell = result.cell
    mode = "spec " if cell.is_speculative else "plain"
    return (
        f"pass {index + 1} {mode} {cell.num_chats} chats, {cell.stagger_ms:3d} ms apart:"
        f" {result.tok_s:7.1f} tok/s, first token {result.ttft_ms:.0f} ms"
    )
