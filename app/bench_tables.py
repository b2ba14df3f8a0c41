"""A bench report as tables: the same on the command line, in Markdown and of a kept run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Report = Mapping[str, Any]
"""What a bench has found, as plain values: printed with `--json` and kept in the database."""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns with a heading each; the first one names the row."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def text(self) -> list[str]:
        """Aligned lines, names to the left and figures to the right."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        return [
            "  ".join(
                [
                    line[0].ljust(widths[0]),
                    *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
                ]
            )
            for line in lines
        ]

    def markdown(self) -> list[str]:
        """The lines of a Markdown table."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return [f"| {' | '.join(line)} |" for line in lines]


def tables_of(kind: str, report: Report) -> list[Table]:
    """A report's tables. `kind`: spec, agent, concurrent, rows or peers."""
    if kind == "concurrent":
        return [_concurrent_table(report["rows"])]
    if kind == "peers":
        return [_peers_table(report)]
    costs = report.get("rows") or []  # the bench screen measures them with the turns
    rows = [_rows_table(costs, report.get("floor_ms"))] if costs else []
    return rows if kind == "rows" else [turns_table(report["figures"]), *rows]


def summary_of(kind: str, report: Report) -> str:
    """The ratios of a report in one line."""
    if kind == "rows":
        first, last = report["rows"][0], report["rows"][-1]
        ratio = last["step_ms"] / first["step_ms"]
        return f"{first['num_rows']} row {first['step_ms']:.2f} ms, {last['num_rows']} rows {ratio:.2f}x"
    if kind == "peers":
        ratios = {name: median(values) for name, values in report["ratios"].items()}
    elif kind == "concurrent":
        ratios = {_cell_name(row): row["ratio"] for row in report["rows"]}
    else:
        ratios = {figure["turn"]: figure["ratio"] for figure in report["figures"]}
    return ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())


def turns_table(figures: Sequence[Report]) -> Table:
    """A row for each turn, plain beside speculative."""
    columns = "turn, plain tok/s, spec tok/s, ratio (lowest..highest), first token"
    return Table(
        (*columns.split(", "), "accepted/drafted", "streams"),
        [
            (
                figure["turn"],
                f"{figure['plain_tok_s']:.1f}",
                f"{figure['spec_tok_s']:.1f}",
                _ratio(figure["ratios"]),
                f"{median(figure['ttft_ratios']):.2f}x",
                f"{figure['draft_n_accepted']}/{figure['draft_n']}",
                _streams(figure),
            )
            for figure in figures
        ],
    )


def _rows_table(costs: Sequence[Report], floor_ms: float | None) -> Table:
    """`floor_ms` is the time one read of all weights takes, where it is known."""
    phases = list(dict.fromkeys(name for cost in costs for name in cost["phase_ms"]))
    one_ms = costs[0]["step_ms"]
    return Table(
        ("rows", "ms", "vs 1 row", "of floor", *phases),
        [
            (
                str(cost["num_rows"]),
                f"{cost['step_ms']:.2f}",
                f"{cost['step_ms'] / one_ms:.2f}x",
                f"{floor_ms / cost['step_ms']:.0%}" if floor_ms else "-",
                *(f"{cost['phase_ms'].get(name, 0.0):.2f}" for name in phases),
            )
            for cost in costs
        ],
    )


def _concurrent_table(rows: Sequence[Report]) -> Table:
    return Table(
        ("chats", "plain tok/s", "spec tok/s", "ratio (lowest..highest)", "first token", "streams"),
        [
            (
                _cell_name(row),
                f"{row['plain_tok_s']:.1f}",
                f"{row['spec_tok_s']:.1f}",
                _ratio([row["lowest"], row["ratio"], row["highest"]]),
                f"{row['ttft_ratio']:.2f}x",
                _streams(row),
            )
            for row in rows
        ],
    )


def _peers_table(report: Report) -> Table:
    ratios = {f"{name} tok/s": _ratio(values) for name, values in report["ratios"].items()}
    return Table(
        ("figure", "foretell", report["peer"], "ratio (lowest..highest)"),
        [
            (
                name,
                f"{median(row['foretell']):.2f}",
                f"{median(row['peer']):.2f}",
                ratios.get(name, ""),
            )
            for name, row in report["rows"].items()
        ],
    )


def _ratio(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f}x ({min(ratios):.2f}..{max(ratios):.2f})"


def _streams(row: Report) -> str:
    return "equal" if row["streams_match"] else "DIFFERENT"


def _cell_name(row: Report) -> str:
    chats = f"{row['num_chats']} chats" if row["num_chats"] > 1 else "1 chat"
    return f"{chats}, {row['stagger_ms']} ms apart" if row["stagger_ms"] else chats
