"""What the command line changes of a scenario, and what it says of its trace."""

from __future__ import annotations

import sys
from enum import StrEnum

from batchbench.scenario import Scenario
from batchbench.sheets import one_line
from batchbench.traces import Trace


class Numerics(StrEnum):
    """What is promised of a request's bits."""

    exact = "exact"
    fast = "fast"


def with_numerics(scenario: Scenario, numerics: Numerics | None) -> Scenario:
    """The scenario with the command line's choice, where there is one."""
    if numerics is None:
        return scenario
    engine = scenario.engine.model_copy(update={"numerics": numerics.value})
    return scenario.model_copy(update={"engine": engine})


def print_trace(trace: Trace) -> None:
    """On stderr, what became of its rows."""
    for line in (f"{trace.path}: {trace.format}", *trace.tally.lines()):
        print(one_line(f"trace: {line}"), file=sys.stderr)


def with_run(scenario: Scenario, repetitions: int | None, warmup: int | None) -> Scenario:
    """The scenario with the command line's numbers of runs, where they are given."""
    given = {"repetitions": repetitions, "warmup": warmup}
    run = scenario.run.model_copy(update={name: value for name, value in given.items() if value is not None})
    return scenario.model_copy(update={"run": run})
