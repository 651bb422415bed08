"""Results of one workload side by side: what each point counts and takes, whose latency changed, what was evicted."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from batchbench.comparable import (
    machine_differences,
    matched,
    require_same_requests,
    require_same_workload,
    same_objectives,
)
from batchbench.measures import SETTINGS, Measure, Measures, kind_of, point_name
from batchbench.results import Result
from batchbench.significance import difference

Verdict = Literal["equal", "better", "worse", "differs", "not shown", "unknown"]
HEADLINES = ("iterations", "occupancy", "preemptions", "requests_preempted", "recomputed_tokens", "recompute_fraction",
             "rebuilt_tokens", "mean_latency_iterations", "max_latency_iterations", "paired_latency_penalty",
             "peak_used_blocks", "fragmentation", "goodput_fraction", "collected_per_s", "duration_s", "engine_s",
             "wall_s")  # fmt: skip
_HIGHER = ("occupancy", "utilization", "collected_per_iteration", "collected_per_s", "goodput_requests",
           "goodput_fraction", "goodput_per_s", "recovered_tokens", "shared_tokens")  # fmt: skip
_LOWER = ("iterations", "waste_fraction", "padded_tokens", "prefill_rows", "recomputed_tokens", "rebuilt_tokens",
          "recompute_fraction", "recompute_tax", "preemptions", "preemptions_per_request", "requests_preempted",
          "thrashes", "mean_latency_iterations", "max_latency_iterations", "preempted_latency_iterations",
          "straight_through_latency_iterations", "paired_latency_penalty", "worst_paired_latency_ratio",
          "share_preempted", "most_preemptions", "fragmentation", "duration_s", "engine_s", "wall_s", "copy_s",
          "swapped_tokens", "swapped_bytes", "forward_tokens")  # fmt: skip

_LATENCY = re.compile(r"(ttft|itl|tpot|e2e|queue|queued|returning|rebuilding|latency|victims|preemption_latency)_")

ONCE = "measured once"  # so that no difference can be shown, whatever it is


@dataclass(frozen=True, slots=True)
class Change:
    """One metric of one point in the first result and in another. detail: why a verdict is no more than it is."""

    metric: str
    first: float | None
    other: float | None
    verdict: Verdict
    detail: str = ""

    @property
    def difference(self) -> float | None:
        return None if self.first is None or self.other is None else self.other - self.first


@dataclass(frozen=True, slots=True)
class PairedLatency:
    """Every request's latency in another result over its own in the first, in `unit`. detail: of what was measured,
    why it shows no difference.
    """

    unit: str
    mean_ratio: float
    slower: int
    faster: int
    equal: int
    worst_request: str
    worst_ratio: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MovedEvictions:
    """Evictions aligned by request and their order in it. moved: those of both in another iteration."""

    kept: int
    moved: int
    only_first: int
    only_other: int
    requests_only_first: tuple[str, ...]  # evicted there and not in the other
    requests_only_other: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PointComparison:
    """A point in the first result and the same one in another. evictions: None where one does not report them."""

    name: str
    places: tuple[int, int]
    changes: tuple[Change, ...]
    text: Literal["equal", "differs", "not computed"]
    latencies: tuple[PairedLatency, ...]
    evictions: MovedEvictions | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another result against the first. Points that only one of them has are named."""

    points: tuple[PointComparison, ...]
    only_first: tuple[str, ...]
    only_other: tuple[str, ...]


def compare(first: Result, other: Result, metrics: Sequence[str] | None = None) -> Comparison:
    """Point by point. metrics: HEADLINES if None. Raises Incomparable for another workload; whatever engines made them.

    Raises UsageError for a name that is no metric.
    """
    require_same_workload(first, other)
    return _compared(first, other, metrics or HEADLINES)


def _compared(first: Result, other: Result, metrics: Sequence[str]) -> Comparison:
    pairs, mine, theirs = matched(first, other)
    one, two = Measures(first), Measures(other)
    foreign = machine_differences(first, other)
    odd = () if same_objectives(first, other) else ("goodput", "meets_slo")
    points = tuple(
        PointComparison(
            point_name(one.pools[here]),
            (here, there),
            tuple(_change(n, one.at(n, here), two.at(n, there), foreign, n.startswith(odd)) for n in metrics),
            _text(one.pools[here]["text_digest"], two.pools[there]["text_digest"]),
            tuple(
                _latencies(
                    first.point("requests", here), other.point("requests", there), one.pools[here]["clock"], foreign
                )
            ),
            _evictions(_by_request(one, here), _by_request(two, there)),
        )
        for here, there in pairs
    )
    return Comparison(points, tuple(map(point_name, mine)), tuple(map(point_name, theirs)))


