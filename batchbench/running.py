"""Runs a scenario into a result folder: what the command line does, and the pytest plugin."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from batchbench.adapters import engine_factory, engine_tokenizer
from batchbench.asking import describe, require_described
from batchbench.clocks import IterationCost
from batchbench.demand import resolve_points
from batchbench.driver import Limits, Pacing
from batchbench.environment import git_revision, machine, versions
from batchbench.errors import CountsDiffer, TextsDiffer, UsageError
from batchbench.protocol import (
    EngineDescription,
    EngineFactory,
    IterationBatch,
    IterationOutcome,
    Point,
    RequestSpec,
    Tokenizer,
)
from batchbench.recorder import LedgerSink
from batchbench.repetitions import Finished, Measured
from batchbench.results import Result, ResultWriter, load_result, require_writable
from batchbench.scenario import Scenario, SweepPoint
from batchbench.service import Slo
from batchbench.status import StatusWriter
from batchbench.sweep import Pass, SweepObserver, check_sweep, sweep_pool_sizes
from batchbench.timing import ContinuousTiming
from batchbench.traces import Trace
from batchbench.units import show_count
from batchbench.workload import build_requests, needs_tokenizer, workload_hash

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A scenario, ready to run. engine: as the first point builds it. trace: what its requests are from, or None."""

    scenario: Scenario
    requests: tuple[RequestSpec, ...]
    points: tuple[Point, ...]
    make_engine: EngineFactory
    engine: EngineDescription
    trace: Trace | None

    @cached_property
    def about(self) -> dict[str, Any]:
        """What run.json says of it before it runs, as JSON has it; points: of the whole sweep, in order."""
        engine, declared = self.engine, self.scenario.sweep.declared
        varied = {"pool_blocks", "versions", *(name for _, choices in declared for name, _ in choices)}
        calibration = self.scenario.engine.calibration
        about = {
            "scenario": self.scenario.model_dump(mode="json"),
            "workload_hash": workload_hash(self.requests),
            "trace": None if self.trace is None else {"format": self.trace.format, **asdict(self.trace.tally)},
            "inputs": {}
            if calibration is None
            else {"calibration": sha256(Path(calibration).read_bytes()).hexdigest()},
            # What varies is told by the tables: that of the first point describes nothing.
            "engine": {k: v for k, v in asdict(engine).items() if k not in varied},
            "versions": {**versions(), **engine.versions},
            "machine": machine(),
            "git": git_revision(),
            "points": [point.name for point in self.points],
        }
        found: dict[str, Any] = json.loads(json.dumps(about))
        return found


