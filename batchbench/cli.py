"""The command line: thin commands over the library, one line and one exit code per error."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from batchbench.adapters import engine_factory, engine_tokenizer, examine_machine, measure_costs
from batchbench.calibration import MAX_TOKENS, Calibration, load_calibration, require_savable, save_calibration
from batchbench.clocks import IterationCost
from batchbench.cost import BANDWIDTH_BYTES_PER_S, MS_PER_TOKEN, VICTIM_TOKENS
from batchbench.cost_report import (
    calibration_document,
    calibration_lines,
    calibration_sheet,
    comparison_lines,
    comparison_sheet,
    constants_document,
    evictions_document,
    evictions_lines,
    evictions_sheet,
    kv_bytes,
)
from batchbench.demand import resolve_points
from batchbench.driver import Pacing
from batchbench.environment import git_revision, machine, versions
from batchbench.errors import BatchbenchError, TextsDiffer, UsageError
from batchbench.eviction_cost import eviction_costs, point_costs, require_same_engine
from batchbench.inspect_command import register as register_inspect
from batchbench.predict import read_bandwidth_bytes_per_s
from batchbench.present import (
    Format,
    Sheet,
    degenerate_warning,
    doctor_lines,
    one_line,
    plan_rows,
    plan_sheet,
    promise_sheet,
    sweep_sheet,
    text_lines,
    text_rows,
    to_json,
)
from batchbench.progress import ProgressLines
from batchbench.protocol import (
    EngineDescription,
    EngineFactory,
    IterationOutcome,
    Point,
    QuietIterations,
    RequestSpec,
    Tokenizer,
)
from batchbench.recorder import LedgerSink
from batchbench.results import Result, ResultWriter, load_result, require_writable
from batchbench.scenario import Scenario, load_scenario
from batchbench.service import Slo
from batchbench.sweep import SweepObserver, check_sweep, sweep_pool_sizes
from batchbench.timing import ContinuousTiming
from batchbench.traces import Trace
from batchbench.units import show_bytes
from batchbench.workload import build_requests, needs_tokenizer, workload_hash

app = typer.Typer(
    name="batchbench",
    help="Benchmark LLM inference under KV-cache pressure: one workload, several pool sizes, one text.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Numerics(StrEnum):
    """What is promised of a request's bits."""

    exact = "exact"
    fast = "fast"


DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
TrustOption = Annotated[
    list[str] | None,
    typer.Option("--trust", metavar="MODULE", help="Module that the scenario's victim rule may be imported from."),
]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the table.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"batchbench {versions()['kv-batchbench']}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command()
def sweep(
    scenario_file: Annotated[Path, typer.Argument(metavar="SCENARIO", help="Scenario file (TOML).")],
    out: Annotated[Path | None, typer.Option(help="Folder for the tables; results/NAME if left out.")] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for the figures; plots/NAME, or OUT/plots with --out.")
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
    output_format: FormatOption = Format.table,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress lines.")] = False,
    debug: DebugOption = False,
) -> None:
    """Run a scenario at every pool size.

    Prints a table and writes Parquet tables and figures, but only if every pool produced identical text.
    """
    with _errors(debug):
        if show_text and (dry_run or output_format is Format.markdown):
            other = "--dry-run" if dry_run else "--format markdown"
            raise UsageError(f"--show-text and {other} do not go together")
        if show_text and engine == "schedule":
            raise UsageError("--show-text: a schedule computes no text")
        scenario = _with_numerics(load_scenario(scenario_file), numerics)
        _refuse_untrusted(scenario, trust)
        tokenizer = _tokenizer(scenario, engine, needed=show_text)
        requests, trace = _requests(scenario, tokenizer)
        make_engine = engine_factory(engine, scenario.engine, audit=audit)
        make_schedule = engine_factory("schedule", scenario.engine)
        points = resolve_points(scenario.sweep, requests, make_engine, make_schedule, pacing_of(scenario))
        if dry_run:
            _print_plan(scenario, requests, points, make_engine, output_format)
            return
        tables = out or Path("results") / scenario.name
        figures = plots or (out / "plots" if out else Path("plots") / scenario.name)
        writer = ResultWriter(tables, slo_of(scenario))
        progress = None if no_progress else ProgressLines(Console(stderr=True), len(requests))
        timings = _run(requests, points, make_engine, pacing_of(scenario), _SaveAndShow(writer, figures, progress))
        writer.join(timings, _provenance(scenario, timings[0], trace))
        result = load_result(tables)
        texts = text_rows(timings[0], tokenizer) if show_text and tokenizer is not None else None
        _print_result(result, tables, _draw(result, figures), texts, output_format)
        if warning := degenerate_warning(timings[0].text_repetition):
            print(warning, file=sys.stderr)


