"""Scripted runs for tests: outcomes written by hand against a clock moved by hand."""

from __future__ import annotations

import pyarrow as pa

from batchbench import IterationOutcome, RequestSpec, SweepObserver, Text
from batchbench.adapters.fake import FakeClock, ScriptedEngine
from batchbench.driver import RunObserver, run_workload
from batchbench.ledger import Ledger
from batchbench.protocol import IterationBatch, Point
from batchbench.results import ResultWriter, load_result
from batchbench.service import Slo
from batchbench.tables import point_key, point_tables


def request(request_id, output=1, prompt=1, arrival=0):
    return RequestSpec(request_id, (1,) * prompt, output, arrival)


def it(issued, collected=None, **fields):
    """An outcome in which every row is kept unless said otherwise."""
    return IterationOutcome(issued, issued if collected is None else collected, **fields)


def decoding(iterations, rows=1):
    """A batch of iterations in which so many requests decode and nothing else happens."""
    same, none = [rows] * iterations, [0] * iterations
    return IterationBatch(same, same, same, same, none, none, none, ())


class Outcomes(RunObserver):
    """Keeps every outcome and its iteration."""

    def __init__(self):
        self.outcomes = []

    def on_iteration(self, iteration, outcome):
        self.outcomes.append((iteration, outcome))


class Tables(dict):
    """A run's ledger in memory: table name -> Arrow table."""

    def ledger(self, point, engine):
        self.collected = {}
        self.writing = Ledger(point_key(0, point, engine), lambda n, t: self.collected.setdefault(n, []).append(t))
        return self.writing

    def close(self):
        self.writing.close()
        self.update({name: pa.concat_tables(parts) for name, parts in self.collected.items()})


def tables_of(requests, script, slo=None, reference=None, **options):
    """Play a script: every table of the run, paired with the reference if there is one, as lists of rows."""
    tables = Tables()
    timing = play(requests, script, tables=tables, **options)
    found = {**tables, **point_tables(0, timing, reference, slo or Slo())}
    return {name: table.to_pylist() for name, table in found.items()}


class Saves(SweepObserver):
    """Writes every point as it runs, as a command does."""

    def __init__(self, folder):
        self.writer = ResultWriter(folder)
        self.writer.open()

    def ledger(self, point, engine):
        return self.writer.open_point(point, engine)

    def close(self):
        """The point stays open until its timing is there."""

    def on_timing(self, timing):
        self.writer.save_point(timing)


def result_of(folder, run, requests, script, **options):
    """Play a script into a folder and read it back."""
    saves = Saves(folder)
    timing = play(requests, script, tables=saves, **options)
    saves.on_timing(timing)
    saves.writer.join([timing], run)
    return load_result(folder)


def play(requests, script, *, slots=2, pool_blocks=8, step_s=None, texts=None, numerics=None, tables=None, pacing=None):
    """Drive a script and return its timing."""
    clock = FakeClock()
    texts = texts or {r.request_id: Text(tuple(range(r.output_tokens))) for r in requests}
    engine = ScriptedEngine(
        script, texts, slots=slots, pool_blocks=pool_blocks, clock=clock, step_s=step_s, numerics=numerics
    )
    sink = None if tables is None else tables.ledger(Point(pool_blocks), engine.describe())
    timing = run_workload(engine, requests, clock=clock, sink=sink, pacing=pacing)
    if tables is not None:
        tables.close()
    return timing
