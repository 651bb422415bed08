"""`batchbench sweep`: a scenario at every point, or what it would run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from batchbench.asking import describe
from batchbench.commands.prepare import Numerics, print_trace, with_numerics, with_run
from batchbench.commands.present import Format, degenerate_warning, plan_rows, plan_sheet, text_lines, text_rows
from batchbench.commands.progress import ProgressLines
from batchbench.commands.shared import FOLDER, DebugOption, FormatOption, ScenarioFile, TrustOption, draw, errors, show
from batchbench.errors import UsageError
from batchbench.lock import require_free
from batchbench.predict import read_bandwidth_bytes_per_s
from batchbench.results import Result, require_writable
from batchbench.running import Job, prepared, run, tokenizer_of
from batchbench.scenario import load_scenario
from batchbench.service_sheet import service_sheet
from batchbench.sheets import one_line, sweep_sheet
from batchbench.sweep import check_sweep
from batchbench.units import show_bytes
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
        tables = out or Path("results") / scenario.name
        figures = plots or (out / "plots" if out else Path("plots") / scenario.name)
        if not dry_run:  # before a model is loaded
            require_writable(tables)
            require_free(tables)
            if not no_plots:
                _require_figures(figures)
        tokenizer = tokenizer_of(scenario, engine, needed=show_text)
        job = prepared(scenario, engine, audit=audit, trust=trust or (), tokenizer=tokenizer, on_trace=print_trace)
        if dry_run:
            _print_plan(job, output_format)
            return
        given = {"--numerics": numerics, "--repetitions": repetitions, "--warmup": warmup}
        command = _command(scenario_file, engine, given, audit, trust)
        progress = None if no_progress else ProgressLines(Console(stderr=True), len(job.requests))
        try:
            result = run(job, tables, observer=progress, resume=resume, command=command, say=_say)
        finally:
            if progress is not None:
                progress.close()
        texts = text_rows(job.requests, result, tokenizer) if show_text and tokenizer is not None else None
        _print_result(result, tables, [] if no_plots else draw(result, figures), texts, output_format)
        if warning := degenerate_warning(result.run["text_repetition"]):
            print(warning, file=sys.stderr)


def _say(line: str) -> None:
    print(one_line(line), file=sys.stderr)


def _require_figures(folder: Path) -> None:
    """Raise UsageError now, not after an hour's sweep."""
    require_writable(folder)
    if blocked := next((path for path in folder.glob("*.png") if path.is_dir()), None):
        raise UsageError(f"figure folder {folder}: {blocked.name} is a folder there")


def _command(
    scenario_file: Path, engine: str, given: Mapping[str, object], audit: bool, trust: Sequence[str] | None
) -> list[str]:
    """The arguments that make this result again: what decides it, without the folders of this machine.

    given: options and their values, None where they were left out.
    """
    arguments = ["sweep", scenario_file.name, "--engine", engine]
    for option, value in given.items():
        arguments += [] if value is None else [option, str(value)]
    for module in trust or ():
        arguments += ["--trust", module]
    return [*arguments, "--audit"] if audit else arguments


def _print_plan(job: Job, output_format: Format) -> None:
    scenario, requests, points, make_engine = job.scenario, job.requests, job.points, job.make_engine
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
