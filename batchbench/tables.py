"""A timing as typed Arrow tables, in the columns of schema.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from batchbench.predict import floor_iterations
from batchbench.protocol import Admission, Eviction, Prefill
from batchbench.schema import TABLES, arrow_schema
from batchbench.timing import ContinuousTiming, mean, reference_timing, total

Row = dict[str, Any]
_CHOSEN = ("slots", "block_size", "watermark_blocks", "rules", "victim", "admission", "admission_gate", "token_budget",
           "reclaim", "swap_blocks", "prefix_cache", "batching")  # fmt: skip
Admitted = dict[str, list[tuple[int, Admission]]]  # request id -> its admissions and their iterations


def arrow_tables(timings: Sequence[ContinuousTiming], *, first: int = 0, paired: bool = True) -> dict[str, pa.Table]:
    """Every table over these points of a sweep, the first of them its `first`.

    paired: compare latencies with those of the reference pool among them; else those columns are null.
    """
    rows: dict[str, list[Row]] = {name: [] for name in TABLES}
    for point, timing in enumerate(timings, first):
        reference = reference_timing(timings, timing) if paired else None
        key = {
            "point": point,
            "pool_blocks": timing.pool_blocks,
            "choices": timing.point.label,
            "numerics": timing.engine.numerics,
        }
        for name, found in _rows(timing, reference).items():
            rows[name] += (key | row for row in found)
    # from_pandas turns not-a-number into null: a missing control group is missing, not a value.
    return {
        name: pa.table(
            [
                pa.array([row[field.name] for row in rows[name]], type=field.type, from_pandas=True)
                for field in arrow_schema(name)
            ],
            schema=arrow_schema(name),
        )
        for name in TABLES
    }


def _rows(timing: ContinuousTiming, reference: ContinuousTiming | None) -> dict[str, Iterable[Row]]:
    admitted = _admissions_of(timing)
    return {
        "pools": [_pool_row(timing, reference)],
        "requests": _request_rows(timing, reference, admitted),
        "iterations": _iteration_rows(timing),
        "admissions": _admission_rows(timing),
        "prefills": _prefill_rows(timing),
        "evictions": _eviction_rows(timing, admitted),
        "texts": (
            {"request_id": request.request_id, **dataclasses.asdict(timing.texts[request.request_id])}
            for request in timing.requests
            if timing.engine.computes_text
        ),
    }


def _pool_row(t: ContinuousTiming, reference: ContinuousTiming | None) -> Row:
    return {
        "pool_bytes": t.engine.pool_bytes,
        **{name: getattr(t.engine, name) for name in _CHOSEN},
        "requests": len(t.requests),
        "iterations": sum(r.outcome.issued_tokens > 0 for r in t.iterations),
        "floor_iterations": floor_iterations(
            t.requests, t.engine.slots, t.engine.block_size, t.pool_blocks, shared=bool(t.engine.prefix_cache)
        ),
        "occupancy": t.occupancy,
        "utilization": t.utilization,
        "issued_tokens": t.issued_tokens,
        "collected_tokens": t.collected_tokens,
        "waste_fraction": t.waste_fraction,
        "forward_tokens": t.forward_tokens,
        "padded_tokens": t.padded_tokens,
        "prefill_rows": t.prefill_rows,
        "recomputed_tokens": t.recomputed_tokens,
        "rebuilt_tokens": t.rebuilt_tokens,
        "recompute_fraction": t.recompute_fraction,
        "recompute_tax": t.recompute_tax,
        "recovered_tokens": t.recovered_tokens,
        "shared_tokens": t.shared_tokens,
        "swapped_tokens": t.swapped_tokens,
        "swapped_bytes": t.swapped_bytes,
        "copy_s": t.copy_s,
        "preemptions": t.preemptions,
        "preemptions_per_request": t.preemptions_per_request,
        "requests_preempted": t.requests_preempted,
        "thrashes": t.thrashes,
        "recomputed_tokens_per_preemption": t.recomputed_tokens_per_preemption,
        "mean_latency_iterations": mean(t.latencies.values()),
        "max_latency_iterations": max(t.latencies.values()),
        "preempted_latency_iterations": None if t.preemptions is None else mean(t.preempted_latencies),
        "straight_through_latency_iterations": None if t.preemptions is None else mean(t.straight_through_latencies),
        "preemption_latency_penalty": t.preemption_latency_penalty,
        "preemption_latency_penalty_s": t.preemption_latency_penalty_s,
        "paired_latency_penalty": None if reference is None else t.paired_latency_penalty(reference),
        "reference_pool_blocks": None if reference is None else reference.pool_blocks,
        "engine_s": t.engine_s,
        "wall_s": t.wall_s,
        "text_digest": t.text_digest,
    }


def _request_rows(t: ContinuousTiming, reference: ContinuousTiming | None, admitted: Admitted) -> Iterable[Row]:
    ratios = {} if reference is None else t.paired_latency_ratios(reference)
    prefilled = _prefills_of(t)
    for request in t.requests:
        rid = request.request_id
        evicted_at = t.preempted_at.get(rid, ())
        stays = admitted.get(rid, [])
        row = {
            "request_id": rid,
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "arrival_iteration": request.arrival,
            "finished_iteration": t.finished_at[rid],
            "latency_iterations": t.latencies[rid],
            "latency_s": t.latencies_s[rid],
            "queued_iterations": None,
            "evicted_iterations": None,
            "preemptions": None if t.preemptions is None else len(evicted_at),
            "recomputed_tokens": None,
            "rebuilt_tokens": None,
            "recovered_tokens": None,
            "swapped_tokens": None,
            "paired_latency_ratio": ratios.get(rid),
        }
        if t.preemptions is not None and len(stays) == len(evicted_at) + 1:
            resumes = stays[1:]
            row["queued_iterations"] = stays[0][0] - request.arrival
            row["evicted_iterations"] = sum(at for at, _ in resumes) - sum(evicted_at)
            row["recovered_tokens"] = total(admission.recovered_tokens for _, admission in resumes)
            row["swapped_tokens"] = total(admission.swapped_tokens for _, admission in resumes)
            own = None if prefilled is None else prefilled.get(rid, [])
            row["recomputed_tokens"] = None if own is None else sum(p.positions for _, p in own if p.resumed)
            row["rebuilt_tokens"] = None if own is None else sum(p.rebuilt_tokens for _, p in own)
        yield row


def _iteration_rows(t: ContinuousTiming) -> Iterable[Row]:
    for record in t.iterations:
        outcome = record.outcome
        yield {
            "iteration": record.iteration,
            "issued_tokens": outcome.issued_tokens,
            "collected_tokens": outcome.collected_tokens,
            "forward_tokens": outcome.forward_tokens,
            "padded_tokens": outcome.padded_tokens,
            "prefill_rows": outcome.prefill_rows,
            "recomputed_tokens": outcome.recomputed_tokens,
            "rebuilt_tokens": outcome.rebuilt_tokens,
            "swapped_out_tokens": outcome.swapped_out_tokens,
            "swapped_in_tokens": outcome.swapped_in_tokens,
            "preemptions": None if outcome.preempted is None else len(outcome.preempted),
            "finished": len(outcome.finished),
            "running": outcome.running,
            "waiting": outcome.waiting,
            "free_blocks": outcome.free_blocks,
            "step_s": record.step_s,
        }


def _admission_rows(t: ContinuousTiming) -> Iterable[Row]:
    for record in t.iterations:
        for admission in record.outcome.admissions or ():
            yield {"iteration": record.iteration, **dataclasses.asdict(admission)}


def _prefill_rows(t: ContinuousTiming) -> Iterable[Row]:
    for record in t.iterations:
        for prefill in record.outcome.prefills or ():
            yield {"iteration": record.iteration, **dataclasses.asdict(prefill)}


def _eviction_rows(t: ContinuousTiming, admitted: Admitted) -> Iterable[Row]:
    nth: dict[str, int] = {}
    prefilled = _prefills_of(t)
    for record in t.iterations:
        details = record.outcome.evictions or [Eviction(rid) for rid in record.outcome.preempted or ()]
        for eviction in details:
            rid = eviction.request_id
            nth[rid] = nth.get(rid, 0) + 1
            row = {"iteration": record.iteration, **dataclasses.asdict(eviction)}
            row |= dict.fromkeys(("resumed_iteration", "rebuilt_tokens", "recovered_tokens", "swapped_tokens"))
            if len(admitted.get(rid, ())) > nth[rid]:  # the first admission is followed by one resume per eviction
                row["resumed_iteration"], resume = admitted[rid][nth[rid]]
                row["recovered_tokens"], row["swapped_tokens"] = resume.recovered_tokens, resume.swapped_tokens
                if prefilled is not None:
                    evictions = t.preempted_at[rid]
                    until = evictions[nth[rid]] if len(evictions) > nth[rid] else math.inf
                    own = prefilled.get(rid, [])
                    row["rebuilt_tokens"] = sum(p.rebuilt_tokens for at, p in own if record.iteration <= at < until)
            yield row


def _admissions_of(t: ContinuousTiming) -> Admitted:
    """Every request's admissions; empty where the engine does not report them."""
    admitted: Admitted = {}
    for record in t.iterations:
        if record.outcome.admissions is None:
            return {}
        for admission in record.outcome.admissions:
            admitted.setdefault(admission.request_id, []).append((record.iteration, admission))
    return admitted


def _prefills_of(t: ContinuousTiming) -> dict[str, list[tuple[int, Prefill]]] | None:
    """Every request's prefill rows and their iterations; None where the engine does not report them."""
    found: dict[str, list[tuple[int, Prefill]]] = {}
    for record in t.iterations:
        if record.outcome.prefills is None:
            return None
        for prefill in record.outcome.prefills:
            found.setdefault(prefill.request_id, []).append((record.iteration, prefill))
    return found