@app.command()
def validate(
    scenario_file: Annotated[Path, typer.Argument(metavar="SCENARIO", help="Scenario file (TOML).")],
    engine: Annotated[str, typer.Option(help="Engine to check against: own, schedule.")] = "own",
    trust: TrustOption = None,
    debug: DebugOption = False,
) -> None:
    """Check a scenario on this machine, as a sweep would before it runs; print its workload's hash."""
    with _errors(debug):
        scenario = load_scenario(scenario_file)
        _refuse_untrusted(scenario, trust)
        requests, _ = _requests(scenario, _tokenizer(scenario, engine))
        make_engine = engine_factory(engine, scenario.engine)
        make_schedule = engine_factory("schedule", scenario.engine)
        points = resolve_points(scenario.sweep, requests, make_engine, make_schedule, pacing_of(scenario))
        check_sweep(requests, points, make_engine)
        pools = dict.fromkeys(point.pool_blocks for point in points)
        choices = len({point.choices for point in points})
        times = f", {choices} choices of the engine" if choices > 1 else ""
        print(
            f"{one_line(str(scenario_file))}: valid. {scenario.name}: {len(requests)} requests through "
            f"pools {', '.join(map(str, pools))}{times}; workload {workload_hash(requests)}"
        )


@app.command()
def schema(debug: DebugOption = False) -> None:
    """Print the JSON Schema of scenario files, for editors."""
    with _errors(debug):
        print(json.dumps(Scenario.model_json_schema(), indent=2))


@app.command()
def plot(
    result_folder: Annotated[Path, typer.Argument(metavar="RESULT", help="Folder that a sweep wrote.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the figures; RESULT/plots if left out.")] = None,
    point: Annotated[
        int | None,
        typer.Option(
            help="Point of the slot timeline, by its place in the sweep from 0; the one that recomputes most."
        ),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Draw a result folder's figures again."""
    with _errors(debug):
        result, folder = load_result(result_folder), out or result_folder / "plots"
        require_writable(folder)
        for path in _draw(result, folder, point):
            print(one_line(str(path)))


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Checkpoint to test as well: a folder or GGUF file.")] = None,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads that the self-test runs with.")] = 1,
    output_format: FormatOption = Format.table,
    debug: DebugOption = False,
) -> None:
    """Say what this machine gives: decoders and whether they keep their promise, versions, measured ceilings.

    Exit code 1 if the default decoder does not keep its promise.
    """
    with _errors(debug):
        report = examine_machine(model, threads)
        _print(report, promise_sheet(report["numerics"]), doctor_lines(report), output_format)
        if not report["ok"]:
            raise typer.Exit(1)


@app.command()
def calibrate(
    scenario_file: Annotated[Path, typer.Argument(metavar="SCENARIO", help="Scenario whose engine is measured.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File for the measured costs (JSON).")],
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_TOKENS, help="Longest context to measure; the longest of the scenario's if left out."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Times that everything is measured.")] = 9,
    output_format: FormatOption = Format.table,
    debug: DebugOption = False,
) -> None:
    """Measure on this machine what an eviction costs: recomputing a context, and copying it out and back.

    The file serves `reclaim = "cheaper"` in scenarios, and `batchbench cost`.
    """
    with _errors(debug):
        scenario = load_scenario(scenario_file)
        require_savable(out)
        if max_tokens is None:
            requests, _ = _requests(scenario, _tokenizer(scenario, "own"))
            max_tokens = max(1, *(r.prompt_tokens + r.output_tokens - 2 for r in requests))  # cached by the last token
        found = measure_costs(scenario.engine, max_tokens, rounds, lambda done: None)
        save_calibration(found, out)
        lines = [one_line(f"calibration: {out}"), *calibration_lines(found)]
        _print(found.model_dump(mode="json"), calibration_sheet(found), lines, output_format)


