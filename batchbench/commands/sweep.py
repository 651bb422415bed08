"""`batchbench sweep`: a scenario at every point, or what it would run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from batchbench.adapters import engine_factory
from batchbench.asking import describe
from batchbench.commands.prepare import (
    Numerics,
    pacing_of,
    refuse_untimed,
    refuse_untrusted,
    requests_of,
    slo_of,
    tokenizer_of,
    with_numerics,
    with_run,
)
from batchbench.commands.present import (
    Format,
    degenerate_warning,
    one_line,
    plan_rows,
    plan_sheet,
    sweep_sheet,
    text_lines,
    text_rows,
)
from batchbench.commands.progress import ProgressLines
from batchbench.commands.service_sheet import service_sheet
from batchbench.commands.shared import FOLDER, DebugOption, FormatOption, ScenarioFile, TrustOption, draw, errors, show
from batchbench.demand import resolve_points
from batchbench.driver import Limits
from batchbench.environment import git_revision, machine, versions
from batchbench.errors import CountsDiffer, TextsDiffer, UsageError
from batchbench.predict import read_bandwidth_bytes_per_s
from batchbench.protocol import (
    EngineDescription,
    EngineFactory,
    IterationBatch,
    IterationOutcome,
    Point,
    RequestSpec,
)
from batchbench.recorder import LedgerSink
from batchbench.repetitions import Finished, Measured
from batchbench.results import Result, ResultWriter, load_result, require_writable
from batchbench.scenario import Scenario, load_scenario
from batchbench.sweep import Pass, SweepObserver, check_sweep, sweep_pool_sizes
from batchbench.timing import ContinuousTiming
from batchbench.traces import Trace
from batchbench.units import show_bytes, show_count
from batchbench.workload import workload_hash


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(sweep)


def sweep(
    scenario_file: ScenarioFile,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables; results/NAME if left out.", **FOLDER)] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for the figures; plots/NAME, or OUT/plots with --out.", **FOLDER)
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine to run: own, or schedule (counters alone, no model).")] = "own",
    numerics: Annotated[
        Numerics | None,
        typer.Option(
            help="exact: a request's bits do not depend on its company; fast: nothing is promised. "
            "The scenario's if left out.",
            show_default=False,
        ),
    ] = None,
    repetitions: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Measured passes over all points. The scenario's if left out."),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, max=1000, help="Passes before that, thrown away. The scenario's if left out."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what a sweep that ended early has finished in the folder.")
    ] = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="Check the engine's invariants after every iteration.")
    ] = False,
    trust: TrustOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run and its floor; run nothing.")
    ] = False,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Also print each request's prompt and completion.")
    ] = False,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="Draw nothing; batchbench plot draws later.")] = False,
    output_format: FormatOption = Format.table,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress lines.")] = False,
    debug: DebugOption = False,
) -> None:
    """Run a scenario at every pool size.

    Prints a table and writes Parquet tables and figures, but only if every pool produced identical text.
    """
    with errors(debug):
        if show_text and (dry_run or output_format is Format.markdown):
            other = "--dry-run" if dry_run else "--format markdown"
            raise UsageError(f"--show-text and {other} do not go together")
        if show_text and engine == "schedule":
            raise UsageError("--show-text: a schedule computes no text")
        scenario = with_run(with_numerics(load_scenario(scenario_file), numerics), repetitions, warmup)
        refuse_untrusted(scenario, trust)
        refuse_untimed(scenario, engine)
        tokenizer = tokenizer_of(scenario, engine, needed=show_text)
        requests, trace = requests_of(scenario, tokenizer)
        make_engine = engine_factory(engine, scenario.engine, audit=audit)
        make_schedule = engine_factory("schedule", scenario.engine)
        points = resolve_points(scenario.sweep, requests, make_engine, make_schedule, pacing_of(scenario))
        if dry_run:
            _print_plan(scenario, requests, points, make_engine, output_format)
            return
        tables = out or Path("results") / scenario.name
        figures = plots or (out / "plots" if out else Path("plots") / scenario.name)
        with ResultWriter(tables, slo_of(scenario)) as writer:
            progress = None if no_progress else ProgressLines(Console(stderr=True), len(requests))
            about = cache(lambda: _about(scenario, requests, points, make_engine, trace))
            observer = _SaveAndShow(writer, figures, progress, about, resume)
            _complete(requests, points, make_engine, scenario, observer)
        result = load_result(tables)
        texts = text_rows(requests, result, tokenizer) if show_text and tokenizer is not None else None
        _print_result(result, tables, [] if no_plots else draw(result, figures), texts, output_format)
        if warning := degenerate_warning(result.run["text_repetition"]):
            print(warning, file=sys.stderr)


class _SaveAndShow(SweepObserver):
    """Saves every point as it finishes and passes progress on.

    about: what run.json says before anything has run.
    """

    def __init__(
        self,
        writer: ResultWriter,
        figures: Path,
        progress: ProgressLines | None,
        about: Callable[[], dict[str, Any]],
        resume: bool,
    ) -> None:
        self.writer, self._figures, self._progress = writer, figures, progress
        self.about, self.resume = about, resume
        self._next = progress or SweepObserver()
        self._points: Sequence[Point] = ()

    def discard(self) -> None:
        """No timings: not on disk either."""
        self.writer.discard_parts()

    def close(self) -> None:
        """End the live display."""
        if self._progress is not None:
            self._progress.close()

    def on_start(self, points: Sequence[Point]) -> None:
        for folder in (self.writer.folder, self._figures):
            require_writable(folder)  # now, not after an hour's sweep
        if blocked := next((path for path in self._figures.glob("*.png") if path.is_dir()), None):
            raise UsageError(f"figure folder {self._figures}: {blocked.name} is a folder there")
        self.writer.open(self.about(), resume=self.resume)
        self._points = points
        self._next.on_start(points)

    def finished(self, requests: Sequence[RequestSpec]) -> Finished:
        repetitions = self.about()["scenario"]["run"]["repetitions"]
        found = self.writer.finished(self._points, requests, repetitions)
        if runs := len(found.timings) + len(found.repeated):
            print(f"resumed: {runs} of {show_count(len(self._points) * repetitions, 'run')} finished", file=sys.stderr)
        return found

    def on_point(self, point: Point, which: Pass) -> None:
        self._next.on_point(point, which)

    def on_iteration(self, iteration: int, outcome: IterationOutcome) -> None:
        self._next.on_iteration(iteration, outcome)

    def on_batch(self, first: int, batch: IterationBatch) -> None:
        self._next.on_batch(first, batch)

    def ledger(self, point: Point, engine: EngineDescription) -> LedgerSink | None:
        return self.writer.open_point(point, engine)

    def on_timing(self, timing: ContinuousTiming) -> None:
        self.writer.save_point(timing)
        self._next.on_timing(timing)

    def on_repeated(self, point: Point, which: Pass) -> None:
        self._next.on_repeated(point, which)

    def on_measured(self, place: int, which: Pass, run: Measured) -> None:
        self.writer.save_repetition(which.number, place, run)


def _complete(
    requests: tuple[RequestSpec, ...],
    points: list[Point],
    make_engine: EngineFactory,
    scenario: Scenario,
    observer: _SaveAndShow,
) -> None:
    """Run what is missing of the result, and put it into its folder."""
    if observer.resume:
        check_sweep(requests, points, make_engine, scenario.run.repetitions)
        if observer.writer.complete(observer.about()):
            print("resumed: the result is complete, there is nothing to run", file=sys.stderr)
            return
    timings = _run(requests, points, make_engine, scenario, observer)
    about = {key: value for key, value in observer.about().items() if key != "points"}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    observer.writer.join(timings, {"created": created, "text_repetition": timings[0].text_repetition, **about})


def _run(
    requests: tuple[RequestSpec, ...],
    points: list[Point],
    make_engine: EngineFactory,
    scenario: Scenario,
    observer: _SaveAndShow,
) -> list[ContinuousTiming]:
    run = scenario.run
    try:
        return sweep_pool_sizes(
            requests,
            points,
            make_engine,
            pacing=pacing_of(scenario),
            observer=observer,
            warmup=run.warmup,
            repetitions=run.repetitions,
            limits=Limits(run.max_iterations, run.max_s),
        )
    except (TextsDiffer, CountsDiffer):
        observer.discard()
        raise
    finally:
        observer.close()


def _about(
    scenario: Scenario,
    requests: tuple[RequestSpec, ...],
    points: list[Point],
    make_engine: EngineFactory,
    trace: Trace | None,
) -> dict[str, Any]:
    """What run.json says of a sweep before it runs, as JSON has it; points: of the whole sweep, in order."""
    engine = describe(make_engine, points[0])
    varied = {"pool_blocks", "versions", *(name for _, choices in scenario.sweep.declared for name, _ in choices)}
    calibration = scenario.engine.calibration
    about = {
        "scenario": scenario.model_dump(mode="json"),
        "workload_hash": workload_hash(requests),
        "trace": None if trace is None else {"format": trace.format, **asdict(trace.tally)},
        "inputs": {} if calibration is None else {"calibration": sha256(Path(calibration).read_bytes()).hexdigest()},
        # What varies is told by the tables: that of the first point describes nothing.
        "engine": {k: v for k, v in asdict(engine).items() if k not in varied},
        "versions": {**versions(), **engine.versions},
        "machine": machine(),
        "git": git_revision(),
        "points": [point.name for point in points],
    }
    found: dict[str, Any] = json.loads(json.dumps(about))
    return found


def _print_plan(
    scenario: Scenario,
    requests: tuple[RequestSpec, ...],
    points: list[Point],
    make_engine: EngineFactory,
    output_format: Format,
) -> None:
    check_sweep(requests, points, make_engine, scenario.run.repetitions)
    asked = {point.choices: point for point in points}  # a description differs between pools by their size alone
    engines = {choices: describe(make_engine, point) for choices, point in asked.items()}
    described = [engines[point.choices] for point in points]
    about = described[0]
    measurable = about.device == "cpu" and about.iteration_weight_bytes is not None
    bandwidth = read_bandwidth_bytes_per_s(about.iteration_weight_bytes or 0) if measurable else None
    rows = plan_rows(requests, points, described, bandwidth)
    document = {
        "scenario": scenario.name,
        "workload_hash": workload_hash(requests),
        "model": about.model,
        "dtype": about.dtype,
        "device": about.device,
        "numerics": about.numerics,
        "requests": len(requests),
        "kv_bytes_per_token": about.kv_bytes_per_token,
        "weight_bytes": about.weight_bytes,
        "read_bandwidth_bytes_per_s": bandwidth,
        "pools": rows,
    }
    lines = [
        f"{scenario.name}: {len(requests)} requests, model {about.model} in {about.dtype} on {about.device}, "
        f"{about.slots} slots, blocks of {about.block_size}" + (", numerics fast" if about.numerics == "fast" else "")
    ]
    if about.kv_bytes_per_token is not None:
        lines.append(f"{show_bytes(about.kv_bytes_per_token)} of K/V per position")
    if bandwidth is not None and about.iteration_weight_bytes is not None:
        size = show_bytes(about.iteration_weight_bytes)
        lines.append(f"{size} of weights read per iteration, at {bandwidth / 1e9:.1f} GB/s with one thread")
    show(document, [plan_sheet(rows)], lines, output_format)


def _print_result(
    result: Result,
    tables: Path,
    figures: list[Path],
    texts: list[dict[str, str]] | None,
    output_format: Format,
) -> None:
    pools, statistics, service = (result.rows(name) for name in ("pools", "statistics", "service"))
    document: dict[str, Any] = {
        "scenario": result.run["scenario"]["name"],
        "workload_hash": result.run["workload_hash"],
        "trace": result.run["trace"],
        "text_repetition": result.run["text_repetition"],
        "tables": str(tables),
        "figures": [str(path) for path in figures],
        "pools": pools,
        "service": service,
        "statistics": statistics,
    }
    if texts is not None:
        document["texts"] = texts
    lines = [one_line(f"tables: {tables}/*.parquet")]
    lines += [one_line(f"figures: {figures[0].parent}/*.png")] if figures else []
    lines += text_lines(texts or [])
    callers = service_sheet(pools, service, objectives=bool(result.run["scenario"].get("slo")))
    show(document, [sweep_sheet(pools, statistics), callers], lines, output_format)
