"""The bench: four turns, plain and speculative in turns, with figures and plots as they come."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import DataTable, Static
from textual_plot import HiResMode, PlotWidget

from app.bench_report import MeasuredModel, budget_s, keep_run, prompts, report_dict
from app.bench_runner import BenchFailed, BenchRunner, BenchStopped
from app.bench_tables import summary_of, tables_of, turns_table
from app.machine import machine_name, measure_busy
from app.settings import SettingsError
from engine.bench import (
    BenchReport,
    PairedFigure,
    Recommendation,
    TurnSample,
    recommend,
    run_paired,
    spec_scenario,
)
from engine.bench_rows import RowCost
from engine.commands import MeasureRows, UpdateSpeculation
from engine.speculative.options import SpeculationOptions
from storage.bench_runs import BenchStore
from storage.errors import StorageError

if TYPE_CHECKING:
    from app.app import ForetellApp

PASSES = 2
NUM_SHOWN_RUNS = 4
"""Earlier runs that are listed before a new one begins."""
ROW_COUNTS = (1, 2, 4, 8, 16)
ROWS_ROUNDS = 7


class BenchScreen(Screen[None]):
    """Starts a run, shows it, keeps it; one key applies what it recommends."""

    BINDINGS = [
        Binding("enter", "start", "Start", priority=True),  # the focused table takes it otherwise
        ("escape", "stop_or_leave", "Stop / leave"),
        ("a", "apply", "Apply the recommendation"),
        ("x", "export", "Export"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._runner: BenchRunner | None = None
        self._report: BenchReport | None = None
        self._costs: tuple[RowCost, ...] = ()
        self._model: MeasuredModel | None = None
        self._options = SpeculationOptions()
        """What the run was started with; both may be others when it ends."""

    @property
    def foretell(self) -> ForetellApp:
        """The app, under its own type."""
        return cast("ForetellApp", self.app)

    def compose(self) -> ComposeResult:
        """Title, what it will do, table, plots, recommendation."""
        yield Static("Bench: does drafting pay on this machine?", classes="page-title")
        yield Static("", id="bench-message", classes="page-message", markup=False)
        yield DataTable(id="bench-table", show_cursor=False)
        with Horizontal(id="bench-plots"):
            yield PlotWidget(id="bench-rates")
            yield PlotWidget(id="bench-acceptance")
            yield PlotWidget(id="bench-rows")
        yield Static("", id="bench-recommendation", classes="page-message", markup=False)
        yield Static(
            "Enter start · Esc stop or leave · a apply the recommendation · x export",
            classes="page-hints",
        )

    def on_mount(self) -> None:
        """Say what a run costs, and show the last one."""
        self.query_one(DataTable).add_columns(*turns_table([]).columns)
        seconds = budget_s(PASSES, spec_scenario(prompts()))
        self._say(
            f"Four turns, {PASSES} passes in each mode, about {seconds:.0f} s at 100 tok/s. "
            "Nothing else should run meanwhile. Enter starts."
        )
        self._show_last()

    # -- running -----------------------------------------------------------------

    def action_start(self) -> None:
        """Begin a run on the loaded model."""
        app = self.foretell
        if self._runner is not None:
            return
        info = app.model.info
        if info is None:
            self._say("No model is loaded yet: F3 gets one.")
        elif app.conversations.running:
            self._say("An answer is running: wait for it or stop it first.")
        else:
            self._runner = app.bench = BenchRunner(app.bridge.submit)
            self._report = BenchReport("spec", info.name)
            self._model = MeasuredModel(info.name, info.content_hash, info.device)
            self._options = app.settings.speculation
            self._costs = ()
            self.query_one(DataTable).clear()
            self._run(self._runner, self._report)

    def action_stop_or_leave(self) -> None:
        """Stop a run and keep what is done; without a run, leave."""
        if self._runner is not None:
            self._runner.stop()
            self._say("Stopping…")
        else:
            self.dismiss()

    @work(thread=True, exclusive=True)
    def _run(self, runner: BenchRunner, report: BenchReport) -> None:
        """On a worker: measure, then report the end whatever it was."""
        call, said = self.foretell.call_from_worker, ""
        try:
            if warning := measure_busy().warning:
                call(self._say, f"Warning: {warning}")
            run_paired(
                runner,
                spec_scenario(prompts()),
                report,
                passes=PASSES,
                options=self._options,
                on_sample=lambda sample: call(self._on_sample, sample),
            )
            measured = runner.measure_rows(MeasureRows(ROW_COUNTS, ROWS_ROUNDS))
            self._costs = measured.costs
            said = "Done."
        except BenchStopped:
            said = "Stopped; what was done is kept."
        except BenchFailed as error:
            said = f"{error} {error.error.hint}".strip()
        call(self._on_end, said)

    def _on_sample(self, sample: TurnSample) -> None:
        assert self._report is not None, "samples come from a run"
        mode = "speculative" if sample.is_speculative else "plain"
        self._say(
            f"Pass {sample.pass_index + 1} of {PASSES}, {mode}: {sample.turn} ran at"
            f" {sample.stats.decode_tok_s:.0f} tok/s"
        )
        self._show(self._report.figures())

    def _on_end(self, said: str) -> None:
        app = self.foretell
        self._runner = app.bench = None
        if app.settings.speculation != self._options:  # changed while the bench switched it
            app.bridge.submit(UpdateSpeculation(app.settings.speculation))
        assert self._report is not None, "a run has a report"
        figures = self._report.figures()
        self._say(said)
        self._show(figures)
        self._recommend(figures)
        if figures:
            self._keep(figures)

    # -- showing -----------------------------------------------------------------

    def _say(self, text: str) -> None:
        self.query_one("#bench-message", Static).update(text)

    def _show(self, figures: Sequence[PairedFigure]) -> None:
        table = self.query_one(DataTable)
        table.clear()
        table.add_rows(tables_of("spec", self._document(figures))[0].rows)
        if figures:
            self._plot_rates(figures)
            self._plot_acceptance(figures)
        if self._costs:
            self._plot_rows(self._costs)

    def _plot_rates(self, figures: Sequence[PairedFigure]) -> None:
        plot = self.query_one("#bench-rates", PlotWidget)
        plot.clear()
        places = [3.0 * i for i in range(len(figures))]
        plot.bar(places, [f.plain_tok_s for f in figures], 1.0, "grey70", label="plain")
        plot.bar(
            [x + 1.0 for x in places],
            [f.spec_tok_s for f in figures],
            1.0,
            "green",
            label="speculative",
        )
        plot.set_xlabel("tok/s by turn")
        plot.set_xticks([])
        plot.set_ylimits(ymin=0.0)

    def _plot_acceptance(self, figures: Sequence[PairedFigure]) -> None:
        plot = self.query_one("#bench-acceptance", PlotWidget)
        plot.clear()
        for figure, style in zip(figures, ("red", "yellow", "green", "cyan"), strict=False):
            if figure.verify_steps:
                shares = [n / figure.verify_steps for n in figure.accepted_per_position]
                positions = [float(i + 1) for i in range(len(shares))]
                plot.plot(positions, shares, style, HiResMode.BRAILLE, label=figure.turn)
        plot.set_xlabel("accepted by position")
        plot.set_ylimits(ymin=0.0, ymax=1.0)

    def _plot_rows(self, costs: Sequence[RowCost]) -> None:
        plot = self.query_one("#bench-rows", PlotWidget)
        plot.clear()
        rows = [float(cost.num_rows) for cost in costs]
        plot.plot(rows, [cost.step_ms for cost in costs], "magenta", HiResMode.BRAILLE)
        plot.set_xlabel("ms by rows")
        plot.set_ylimits(ymin=0.0)

    def _recommend(self, figures: Sequence[PairedFigure]) -> None:
        text = self._advice(figures).text
        self.query_one("#bench-recommendation", Static).update(text)

    def _advice(self, figures: Sequence[PairedFigure]) -> Recommendation:
        return recommend(figures, window=self._options.window)

    # -- keeping and using ---------------------------------------------------------

    @property
    def _store(self) -> BenchStore:
        return BenchStore(self.foretell.conversations.store.database)

    def _keep(self, figures: Sequence[PairedFigure]) -> None:
        assert self._model is not None, "figures come from a run"
        try:
            keep_run(self._store, "spec", self._model, self._options, self._document(figures))
        except StorageError as error:
            self.foretell.show_error(error)

    def _document(self, figures: Sequence[PairedFigure]) -> dict[str, object]:
        assert self._report is not None, "figures come from a run"
        rows = [dataclasses.asdict(cost) for cost in self._costs]
        return {**report_dict(self._report, figures), "rows": rows}

    def _show_last(self) -> None:
        try:
            runs = self._store.list_runs()[:NUM_SHOWN_RUNS]
        except StorageError as error:
            self.foretell.show_error(error)
            return
        lines = [
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at))
            + f"  {run.kind} {run.model}: {summary_of(run.kind, run.report)}"
            for run in runs
        ]
        if lines:
            text = "Earlier runs\n" + "\n".join(lines)
            self.query_one("#bench-recommendation", Static).update(text)

    def action_apply(self) -> None:
        """Switch drafting on or off as recommended, and save it."""
        advice = self._advice(self._report.figures() if self._report else [])
        if advice.is_enabled is None:
            self._say("Run the bench first: Enter starts it.")
            return
        settings = self.foretell.settings
        speculation = dataclasses.replace(
            settings.speculation, is_enabled=advice.is_enabled, window=advice.window
        )
        try:
            self.foretell.change_settings(dataclasses.replace(settings, speculation=speculation))
        except SettingsError as error:
            self._say(f"{error} ({error.hint})")
            return
        self._say(f"Applied: drafting is {'on' if speculation.is_enabled else 'off'}.")

    def action_export(self) -> None:
        """Write the report as JSON and Markdown into the current folder."""
        figures = self._report.figures() if self._report else []
        if not figures or self._report is None:
            self._say("Nothing to export yet: Enter starts a run.")
            return
        stem = Path(f"foretell-bench-{time.strftime('%Y%m%d-%H%M%S')}")
        document = self._document(figures)
        parts = [f"# Foretell bench spec: {self._report.model}", f"Machine: {machine_name()}"]
        parts += ["\n".join(table.markdown()) for table in tables_of("spec", document)]
        parts.append(self._advice(figures).text)
        try:
            stem.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n", "utf-8")
            stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n", "utf-8")
        except OSError as error:
            self._say(f"cannot write {stem}.json here: {error.strerror}")
            return
        self._say(f"Written: {stem.absolute()}.json and .md")
