"""What one run of a point measured, and the statistics of several: a few numbers of each, not the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchbench.intervals import median_interval
from batchbench.schema import REPEATED_COUNTERS, TABLES
from batchbench.service import PERCENTILES, Service, percentiles
from batchbench.timing import ContinuousTiming

Measured = Mapping[str, float | int | None]  # by column of the table `repetitions`
_P50, _P99 = PERCENTILES.index(50), PERCENTILES.index(99)
_TIMES = ("engine_s", "duration_s", "collected_per_s", *(f"{metric}_{share}_s" for metric in ("ttft", "itl", "tpot",
          "e2e") for share in ("p50", "p99")))  # fmt: skip
_UNITS = {column.name: column.unit for column in TABLES["repetitions"]}


@dataclass(frozen=True, slots=True)
class Finished:
    """Runs of a sweep that need not be run again. timings: of the first repetition, from the first point on.
    repeated: what the repetitions after it measured, pass by pass, in the order of the points; without gaps.
    """

    timings: Sequence[ContinuousTiming] = ()
    repeated: Sequence[Measured] = ()


def measured(timing: ContinuousTiming) -> Measured:
    """What the run took; and, where counters may differ from run to run, what it counted."""
    service = Service(timing)
    duration = service.duration_s
    found: dict[str, float | int | None] = {
        "wall_s": timing.wall_s,
        "engine_s": timing.engine_s,
        "duration_s": duration,
        "collected_per_s": timing.collected_tokens / duration if duration else None,
    }
    for metric, values in (
        ("ttft", (service.ttft_s,)),
        ("itl", service.gaps_s or (None,)),
        ("tpot", (service.tpot_s,)),
        ("e2e", (service.latency_s,)),
    ):
        shares = [math.nan] * len(PERCENTILES) if values[0] is None else percentiles(*values)
        for name, place in (("p50", _P50), ("p99", _P99)):
            found[f"{metric}_{name}_s"] = None if math.isnan(shares[place]) else shares[place]
    counted = {
        "preemptions": timing.preemptions,
        "recomputed_tokens": timing.recomputed_tokens,
        "rebuilt_tokens": timing.rebuilt_tokens,
        "forward_tokens": timing.forward_tokens,
        "iterations": timing.busy_iterations,
    }
    return found | {name: counted[name] if timing.clock == "wall" else None for name in REPEATED_COUNTERS}


def repetitions_of(timing: ContinuousTiming) -> Sequence[Measured]:
    """What every repetition measured; of a run that was never repeated, what it did."""
    return timing.repetitions or (measured(timing),)


def statistics_of(timing: ContinuousTiming) -> Iterator[dict[str, Any]]:
    """Rows of the table `statistics`: of all that was measured, not of what a model or a count makes the same."""
    runs = repetitions_of(timing)
    varying = {"iterations": _TIMES, "virtual": (), "wall": (*_TIMES, *REPEATED_COUNTERS)}[timing.clock]
    for name in ("wall_s", *varying):
        values = [value for run in runs if (value := run[name]) is not None]
        if len(values) == len(runs):
            yield {"metric": name, "unit": _UNITS[name], **asdict(median_interval(values))}
