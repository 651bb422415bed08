"""The command line: the program and its commands, thin over the library."""

from __future__ import annotations

from typing import Annotated

import typer

from batchbench.commands import compare, cost, gate, inspect, machine, plot, report, scenario, sweep, trace, watch
from batchbench.environment import versions

app = typer.Typer(
    name="batchbench",
    help="Benchmark LLM inference under KV-cache pressure: one workload, several pool sizes, one text.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


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


for commands in (sweep, gate, compare, report, trace, watch, scenario, plot, machine, cost, inspect):
    commands.register(app)  # in the order of the help
