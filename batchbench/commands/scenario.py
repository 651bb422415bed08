"""`batchbench validate` and `batchbench schema`: scenario files, before anything runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from batchbench.commands.prepare import print_trace
from batchbench.commands.shared import DebugOption, ScenarioFile, TrustOption, errors
from batchbench.running import prepared
from batchbench.scenario import Scenario, load_scenario
from batchbench.sheets import one_line
from batchbench.sweep import check_sweep
from batchbench.workload import workload_hash


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(validate)
    app.command()(schema)


def validate(
    scenario_file: ScenarioFile,
    engine: Annotated[str, typer.Option(help="Engine to check against: own, schedule.")] = "own",
    trust: TrustOption = None,
    debug: DebugOption = False,
) -> None:
    """Check a scenario on this machine, as a sweep would before it runs; print its workload's hash."""
    with errors(debug):
        scenario = load_scenario(scenario_file)
        job = prepared(scenario, engine, trust=trust or (), on_trace=print_trace)
        check_sweep(job.requests, job.points, job.make_engine, scenario.run.repetitions)
        pools = dict.fromkeys(point.pool_blocks for point in job.points)
        choices = len({point.choices for point in job.points})
        times = f", {choices} choices of the engine" if choices > 1 else ""
        print(
            f"{one_line(str(scenario_file))}: valid. {scenario.name}: {len(job.requests)} requests through "
            f"pools {', '.join(map(str, pools))}{times}; workload {workload_hash(job.requests)}"
        )


def schema(debug: DebugOption = False) -> None:
    """Print the JSON Schema of scenario files, for editors."""
    with errors(debug):
        print(json.dumps(Scenario.model_json_schema(), indent=2))
