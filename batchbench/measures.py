"""A metric by its name, out of a result's tables: its value at a point, and whether it was counted or measured."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchbench.errors import UsageError
from batchbench.results import Result
from batchbench.scenario import SweepPoint
from batchbench.schema import MAY_DIFFER, ONE_TOKEN, POINT_COLUMNS, REPEATED_COUNTERS, TABLES, Column
from batchbench.service import percentiles

Kind = Literal["counted", "measured"]
_SERVICE = re.compile(r"(ttft|itl|tpot|e2e|queue)_(mean|p50|p90|p95|p99|max)_(iterations|s)")
_OF_REQUESTS = re.compile(r"(\w+)\.(min|mean|max|p[1-9][0-9]?)")
_ALWAYS_MEASURED = ("wall_s", "copy_s")  # the virtual clock models neither
_BY_TIME = ("goodput_requests", "goodput_fraction", "meets_slo")  # objectives are in seconds
_OF_THE_RUN = ("repetitions", "text_digest", "pool_bytes")  # no counters: of how it was run, or compared elsewhere
_SETTINGS = (*SweepPoint.model_fields, *_OF_THE_RUN, "requests", "reference_pool_blocks")  # columns, but no metrics
_COLUMNS = {table: {column.name: column for column in TABLES[table]} for table in ("pools", "requests", "repetitions")}
SETTINGS = tuple(  # of the engine or the run at a point, as columns of `pools`
    name for name in _COLUMNS["pools"] if name in (*SweepPoint.model_fields, "repetitions", "pool_bytes")
)
_POINT = tuple(column.name for column in POINT_COLUMNS)


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric at a point. value: None where the result has none, and then `why`.

    samples: of what was measured, a value for each repetition; empty if only the first run's is known. note: over which
    requests it is, if not all.
    """

    value: float | None
    kind: Kind
    unit: str = ""
    why: str = ""
    samples: Sequence[float] = ()
    note: str = ""


class Measures:
    """The metrics of one result. Raises UsageError for a name that is no metric."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.pools = result.rows("pools")

    def at(self, metric: str, place: int) -> Measure:
        """Of a point, by its place. A name is a column of `pools`, as `recompute_fraction`; a figure of `service`, as
        `ttft_p99_iterations`; or a statistic of a column of `requests`, as `latency_iterations.p99`.
        """
        kind = kind_of(metric.partition(".")[0], self.pools[place]["clock"])
        if (match := _OF_REQUESTS.fullmatch(metric)) and _is_metric(_COLUMNS["requests"].get(match[1])):
            return self._of_requests(match[1], match[2], place, kind)
        value, column = self._found(metric, place)
        if value is None or not math.isfinite(value):
            return Measure(None, kind, column.unit, column.null_when or "it has no finite value")
        samples = self._samples(metric, place) if kind == "measured" else ()
        return Measure(float(np.median(samples)) if samples else float(value), kind, column.unit, samples=samples)

    def names(self) -> list[str]:
        """Columns of `pools` that are metrics."""
        return [name for name, column in _COLUMNS["pools"].items() if _is_metric(column)]

    def _found(self, metric: str, place: int) -> tuple[float | None, Column]:
        column = _COLUMNS["pools"].get(metric)
        if column is not None and _is_metric(column):
            return self.pools[place][metric], column
        if match := _SERVICE.fullmatch(metric):
            return self._of_service(match, place)
        raise UsageError(f"{metric!r} is no metric{_hint(metric, self.names())}")

    def _of_requests(self, name: str, statistic: str, place: int, kind: Kind) -> Measure:
        """Over every request, or over none: but where requests of one token have no value, over the others."""
        column, asked = _COLUMNS["requests"][name], list(dict.fromkeys((name, "output_tokens")))
        rows = self.result.point("requests", place, asked)
        null = rows[name].isna()
        if null.all():
            return Measure(None, kind, column.unit, column.null_when or "no request has one")
        normal = null & (rows["output_tokens"] == 1) & column.null_when.startswith(ONE_TOKEN)
        if lost := int((null & ~normal).sum()):
            return Measure(None, kind, column.unit, f"{lost} of {len(rows)} requests lack it")
        value = _statistic(rows[name][~null].to_numpy(dtype=np.float64), statistic)
        if not math.isfinite(value):
            return Measure(None, kind, column.unit, "it has no finite value")
        note = f"over {len(rows) - int(normal.sum())} of {len(rows)} requests: the others have one token"
        return Measure(value, kind, column.unit, note=note if normal.any() else "")

    def _of_service(self, name: re.Match[str], place: int) -> tuple[float | None, Column]:
        metric, share, unit = name.groups()
        column = Column(f"{metric}_{share}_{unit}", pa.float64(), unit, "", f"`service` has no {metric} in {unit}")
        rows = self.result.point("service", place)
        found = rows[(rows["metric"] == metric) & (rows["unit"] == unit)]
        return (None if found.empty else float(found[share].iloc[0])), column

    def _samples(self, metric: str, place: int) -> tuple[float, ...]:
        if metric not in _COLUMNS["repetitions"] or metric in _POINT:
            return ()
        if metric in REPEATED_COUNTERS and self.pools[place]["counters"] != MAY_DIFFER:
            return ()
        values = self.result.point("repetitions", place, [metric])[metric]
        return () if values.isna().any() else tuple(map(float, values))


def kind_of(column: str, clock: str) -> Kind:
    """What another run could give otherwise is measured: times, unless a model of the clock gives them, and, in real
    time, everything.
    """
    timed = column.endswith("_s") or column in _BY_TIME
    if column in _ALWAYS_MEASURED or clock == "wall" or (timed and clock != "virtual"):
        return "measured"
    return "counted"


def counted_columns(table: str, clock: str) -> list[str]:
    """Columns of a table that every run must give again, those of the point left out; in real time, those that it may
    count otherwise.
    """
    clock = "iterations" if clock == "wall" else clock
    return [
        column.name
        for column in TABLES[table]
        if column.name not in (*_POINT, *_OF_THE_RUN) and kind_of(column.name, clock) == "counted"
    ]


def _is_metric(column: Column | None) -> bool:
    if column is None:
        return False
    number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
    return number and column.name not in (*_POINT, *_SETTINGS)


def _statistic(values: NDArray[np.float64], name: str) -> float:
    if name.startswith("p"):
        return percentiles(values, shares=(int(name[1:]),))[0]
    return {"min": float(values.min()), "max": float(values.max()), "mean": math.fsum(values) / len(values)}[name]


def _hint(name: str, known: Sequence[str]) -> str:
    if close := get_close_matches(name, known, 1):
        return f"; did you mean {close[0]!r}?"
    return ": a column of pools (recompute_fraction), ttft_p99_iterations and its like, or latency_iterations.p99"


def point_name(pool: Mapping[str, Any]) -> str:
    """A row of `pools` as people call it."""
    return f"pool {pool['pool_blocks']}" + (f", {pool['choices']}" if pool["choices"] else "")