@app.command(name="cost")
def cost_command(
    tokens: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="Cached positions of the victim; 1000 if left out.")
    ] = None,
    ms_per_token: Annotated[
        float | None,
        typer.Option(help="Milliseconds to recompute a position; 0.1 if left out."),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Of the link to the swap pool, in bytes per second; 25e9 if left out."),
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="Bytes of K/V per position; 131072 if left out.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Or of a model: its layers,")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="K/V heads,")] = None,
    head_size: Annotated[int | None, typer.Option(help="elements of a head,")] = None,
    element_bytes: Annotated[int | None, typer.Option(help="and bytes of an element.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Measured costs that batchbench calibrate wrote, instead of constants.")
    ] = None,
    result: Annotated[
        Path | None,
        typer.Option(help="Folder that a sweep wrote: what its evictions cost, predicted against measured."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a figure (PNG).")] = None,
    output_format: FormatOption = Format.table,
    debug: DebugOption = False,
) -> None:
    """What an eviction costs: recompute against swap, with constants or as measured on this machine."""
    with _errors(debug):
        shape = {"layers": layers, "kv_heads": kv_heads, "head_size": head_size, "element_bytes": element_bytes}
        constants = {"ms_per_token": ms_per_token, "bandwidth": bandwidth, "bytes_per_token": bytes_per_token, **shape}
        if result is not None and calibration is None:
            raise UsageError("--result needs --calibration: what its evictions are predicted by")
        if result is not None and tokens is not None:
            raise UsageError("--result and --tokens do not go together: its evictions have lengths of their own")
        if plot is not None:
            require_savable(plot, "figure")
        if calibration is None:
            if wrong := _not_positive(ms_per_token=ms_per_token, bandwidth=bandwidth):
                raise UsageError(wrong)
            toy = _toy(ms_per_token, bandwidth, kv_bytes(bytes_per_token, shape))
            document = constants_document(tokens or VICTIM_TOKENS, *toy)
            _plot_comparison(plot, None, toy)
            _print_cost(document, comparison_sheet(document), comparison_lines(document, None), plot, output_format)
            return
        if given := next((name for name, value in constants.items() if value is not None), None):
            raise UsageError(f"--{given.replace('_', '-')} and --calibration do not go together: the file says it")
        measured = load_calibration(calibration)
        if result is not None:
            _print_evictions(load_result(result), measured, calibration, plot, output_format)
            return
        document = calibration_document(measured, str(calibration), tokens or VICTIM_TOKENS)
        _plot_comparison(plot, measured, _toy(None, None, kv_bytes(None, {})))
        _print_cost(document, comparison_sheet(document), comparison_lines(document, measured), plot, output_format)


class _SaveAndShow(SweepObserver):
    """Saves every point as it finishes and passes progress on."""

    def __init__(self, writer: ResultWriter, figures: Path, progress: ProgressLines | None) -> None:
        self._writer, self._figures, self._progress = writer, figures, progress
        self._next = progress or SweepObserver()

    def discard(self) -> None:
        """No timings: not on disk either."""
        self._writer.discard_parts()

    def close(self) -> None:
        """End the live display."""
        if self._progress is not None:
            self._progress.close()

    def on_start(self, points: Sequence[Point]) -> None:
        for folder in (self._writer.folder, self._figures):
            require_writable(folder)  # now, not after an hour's sweep
        if blocked := next((path for path in self._figures.glob("*.png") if path.is_dir()), None):
            raise UsageError(f"figure folder {self._figures}: {blocked.name} is a folder there")
        self._writer.open()
        self._next.on_start(points)

    def on_point(self, point: Point) -> None:
        self._next.on_point(point)

    def on_iteration(self, iteration: int, outcome: IterationOutcome) -> None:
        self._next.on_iteration(iteration, outcome)

    def on_quiet(self, first: int, quiet: QuietIterations) -> None:
        self._next.on_quiet(first, quiet)

    def ledger(self, point: Point, engine: EngineDescription) -> LedgerSink | None:
        return self._writer.open_point(point, engine)

    def on_timing(self, timing: ContinuousTiming) -> None:
        self._writer.save_point(timing)
        self._next.on_timing(timing)


def pacing_of(scenario: Scenario) -> Pacing:
    """The clock that a scenario declares."""
    cost = IterationCost.of_seconds(**scenario.virtual.model_dump()) if scenario.virtual else None
    return Pacing(scenario.clock, cost)


def slo_of(scenario: Scenario) -> Slo:
    return Slo(**scenario.slo.model_dump()) if scenario.slo else Slo()


def _with_numerics(scenario: Scenario, numerics: Numerics | None) -> Scenario:
    """The scenario with the command line's choice, where there is one."""
    if numerics is None:
        return scenario
    engine = scenario.engine.model_copy(update={"numerics": numerics.value})
    return scenario.model_copy(update={"engine": engine})


def _refuse_untrusted(scenario: Scenario, trust: Sequence[str] | None) -> None:
    """A scenario is data: the code that it names runs only if the command line says so."""
    named = [dict(choices).get("victim") for _, choices in scenario.sweep.declared]
    for victim in [scenario.engine.victim, *named]:
        module, colon, _ = (victim or "").partition(":")
        if colon and module not in (trust or ()):
            raise UsageError(
                f"victim = {victim!r} would import the module {module!r}; if you trust it, add --trust {module}"
            )


def _tokenizer(scenario: Scenario, engine: str, *, needed: bool = False) -> Tokenizer | None:
    """The engine's, if the prompts are texts or if it is needed anyway; a model with random prompts may have none."""
    wanted = needed or needs_tokenizer(scenario.workload)
    return engine_tokenizer(engine, scenario.engine) if wanted else None


def _requests(scenario: Scenario, tokenizer: Tokenizer | None) -> tuple[tuple[RequestSpec, ...], Trace | None]:
    """The requests, and the trace they are from, if they are; says on stderr what became of the trace's rows."""
    traces: list[Trace] = []
    requests = build_requests(scenario.workload, tokenizer, scenario.clock, traces.append)
    for trace in traces:
        for line in (f"{trace.path}: {trace.format}", *trace.tally.lines()):
            print(one_line(f"trace: {line}"), file=sys.stderr)
    return requests, traces[0] if traces else None


def _run(
    requests: tuple[RequestSpec, ...],
    points: list[Point],
    make_engine: EngineFactory,
    pacing: Pacing,
    observer: _SaveAndShow,
) -> list[ContinuousTiming]:
    try:
        return sweep_pool_sizes(requests, points, make_engine, pacing=pacing, observer=observer)
    except TextsDiffer:
        observer.discard()
        raise
    finally:
        observer.close()


def _provenance(scenario: Scenario, timing: ContinuousTiming, trace: Trace | None) -> dict[str, Any]:
    engine = timing.engine
    varied = {"pool_blocks", "versions", *(name for _, choices in scenario.sweep.declared for name, _ in choices)}
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "scenario": scenario.model_dump(mode="json"),
        "workload_hash": workload_hash(timing.requests),
        "trace": None if trace is None else {"format": trace.format, **asdict(trace.tally)},
        "text_repetition": timing.text_repetition,
        # What varies is told by the tables: that of the first point describes nothing.
        "engine": {k: v for k, v in asdict(engine).items() if k not in varied},
        "versions": {**versions(), **engine.versions},
        "machine": machine(),
        "git": git_revision(),
    }


