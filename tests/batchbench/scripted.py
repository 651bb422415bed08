"""Scripted runs for tests: outcomes written by hand against a clock moved by hand."""

from __future__ import annotations

from batchbench import IterationOutcome, RequestSpec, Text
from batchbench.adapters.fake import FakeClock, ScriptedEngine
from batchbench.driver import run_workload


def request(request_id, output=1, prompt=1, arrival=0):
    return RequestSpec(request_id, (1,) * prompt, output, arrival)


def it(issued, collected=None, **fields):
    """An outcome in which every row is kept unless said otherwise."""
    return IterationOutcome(issued, issued if collected is None else collected, **fields)


def play(requests, script, *, slots=2, pool_blocks=8, step_s=None, texts=None, numerics=None):
    """Drive a script and return its timing."""
    clock = FakeClock()
    texts = texts or {r.request_id: Text(tuple(range(r.output_tokens))) for r in requests}
    engine = ScriptedEngine(
        script, texts, slots=slots, pool_blocks=pool_blocks, clock=clock, step_s=step_s, numerics=numerics
    )
    return run_workload(engine, requests, clock=clock)
