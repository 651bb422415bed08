"""What a trace asks for: lengths, arrivals, shared prefixes, and the demand for KV over time, as pure functions."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchbench.traces import Trace, rows_in_window

PEAK_WINDOW_S = 10
SLICES = 10  # of the printed demand over time

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TraceFacts:
    """A trace's numbers in columns, by arrival where there are times.

    arrival_ns: from the first, None without times. prompt, output: lengths of every row, each in the unit of the same
    name: "tokens", "characters", or None where nothing is known. shared_positions: of all prompts, those in a leading
    run of hash ids that rows before in the file had; None without hash ids.
    """

    rows: int
    arrival_ns: Ints | None
    prompt: Ints
    output: Ints
    prompt_unit: str
    output_unit: str | None
    shared_positions: int | None


@dataclass(frozen=True)
class Demand:
    """KV positions held over time, as if nobody waited; linear between the points, which are distinct times in order.

    time_s: from the first arrival. before, after: positions just before and from that time on. requests: held from it
    on. seconds_per_token: how long a token is assumed to take.
    """

    time_s: Floats
    before: Floats
    after: Floats
    requests: Ints
    seconds_per_token: float


@dataclass(frozen=True)
class DemandBins:
    """The demand in equal stretches of time: its least, mean and greatest number of positions in each."""

    edges_s: Floats
    low: Floats
    mean: Floats
    high: Floats


def collect(trace: Trace, window_s: tuple[float, float] | None = None) -> TraceFacts:
    """Read a trace once (twice with a window) into columns. Raises TraceError."""
    times, prompts, outputs = array("q"), array("q"), array("q")
    seen: set[int | str] = set()
    shared, hashed, output_unit = 0, False, None
    for row in trace.rows() if window_s is None else rows_in_window(trace, window_s):
        if row.arrival_ns is not None:
            times.append(row.arrival_ns)
        prompts.append(len(row.prompt or "") if row.prompt_tokens is None else row.prompt_tokens)
        if row.output_tokens is not None or row.output is not None:
            output_unit = "characters" if row.output_tokens is None else "tokens"
            outputs.append(len(row.output or "") if row.output_tokens is None else row.output_tokens)
        if row.prefix_ids:
            hashed = True
            run = next((n for n, one in enumerate(row.prefix_ids) if one not in seen), len(row.prefix_ids))
            shared += min(run * (trace.prefix_tokens or 0), row.prompt_tokens or 0)
            seen.update(row.prefix_ids)
    prompt, output = _column(prompts), _column(outputs)
    arrival = _column(times) if trace.has_times else None
    if arrival is not None:
        order = np.argsort(arrival, kind="stable")
        arrival, prompt, output = arrival[order], prompt[order], output[order]
        if len(arrival):
            arrival = arrival - arrival[0]
    unit = "tokens" if trace.has_times else "characters"
    return TraceFacts(len(prompts), arrival, prompt, output, unit, output_unit, shared if hashed else None)


def _column(values: array[int]) -> Ints:
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)


def length_percentiles(values: Ints) -> dict[str, float]:
    """Mean, p50, p90, p95, p99 and max; percentiles by nearest rank, so each is a length of the trace."""
    ranks = np.quantile(values, (0.5, 0.9, 0.95, 0.99), method="inverted_cdf")
    named = zip(("p50", "p90", "p95", "p99"), ranks, strict=True)
    return {"mean": float(values.mean()), **{name: int(value) for name, value in named}, "max": int(values.max())}


def peak_arrivals(arrival_ns: Ints, window_s: int = PEAK_WINDOW_S) -> int:
    """The most arrivals in one of the stretches of `window_s` seconds that the time from the first divides into."""
    _, counts = np.unique(arrival_ns // (window_s * 1_000_000_000), return_counts=True)
    return int(counts.max())


def kv_demand(arrival_ns: Ints, prompt: Ints, output: Ints, seconds_per_token: float) -> Demand:
    """Each request holds its prompt from its arrival on, and one position more every `seconds_per_token`, until it has
    its output: then it holds nothing. One that ends leaves before one that arrives at the same time.

    arrival_ns from 0 in order; at least one request; output of at least 1.
    """
    end_ns = arrival_ns + np.maximum(1, np.rint(output * (seconds_per_token * 1e9)).astype(np.int64))
    when = np.concatenate((end_ns, arrival_ns))  # ends first: the sort is stable
    order = np.argsort(when, kind="stable")
    when = when[order]
    prompts = np.cumsum(np.concatenate((-prompt, prompt))[order])
    requests = np.cumsum(np.concatenate((np.full(len(prompt), -1), np.ones(len(prompt), np.int64)))[order])
    time_s = when / 1e9
    grown = np.concatenate(([0.0], requests[:-1] * np.diff(time_s) / seconds_per_token))
    lost = np.concatenate((output, np.zeros(len(output), np.int64)))[order]
    generated = np.cumsum(grown) - np.cumsum(lost)
    first = np.concatenate(([True], when[1:] != when[:-1]))
    last = np.concatenate((first[1:], [True]))
    held_before = np.concatenate(([0.0], (prompts + generated)[:-1])) + grown
    after = np.maximum(0.0, prompts + generated)  # sums of fractions end near 0, not on it
    return Demand(time_s[first], np.maximum(0.0, held_before[first]), after[last], requests[last], seconds_per_token)


def demand_figures(demand: Demand, block_size: int) -> dict[str, float | int]:
    """Peak and mean from the first arrival to the last end; in blocks as bounds, since the last one of each request is
    filled in part.
    """
    span_s = demand.time_s[-1]
    requests_before = np.concatenate(([0], demand.requests[:-1]))
    part_filled = block_size - 1
    most = max(
        float((demand.after + demand.requests * part_filled).max()),
        float((demand.before + requests_before * part_filled).max()),
    )
    peak = max(float(demand.after.max()), float(demand.before.max()))
    return {
        "peak_positions": round(peak),
        "mean_positions": float(_integral(demand)[-1] / span_s),
        "peak_requests": int(demand.requests.max()),
        "peak_blocks_at_least": math.ceil(round(peak) / block_size),
        "peak_blocks_at_most": int(round(most) // block_size),
        "span_s": float(span_s),
    }


def demand_bins(demand: Demand, bins: int) -> DemandBins:
    """The demand from the first arrival to the last end, in so many equal stretches."""
    time_s = demand.time_s
    edges = np.linspace(0.0, time_s[-1], bins + 1)
    piece = np.clip(np.searchsorted(time_s, edges, side="right") - 1, 0, len(time_s) - 1)
    into_s = edges - time_s[piece]
    slope = demand.requests[piece] / demand.seconds_per_token
    at_edge = demand.after[piece] + slope * into_s
    area = _integral(demand)[piece] + into_s * (demand.after[piece] + at_edge) / 2
    last = np.where(edges == time_s[piece], demand.before[piece], at_edge)  # as a stretch's end sees the edge
    low, high = np.minimum(at_edge[:-1], last[1:]), np.maximum(at_edge[:-1], last[1:])
    starts = np.clip(np.searchsorted(edges, time_s, side="right") - 1, 0, bins - 1)
    ends = np.clip(np.searchsorted(edges, time_s, side="left") - 1, 0, bins - 1)
    for where, values in ((starts[:-1], demand.after[:-1]), (ends[1:], demand.before[1:])):
        np.minimum.at(low, where, values)
        np.maximum.at(high, where, values)
    return DemandBins(edges, low, np.diff(area) / np.diff(edges), high)


def _integral(demand: Demand) -> Floats:
    """Position-seconds from the first arrival to each point."""
    steps = np.diff(demand.time_s) * (demand.after[:-1] + demand.before[1:]) / 2
    return np.concatenate(([0.0], np.cumsum(steps)))


def describe(facts: TraceFacts, demand: Demand | None, block_size: int) -> dict[str, Any]:
    """Everything that can be said of a trace with at least one row; None where it is not known."""
    found: dict[str, Any] = {
        "prompt": {"unit": facts.prompt_unit, "rows": facts.rows, **length_percentiles(facts.prompt)},
        "output": None,
        "shared_prefix_share": None,
        "arrivals": None,
        "demand": None,
    }
    if facts.output_unit is not None:
        found["output"] = {"unit": facts.output_unit, "rows": len(facts.output), **length_percentiles(facts.output)}
    if facts.shared_positions is not None:
        found["shared_prefix_share"] = facts.shared_positions / int(facts.prompt.sum())
    if facts.arrival_ns is not None:
        span_s = float(facts.arrival_ns[-1] / 1e9)
        found["arrivals"] = {
            "span_s": span_s,
            "mean_per_s": facts.rows / span_s if span_s else None,
            "peak_in_10_s": peak_arrivals(facts.arrival_ns),
        }
    if demand is not None:
        figures = {"seconds_per_token": demand.seconds_per_token, "block_size": block_size}
        found["demand"] = {**figures, **demand_figures(demand, block_size), "over_time": _slices(facts, demand)}
    return found


def _slices(facts: TraceFacts, demand: Demand) -> list[Mapping[str, float | int]]:
    bins = demand_bins(demand, SLICES)
    assert facts.arrival_ns is not None
    arrivals, _ = np.histogram(facts.arrival_ns / 1e9, bins.edges_s)
    return [
        {"from_s": float(start), "arrivals": int(count), "mean_positions": float(mean), "max_positions": float(high)}
        for start, count, mean, high in zip(bins.edges_s[:-1], arrivals, bins.mean, bins.high, strict=True)
    ]