def _draw(result: Result, folder: Path, point: int | None = None) -> list[Path]:
    from batchbench.plots import draw_all  # matplotlib takes a second to import

    return draw_all(result, folder, point)


def _not_positive(**values: float | None) -> str | None:
    """What is wrong with an option that must be a number above 0, or None."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            return f"--{name.replace('_', '-')} is {value}, must be a finite number above 0"
        if value is not None and not 1e-9 <= value <= 1e15:
            return f"--{name.replace('_', '-')} is {value}, must be between 1e-9 and 1e15"
    return None


def _toy(ms_per_token: float | None, bandwidth: float | None, per_token_bytes: int) -> tuple[float, float, int]:
    """Constants, with the toy's where they are not given."""
    return ms_per_token or MS_PER_TOKEN, bandwidth or BANDWIDTH_BYTES_PER_S, per_token_bytes


def _plot_comparison(path: Path | None, measured: Calibration | None, toy: tuple[float, float, int]) -> None:
    if path is not None:
        from batchbench.cost_plots import save_comparison  # matplotlib takes a second to import

        save_comparison(path, measured, *toy)


def _print_evictions(
    result: Result, measured: Calibration, path: Path, plot: Path | None, output_format: Format
) -> None:
    require_same_engine(result, measured, str(path))
    costs = eviction_costs(result, measured)
    sums, name = point_costs(result, costs), str(result.run["scenario"]["name"])
    if plot is not None:
        from batchbench.cost_plots import save_evictions

        save_evictions(plot, name, costs, sums)
    document = evictions_document(name, str(path), measured, costs, sums)
    lines = evictions_lines(measured, costs, sums, result.run["engine"].get("threads"))
    _print_cost(document, evictions_sheet(sums), lines, plot, output_format)


