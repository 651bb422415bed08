"""Drives one engine through one workload, and is the only one to time it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from batchbench.errors import EngineFailed, OutcomeRefused
from batchbench.protocol import BenchEngine, Clock, IterationOutcome, RequestSpec, Text
from batchbench.timing import ContinuousTiming, IterationRecord, SequenceCheck

OnIteration = Callable[[int, IterationOutcome], None]
STALLED_ITERATIONS = 1000  # without a row: the engine is not going anywhere


def run_workload(
    engine: BenchEngine,
    requests: Sequence[RequestSpec],
    *,
    clock: Clock = time.perf_counter,
    on_iteration: OnIteration | None = None,
    choices: tuple[tuple[str, Any], ...] = (),
) -> ContinuousTiming:
    """Submit every request at its arrival, step until all are done, collect their texts.

    choices: what the point of a sweep changed of the engine, for the record.
    on_iteration is called between two iterations, where its time is nobody's latency.
    Raises EngineFailed if the engine stops early, stalls, or if its texts and its counts disagree;
    OutcomeRefused if it reports what cannot have happened.
    """
    arrivals = sorted(requests, key=lambda request: request.arrival)  # stable: then as listed
    check, reports = SequenceCheck(requests), engine.describe().reports
    if unknown := sorted(set(reports) - {field.name for field in fields(IterationOutcome)}):
        raise EngineFailed(f"the engine says that it reports {unknown[0]!r}, which is no counter")
    records: list[IterationRecord] = []
    texts: dict[str, Text] = {}
    iteration = submitted = stalled = 0
    began = clock()
    while submitted < len(arrivals) or engine.has_work:
        if not engine.has_work and submitted < len(arrivals):
            iteration = max(iteration, arrivals[submitted].arrival)  # nothing happens until then
        while submitted < len(arrivals) and arrivals[submitted].arrival <= iteration:
            engine.submit(arrivals[submitted])
            submitted += 1
        start = clock()
        outcome = engine.step()
        records.append(IterationRecord(iteration, outcome, clock() - start))
        check.add(iteration, outcome)
        if missing := [name for name in reports if getattr(outcome, name) is None]:
            raise OutcomeRefused(f"iteration {iteration}: the engine says that it reports {missing[0]}, but did not")
        stalled = 0 if outcome.issued_tokens else stalled + 1
        if stalled == STALLED_ITERATIONS:
            raise EngineFailed(f"{stalled} iterations in a row forwarded nothing, though the engine says it has work")
        for request_id in outcome.finished:
            texts[request_id] = engine.take(request_id)
        if on_iteration is not None:
            on_iteration(iteration, outcome)
        iteration += 1
    wall_s = clock() - began
    _check_complete(requests, texts)
    timing = ContinuousTiming(engine.describe(), tuple(requests), tuple(records), texts, wall_s, choices)
    kept = sum(len(text.token_ids) for text in texts.values())
    if timing.collected_tokens != kept:
        raise EngineFailed(f"the engine reported {timing.collected_tokens} tokens collected, its texts hold {kept}")
    return timing


def _check_complete(requests: Sequence[RequestSpec], texts: dict[str, Text]) -> None:
    for request in requests:
        if request.request_id not in texts:
            raise EngineFailed(f"the engine has no work left, but {request.request_id!r} never finished")
        text = texts[request.request_id]
        got = len(text.token_ids)
        if text.logit_gaps is not None and len(text.logit_gaps) != got:
            raise EngineFailed(f"{request.request_id!r} has {len(text.logit_gaps)} logit gaps for {got} tokens")
        if got != request.output_tokens:
            raise EngineFailed(f"{request.request_id!r} finished with {got} tokens of {request.output_tokens}")