def _change(metric: str, one: Measure, two: Measure, foreign: Sequence[str], other_terms: bool) -> Change:
    if other_terms:
        return Change(metric, one.value, two.value, "unknown", "held to other objectives")
    if one.value is None or two.value is None:
        both = one.value is None and two.value is None
        return Change(metric, one.value, two.value, "unknown", one.why if both or one.value is None else two.why)
    if "measured" not in (one.kind, two.kind):
        note = one.note if one.note == two.note else "; ".join(filter(None, (one.note, two.note)))
        return Change(metric, one.value, two.value, _better(metric, two.value - one.value), note)
    if foreign:
        return Change(metric, one.value, two.value, "not shown", f"other machine: {'; '.join(foreign)}")
    if not one.samples or not two.samples or len(one.samples) == len(two.samples) == 1:
        return Change(metric, one.value, two.value, "not shown", ONCE)
    counts = f"n={len(one.samples)} and {len(two.samples)}"
    if len({*one.samples, *two.samples}) == 1:
        return Change(metric, one.value, two.value, "equal", counts)
    shown = difference(two.samples, one.samples)
    detail = f"{counts}, p={shown.p:.2g}"
    if shown.side == "unknown":
        return Change(metric, one.value, two.value, "not shown", f"{detail}; would settle it: {shown.settles}")
    return Change(metric, one.value, two.value, _better(metric, 1 if shown.side == "above" else -1), detail)


def _better(metric: str, change: float) -> Verdict:
    if change == 0:
        return "equal"
    if metric in _HIGHER or metric in _LOWER or _LATENCY.match(metric):
        return "better" if (change > 0) == (metric in _HIGHER) else "worse"
    return "differs"


def _text(one: str | None, two: str | None) -> Literal["equal", "differs", "not computed"]:
    if one is None or two is None:
        return "not computed"
    return "equal" if one == two else "differs"


def _latencies(one: pd.DataFrame, two: pd.DataFrame, clock: str, foreign: Sequence[str]) -> list[PairedLatency]:
    """In iterations, and in seconds where both have them. Both have the same requests, in the same order."""
    found, caveat = [], "measured, one run each" + (f", on other machines: {'; '.join(foreign)}" if foreign else "")
    for column, unit in (("latency_iterations", "iterations"), ("latency_s", "s")):
        before, after = (frame[column].to_numpy(dtype=np.float64) for frame in (one, two))
        if np.isnan(before).any() or np.isnan(after).any() or not (before > 0).all():
            continue
        ratios = after / before
        worst = int(ratios.argmax())
        counts = (int((ratios > 1).sum()), int((ratios < 1).sum()), int((ratios == 1).sum()))
        name = str(one["request_id"].iloc[worst])
        detail = caveat if kind_of(column, clock) == "measured" else ""
        mean = math.fsum(ratios) / len(ratios)
        found.append(PairedLatency(unit, mean, *counts, name, float(ratios[worst]), detail))
    return found


def _evictions(one: dict[tuple[str, int], int] | None, two: dict[tuple[str, int], int] | None) -> MovedEvictions | None:
    if one is None or two is None:
        return None
    both = one.keys() & two.keys()
    kept = sum(one[key] == two[key] for key in both)
    victims = [Counter(request for request, _ in events) for events in (one, two)]
    return MovedEvictions(
        kept,
        len(both) - kept,
        len(one) - len(both),
        len(two) - len(both),
        tuple(request for request in victims[0] if request not in victims[1]),
        tuple(request for request in victims[1] if request not in victims[0]),
    )


def _by_request(measures: Measures, place: int) -> dict[tuple[str, int], int] | None:
    """(request, which of its evictions) -> iteration."""
    if measures.pools[place]["preemptions"] is None:
        return None
    events, seen = dict[tuple[str, int], int](), Counter[str]()
    frame = measures.result.point("evictions", place, ["request_id", "iteration"])
    for request, iteration in zip(frame["request_id"], frame["iteration"], strict=True):
        events[(request, seen[request])] = int(iteration)
        seen[request] += 1
    return events


def changed_counters(first: Result, other: Result) -> list[tuple[str, str, Any, Any]]:
    """(point, what, was, is) of all that was counted at each point and changed, of texts, and of points that only one
    of the two has. Raises Incomparable for another workload.
    """
    require_same_requests(first, other)
    found: list[tuple[str, str, Any, Any]] = []
    compared = _compared(first, other, Measures(first).names())
    before, after = first.rows("pools"), other.rows("pools")
    for point in compared.points:
        was, now = before[point.places[0]], after[point.places[1]]
        found += [
            (point.name, change.metric, change.first, change.other)
            for change in point.changes
            if change.first != change.other and kind_of(change.metric, was["clock"]) == "counted"
        ]
        digests = [row["text_digest"] for row in (was, now)]
        if digests[0] != digests[1]:
            found.append((point.name, "text", *(digest and digest[:12] for digest in digests)))
    found += [(name, "point", "there", "gone") for name in compared.only_first]
    return found + [(name, "point", "not there", "new") for name in compared.only_other]


def changed_settings(first: Result, other: Result) -> list[tuple[str, str, Any, Any]]:
    """(point, column of `pools`, was, is) of the settings that changed at points of both; `every` where one changed
    alike at all of them.
    """
    before, after = first.rows("pools"), other.rows("pools")
    pairs = [(before[here], after[there]) for here, there in matched(first, other)[0]]
    found: list[tuple[str, str, Any, Any]] = []
    for name in SETTINGS:
        changes = [(point_name(was), name, was[name], now[name]) for was, now in pairs if was[name] != now[name]]
        alike = len(changes) == len(pairs) > 1 and len({change[2:] for change in changes}) == 1
        found += [("every", *changes[0][1:])] if alike else changes
    return found