def _print_cost(
    document: dict[str, Any], sheet: Sheet, lines: list[str], plot: Path | None, output_format: Format
) -> None:
    if plot is not None:
        document, lines = {**document, "figure": str(plot)}, [*lines, one_line(f"figure: {plot}")]
    _print(document, sheet, lines, output_format)


def _print_plan(
    scenario: Scenario,
    requests: tuple[RequestSpec, ...],
    points: list[Point],
    make_engine: EngineFactory,
    output_format: Format,
) -> None:
    check_sweep(requests, points, make_engine)
    described = [_describe(make_engine, point) for point in points]
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
    _print(document, plan_sheet(rows), lines, output_format)


def _describe(make_engine: EngineFactory, point: Point) -> EngineDescription:
    engine = make_engine(point.pool_blocks, **dict(point.choices))
    try:
        return engine.describe()
    finally:
        engine.close()


def _print_result(
    result: Result,
    tables: Path,
    figures: list[Path],
    texts: list[dict[str, str]] | None,
    output_format: Format,
) -> None:
    pools = result.rows("pools")
    document: dict[str, Any] = {
        "scenario": result.run["scenario"]["name"],
        "workload_hash": result.run["workload_hash"],
        "text_repetition": result.run["text_repetition"],
        "tables": str(tables),
        "figures": [str(path) for path in figures],
        "pools": pools,
    }
    if texts is not None:
        document["texts"] = texts
    lines = [one_line(f"tables: {tables}/*.parquet"), one_line(f"figures: {figures[0].parent}/*.png")]
    lines += text_lines(texts or [])
    _print(document, sweep_sheet(pools), lines, output_format)


def _print(document: dict[str, Any], sheet: Sheet, lines: list[str], output_format: Format) -> None:
    if output_format is Format.json:
        print(to_json(document))
    elif output_format is Format.markdown:
        print(sheet.markdown())
    else:
        sheet.print()
        # A terminal of another encoding gets escapes, not an error; closed, there is no encoding.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print("\n" + "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding))


@contextmanager
def _errors(debug: bool) -> Iterator[None]:
    """One line on stderr and the error's exit code, instead of a traceback; warnings as one line each too."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(one_line(f"warning: {message}"), file=sys.stderr)
            yield
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except (KeyboardInterrupt, Exception) as error:
        if debug or isinstance(error, typer.Exit):
            raise
        if isinstance(error, BrokenPipeError):  # the reader has seen enough; nothing may be flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        if isinstance(error, BatchbenchError):
            code, line = error.exit_code, f"error: {error}"
        elif isinstance(error, KeyboardInterrupt):
            code, line = 130, "interrupted"
        elif isinstance(error, OSError):
            code, line = 1, f"error: {error.filename or 'output'}: {error.strerror or error}"
        else:
            code, line = 1, f"internal error: {type(error).__name__}: {error} (--debug shows where)"
        print(one_line(line), file=sys.stderr)
        raise typer.Exit(code) from None


register_inspect(app, _errors)
