"""`batchbench validate` and `batchbench schema`: scenario files, before anything runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from batchbench.adapters import engine_factory
from batchbench.commands.prepare import pacing_of, refuse_untimed, refuse_untrusted, requests_of, tokenizer_of
from batchbench.commands.shared import DebugOption, ScenarioFile, TrustOption, errors
from batchbench.demand import resolve_points
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
        refuse_untrusted(scenario, trust)
        refuse_untimed(scenario, engine)
        requests, _ = requests_of(scenario, tokenizer_of(scenario, engine))
        make_engine = engine_factory(engine, scenario.engine)
        make_schedule = engine_factory("schedule", scenario.engine)
        points = resolve_points(scenario.sweep, requests, make_engine, make_schedule, pacing_of(scenario))
        check_sweep(requests, points, make_engine, scenario.run.repetitions)
        pools = dict.fromkeys(point.pool_blocks for point in points)
        choices = len({point.choices for point in points})
        times = f", {choices} choices of the engine" if choices > 1 else ""
        print(
            f"{one_line(str(scenario_file))}: valid. {scenario.name}: {len(requests)} requests through "
            f"pools {', '.join(map(str, pools))}{times}; workload {workload_hash(requests)}"
        )


def schema(debug: DebugOption = False) -> None:
    """Print the JSON Schema of scenario files, for editors."""
    with errors(debug):
        print(json.dumps(Scenario.model_json_schema(), indent=2))