def prepared(
    scenario: Scenario,
    engine: str | EngineFactory = "own",
    *,
    audit: bool = False,
    trust: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> Job:
    """Make its requests and points.

    engine: "own", "schedule", or a factory of another. trust: modules that its victim rules may be imported from.
    tokenizer: the engine's, if texts are wanted; else only where prompts are texts. on_trace: told of a trace that was
    read. Raises UsageError.
    """
    refuse_untrusted(scenario, trust)
    refuse_untimed(scenario, engine)
    if tokenizer is None and isinstance(engine, str):
        tokenizer = tokenizer_of(scenario, engine)
    requests, trace = requests_of(scenario, tokenizer, on_trace)
    make_engine = engine_factory(engine, scenario.engine, audit=audit) if isinstance(engine, str) else engine
    make_schedule = engine_factory("schedule", scenario.engine)
    points = tuple(resolve_points(scenario.sweep, requests, make_engine, make_schedule, pacing_of(scenario)))
    about = describe(make_engine, points[0])
    require_described(about, _asked(scenario, points[0]), f"scenario {scenario.name}")
    return Job(scenario, requests, points, make_engine, about, trace)


def _asked(scenario: Scenario, point: Point) -> dict[str, Any]:
    """What the scenario writes under [engine] of the things that a point could change, unless this one does."""
    written = scenario.engine.model_fields_set & SweepPoint.model_fields.keys()
    return {name: getattr(scenario.engine, name) for name in written} | dict(point.choices)


def run(
    job: Job,
    folder: Path,
    *,
    observer: SweepObserver | None = None,
    resume: bool = False,
    command: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Result:
    """Run it, or with `resume` what is missing of it, and open the result.

    command: the arguments that make the result again, for the record. say: takes a line on what was resumed. Raises
    what `sweep_pool_sizes` raises; UsageError for a folder that cannot be written, is another sweep's, or holds what
    cannot be resumed.
    """
    with ResultWriter(folder, slo_of(job.scenario)) as writer:
        _complete(job, _Saves(job, writer, observer or SweepObserver(), resume, say), writer, command)
    return load_result(folder)


def run_scenario(
    scenario: Scenario,
    folder: str | Path,
    engine: str | EngineFactory = "own",
    *,
    tokenizer: Tokenizer | None = None,
) -> Result:
    """Run a scenario into a folder, and open the result.

    engine: "own", "schedule", or the factory of another (docs/engines.md); tokenizer: that one's, which prompts that
    are texts need. Raises UsageError, and what `sweep_pool_sizes` raises.
    """
    return run(prepared(scenario, engine, tokenizer=tokenizer), Path(folder))


def _complete(job: Job, saves: _Saves, writer: ResultWriter, command: Sequence[str]) -> None:
    limits = job.scenario.run
    if saves.resume:
        check_sweep(job.requests, job.points, job.make_engine, limits.repetitions)
        if writer.complete(job.about):
            saves.say("resumed: the result is complete, there is nothing to run")
            return
    try:
        timings = sweep_pool_sizes(
            job.requests,
            job.points,
            job.make_engine,
            pacing=pacing_of(job.scenario),
            observer=saves,
            warmup=limits.warmup,
            repetitions=limits.repetitions,
            limits=Limits(limits.max_iterations, limits.max_s),
        )
    except (TextsDiffer, CountsDiffer):
        writer.discard_parts()  # no timings: not on disk either
        raise
    about = {key: value for key, value in job.about.items() if key != "points"}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    made = {"created": created, "command": list(command), "text_repetition": timings[0].text_repetition}
    writer.join(timings, made | about)


class _Saves(SweepObserver):
    """Saves every point as it finishes, says how the sweep stands, and passes everything on."""

    def __init__(self, job: Job, writer: ResultWriter, following: SweepObserver, resume: bool, say: Say) -> None:
        self._job, self._writer, self.resume, self.say = job, writer, resume, say
        self._next = StatusWriter(writer.folder, len(job.requests), following)

    def on_start(self, points: Sequence[Point]) -> None:
        require_writable(self._writer.folder)
        self._writer.open(self._job.about, resume=self.resume)
        self._next.on_start(points)

    def finished(self, requests: Sequence[RequestSpec]) -> Finished:
        repetitions = self._job.scenario.run.repetitions
        found = self._writer.finished(self._job.points, requests, repetitions)
        if runs := len(found.timings) + len(found.repeated):
            self.say(f"resumed: {runs} of {show_count(len(self._job.points) * repetitions, 'run')} finished")
        return found

    def on_point(self, point: Point, which: Pass) -> None:
        self._next.on_point(point, which)

    def on_iteration(self, iteration: int, outcome: IterationOutcome) -> None:
        self._next.on_iteration(iteration, outcome)

    def on_batch(self, first: int, batch: IterationBatch) -> None:
        self._next.on_batch(first, batch)

    def ledger(self, point: Point, engine: EngineDescription) -> LedgerSink | None:
        return self._writer.open_point(point, engine)

    def on_timing(self, timing: ContinuousTiming) -> None:
        self._writer.save_point(timing)
        self._next.on_timing(timing)

    def on_repeated(self, point: Point, which: Pass) -> None:
        self._next.on_repeated(point, which)

    def on_measured(self, place: int, which: Pass, run: Measured) -> None:
        self._writer.save_repetition(which.number, place, run)


# ---- what a scenario asks for ------------------------------------------------------------------


def requests_of(
    scenario: Scenario, tokenizer: Tokenizer | None, on_trace: Callable[[Trace], None]
) -> tuple[tuple[RequestSpec, ...], Trace | None]:
    """The requests, and the trace that they are from, if they are; `on_trace` is told of it."""
    traces: list[Trace] = []
    requests = build_requests(scenario.workload, tokenizer, scenario.clock, traces.append)
    for trace in traces:
        on_trace(trace)
    return requests, traces[0] if traces else None


def pacing_of(scenario: Scenario) -> Pacing:
    """The clock that a scenario declares."""
    cost = IterationCost.of_seconds(**scenario.virtual.model_dump()) if scenario.virtual else None
    return Pacing(scenario.clock, cost)


def slo_of(scenario: Scenario) -> Slo:
    """The objectives that it declares; none, if it has none."""
    return Slo(**scenario.slo.model_dump()) if scenario.slo else Slo()


def refuse_untimed(scenario: Scenario, engine: object) -> None:
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
