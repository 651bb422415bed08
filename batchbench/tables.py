"""A finished run as typed Arrow tables: its point, its requests, its service figures, its repetitions, its texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from batchbench.clocks import NS
from batchbench.ledger import rows_table
from batchbench.predict import floor_iterations
from batchbench.protocol import EngineDescription, Point
from batchbench.repetitions import repetitions_of, statistics_of
from batchbench.schema import MAY_DIFFER
from batchbench.service import PERCENTILES, Parts, Service, Slo, percentiles
from batchbench.timing import ContinuousTiming, mean

Columns = dict[str, Any]
_CHOSEN = ("slots", "block_size", "watermark_blocks", "rules", "victim", "admission", "admission_gate", "token_budget",
           "reclaim", "swap_blocks", "prefix_cache", "batching")  # fmt: skip
_PARTS = ("queued", "returning", "rebuilding", "decoding")


def point_key(place: int, point: Point, engine: EngineDescription) -> Columns:
    """The columns that lead every table."""
    return {
        "point": place,
        "pool_blocks": engine.pool_blocks,
        "choices": point.label,
        "numerics": engine.numerics,
    }


def point_tables(
    place: int, timing: ContinuousTiming, reference: ContinuousTiming | None, slo: Slo
) -> dict[str, pa.Table]:
    """The tables that a finished run gives, beside those of its ledger.

    reference: what latencies are paired with; None leaves those columns null.
    """
    key, service = point_key(place, timing.point, timing.engine), Service(timing)
    paired = None if reference is None else Service(reference)
    columns = {
        "pools": {name: [value] for name, value in _pool(timing, service, reference, paired, slo).items()},
        "requests": _requests(timing, service, paired, slo),
        "service": _transposed(_service_rows(service)),
        "repetitions": _transposed([{"repetition": n, **run} for n, run in enumerate(repetitions_of(timing))]),
        "statistics": _transposed(list(statistics_of(timing))),
        "texts": _texts(timing),
    }
    return {name: rows_table(name, key, found) for name, found in columns.items()}


def _pool(
    t: ContinuousTiming, service: Service, reference: ContinuousTiming | None, paired: Service | None, slo: Slo
) -> Columns:
    return {
        "pool_bytes": t.engine.pool_bytes,
        **{name: getattr(t.engine, name) for name in _CHOSEN},
        "clock": t.clock,
        "counters": MAY_DIFFER if t.clock == "wall" else "exact",
        "repetitions": max(1, len(t.repetitions)),
        "requests": len(t.requests),
        "iterations": t.busy_iterations,
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
        **_fairness(t, service, paired),
        "mean_used_blocks": t.mean_used_blocks,
        "peak_used_blocks": t.peak_used_blocks,
        "fragmentation": t.fragmentation,
        **_throughput(t, service, slo),
        "engine_s": t.engine_s,
        "wall_s": t.wall_s,
        "text_digest": t.text_digest,
    }


def _fairness(t: ContinuousTiming, service: Service, paired: Service | None) -> Columns:
    """What the victims lost against the reference pool, and how evictions spread over requests."""
    found: Columns = dict.fromkeys(f"victims_{part}_iterations" for part in ("extra", *_PARTS))
    found["worst_paired_latency_ratio"] = None if paired is None else float(np.max(service.latency / paired.latency))
    evictions = np.bincount(np.asarray(t.record.evictions.request, dtype=np.int64), minlength=len(t.requests))
    victims = evictions > 0
    if paired is not None and service.parts is not None and paired.parts is not None and victims.any():
        found["victims_extra_iterations"] = _mean(service.latency - paired.latency, victims)
        for part in _PARTS:
            added = getattr(service.parts, part) - getattr(paired.parts, part)
            found[f"victims_{part}_iterations"] = _mean(added, victims)
    reported = t.preemptions is not None
    return found | {
        "share_preempted": victims.mean() if reported else None,
        "preemptions_per_victim": _mean(evictions, victims) if reported and victims.any() else None,
        "most_preemptions": evictions.max() if reported else None,
    }


def _mean(values: Any, chosen: Any) -> float:
    """Exactly rounded: a sum of integers over their number."""
    return int(values[chosen].sum()) / int(chosen.sum())


def _throughput(t: ContinuousTiming, service: Service, slo: Slo) -> Columns:
    duration = service.duration_s
    kept = None if slo == Slo() else service.within(slo)
    good = None if kept is None else int(kept.sum())
    return {
        "collected_per_iteration": t.collected_tokens / t.busy_iterations,
        "forward_per_iteration": t.forward_tokens / t.busy_iterations,
        "duration_s": duration,
        "collected_per_s": t.collected_tokens / duration if duration else None,
        "forward_per_s": t.forward_tokens / duration if duration else None,
        "goodput_requests": good,
        "goodput_fraction": None if good is None else good / len(t.requests),
        "goodput_per_s": good / duration if good is not None and duration else None,
    }


def _requests(t: ContinuousTiming, service: Service, paired: Service | None, slo: Slo) -> Columns:
    count, record = len(t.requests), t.record
    unknown = [None] * count
    evictions = np.bincount(np.asarray(record.evictions.request, dtype=np.int64), minlength=count)
    told = t.preemptions is not None and service.admitted is not None  # resumes are told from first admissions
    prefilled = told and "prefills" not in record.unsaid
    kept = None if slo == Slo() else service.within(slo)
    columns = {
        "request_id": [request.request_id for request in t.requests],
        "prompt_tokens": [request.prompt_tokens for request in t.requests],
        "output_tokens": service.outputs,
        "arrival_iteration": service.arrived,
        "arrival_s": service.arrival_ns / NS if t.timed else None,
        "finished_iteration": service.finished,
        "latency_iterations": service.latency,
        "latency_s": service.latency_s,
        "ttft_iterations": service.ttft,
        "ttft_s": service.ttft_s,
        "tpot_iterations": service.tpot,
        "tpot_s": service.tpot_s,
        "queued_iterations": service.queued if told else None,
        "queued_s": service.queued_s if told else None,
        **_part_columns(service),
        "meets_slo": kept,
        "preemptions": evictions if t.preemptions is not None else None,
        "recomputed_tokens": record.recomputed if prefilled else None,
        "rebuilt_tokens": record.rebuilt if prefilled else None,
        "recovered_tokens": _known(record.recovered) if told else None,
        "swapped_tokens": _known(record.swapped) if told else None,
        "paired_latency_ratio": None if paired is None else service.latency / paired.latency,
    }
    return {name: unknown if values is None else values for name, values in columns.items()}


def _part_columns(service: Service) -> Columns:
    """What the latency is made of, in iterations and in seconds; `queued` is known even where the others are not."""
    empty = Parts(*[None] * 4)  # type: ignore[arg-type]  # every column null
    in_iterations, in_ns = service.parts or empty, service.parts_ns or empty
    return {f"{part}_iterations": getattr(in_iterations, part) for part in _PARTS[1:]} | {
        f"{part}_s": None if getattr(in_ns, part) is None else getattr(in_ns, part) / NS for part in _PARTS[1:]
    }


def _known(sums: Iterable[int]) -> list[int | None]:
    return [None if value < 0 else value for value in sums]


def _service_rows(service: Service) -> list[Columns]:
    rows = []
    for metric, unit, values in (
        ("ttft", "iterations", service.ttft),
        ("tpot", "iterations", service.tpot),
        ("e2e", "iterations", service.latency),
        ("queue", "iterations", service.queued),
        ("ttft", "s", service.ttft_s),
        ("tpot", "s", service.tpot_s),
        ("e2e", "s", service.latency_s),
        ("queue", "s", service.queued_s),
    ):
        if values is not None:
            rows.append(service_row(metric, unit, values, None))
    for unit, gaps in (("iterations", service.gaps), ("s", service.gaps_s)):
        if gaps is not None:
            rows.append(service_row("itl", unit, *gaps))
    return rows


def service_row(metric: str, unit: str, values: Any, counts: Any) -> Columns:
    """A row of the table `service`, but for its point. counts: how often each value occurs; None: once."""
    counts = np.ones(len(values), dtype=np.int64) if counts is None else counts
    known = ~np.isnan(values.astype(np.float64)) & (counts > 0)
    values, counts = values[known], counts[known]
    total = int(counts.sum())
    average = math.fsum((values * counts).tolist()) / total if total else math.nan
    shares = zip((f"p{share}" for share in PERCENTILES), percentiles(values, counts), strict=True)
    return {"metric": metric, "unit": unit, "count": total, "mean": average, **dict(shares),
            "max": float(values.max()) if total else math.nan}  # fmt: skip


def _transposed(rows: list[Columns]) -> Columns:
    return {column: [row[column] for row in rows] for column in rows[0]}


def _texts(t: ContinuousTiming) -> Columns:
    texts = [t.texts[request.request_id] for request in t.requests] if t.engine.computes_text else []
    return {
        "request_id": [request.request_id for request in t.requests] if texts else [],
        "token_ids": [text.token_ids for text in texts],
        "logit_gaps": [text.logit_gaps for text in texts],
    }
