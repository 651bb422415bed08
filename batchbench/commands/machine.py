"""`batchbench doctor` and `batchbench calibrate`: what this machine gives, and what evictions cost on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchbench.adapters import examine_machine, measure_costs
from batchbench.calibration import MAX_TOKENS, require_savable, save_calibration
from batchbench.commands.cost_report import calibration_lines, calibration_sheet
from batchbench.commands.prepare import print_trace
from batchbench.commands.present import Format, doctor_lines, promise_sheet
from batchbench.commands.shared import DebugOption, FormatOption, errors, show
from batchbench.running import requests_of, tokenizer_of
from batchbench.scenario import load_scenario
from batchbench.sheets import one_line


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(doctor)
    app.command()(calibrate)


def doctor(
    model: Annotated[str | None, typer.Option(help="Checkpoint to test as well: a folder or GGUF file.")] = None,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads that the self-test runs with.")] = 1,
    output_format: FormatOption = Format.table,
    debug: DebugOption = False,
) -> None:
    """Say what this machine gives: decoders and whether they keep their promise, versions, measured ceilings.

    Exit code 1 if the default decoder does not keep its promise.
    """
    with errors(debug):
        report = examine_machine(model, threads)
        show(report, [promise_sheet(report["numerics"])], doctor_lines(report), output_format)
        if not report["ok"]:
            raise typer.Exit(1)


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
    with errors(debug):
        scenario = load_scenario(scenario_file)
        require_savable(out)
        if max_tokens is None:
            requests, _ = requests_of(scenario, tokenizer_of(scenario, "own"), print_trace)
            max_tokens = max(1, *(r.prompt_tokens + r.output_tokens - 2 for r in requests))  # cached by the last token
        found = measure_costs(scenario.engine, max_tokens, rounds, lambda done: None)
        save_calibration(found, out)
        lines = [one_line(f"calibration: {out}"), *calibration_lines(found)]
        show(found.model_dump(mode="json"), [calibration_sheet(found)], lines, output_format)
