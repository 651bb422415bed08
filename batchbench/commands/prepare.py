"""What a scenario asks for, made ready for a run: its clock, objectives, tokenizer, and whether its code is trusted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum

from batchbench.adapters import engine_tokenizer
from batchbench.clocks import IterationCost
from batchbench.driver import Pacing
from batchbench.errors import UsageError
from batchbench.protocol import RequestSpec, Tokenizer
from batchbench.scenario import Scenario
from batchbench.service import Slo
from batchbench.sheets import one_line
from batchbench.traces import Trace
from batchbench.workload import build_requests, needs_tokenizer


class Numerics(StrEnum):
    """What is promised of a request's bits."""

    exact = "exact"
    fast = "fast"


def pacing_of(scenario: Scenario) -> Pacing:
    """The clock that a scenario declares."""
    cost = IterationCost.of_seconds(**scenario.virtual.model_dump()) if scenario.virtual else None
    return Pacing(scenario.clock, cost)


def slo_of(scenario: Scenario) -> Slo:
    """The objectives that it declares; none, if it has none."""
    return Slo(**scenario.slo.model_dump()) if scenario.slo else Slo()


def with_numerics(scenario: Scenario, numerics: Numerics | None) -> Scenario:
    """The scenario with the command line's choice, where there is one."""
    if numerics is None:
        return scenario
    engine = scenario.engine.model_copy(update={"numerics": numerics.value})
    return scenario.model_copy(update={"engine": engine})


def requests_of(scenario: Scenario, tokenizer: Tokenizer | None) -> tuple[tuple[RequestSpec, ...], Trace | None]:
    """The requests, and the trace they are from, if they are; says on stderr what became of the trace's rows."""
    traces: list[Trace] = []
    requests = build_requests(scenario.workload, tokenizer, scenario.clock, traces.append)
    for trace in traces:
        for line in (f"{trace.path}: {trace.format}", *trace.tally.lines()):
            print(one_line(f"trace: {line}"), file=sys.stderr)
    return requests, traces[0] if traces else None


def with_run(scenario: Scenario, repetitions: int | None, warmup: int | None) -> Scenario:
    """The scenario with the command line's numbers of runs, where they are given."""
    given = {"repetitions": repetitions, "warmup": warmup}
    run = scenario.run.model_copy(update={name: value for name, value in given.items() if value is not None})
    return scenario.model_copy(update={"run": run})


def refuse_untimed(scenario: Scenario, engine: str) -> None:
    """Raise UsageError for a schedule in real time: before anything is written, not by the run's clock."""
    if scenario.clock == "wall" and engine == "schedule":
        raise UsageError("clock = 'wall': a schedule computes nothing, so it takes no real time; use 'virtual'")


def refuse_untrusted(scenario: Scenario, trust: Sequence[str] | None) -> None:
    """A scenario is data: the code that it names runs only if the command line says so."""
    named = [dict(choices).get("victim") for _, choices in scenario.sweep.declared]
    for victim in [scenario.engine.victim, *named]:
        module, colon, _ = (victim or "").partition(":")
        if colon and module not in (trust or ()):
            raise UsageError(
                f"victim = {victim!r} would import the module {module!r}; if you trust it, add --trust {module}"
            )


def tokenizer_of(scenario: Scenario, engine: str, *, needed: bool = False) -> Tokenizer | None:
    """The engine's, if the prompts are texts or if it is needed anyway; a model with random prompts may have none."""
    wanted = needed or needs_tokenizer(scenario.workload)
    return engine_tokenizer(engine, scenario.engine) if wanted else None
