"""What a result's evictions cost: predicted by a calibration, against what its tables measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from batchbench.calibration import Calibration
from batchbench.errors import ResultError, UsageError
from batchbench.results import Result

DEFINITION = (
    "measured, recompute: step_s of the iterations that carried resumed rows, less the median step_s of the point's "
    "iterations that only decoded as many rows (between neighbouring counts linearly, where no iteration had as many); "
    "swap: the point's copy_s. What an eviction delays is not counted."
)
TOLERANCE = 0.15  # a sum that is predicted further off than this is pointed out
_BESIDE = ("prefill_rows", "preemptions", "swapped_out_tokens", "swapped_in_tokens")  # what is no decode
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EvictionCost:
    """One eviction. tokens: positions whose K/V was rebuilt or swapped. measured_ms: null where it cannot be told
    apart: copies are timed per point, and a resume may share its iteration with a first prefill or with copies.
    """

    point: int
    pool_blocks: int
    iteration: int
    request_id: str
    reclaim: str
    tokens: int
    predicted_ms: float
    measured_ms: float | None
    extrapolated: bool  # longer than anything that was calibrated


@dataclass(frozen=True, slots=True)
class PointCost:
    """One strategy at one point of the sweep: sums over the evictions that were measured. Null where there is none.

    unmeasured: evictions left out of both sums.
    """

    point: int
    pool_blocks: int
    choices: str
    reclaim: str
    evictions: int
    unmeasured: int
    predicted_ms: float | None
    measured_ms: float | None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; null where nothing, or nothing above 0, was measured."""
        if self.predicted_ms is None or self.measured_ms is None or self.measured_ms <= 0:
            return None
        return self.predicted_ms / self.measured_ms


@dataclass(frozen=True, slots=True)
class RecomputeRate:
    """What computing a position again took: seconds beyond decodes, over the positions rebuilt in those iterations."""

    s_per_position: float
    positions: int
    iterations: int


def require_same_engine(result: Result, calibration: Calibration, path: str) -> None:
    """Raise UsageError if the calibration is of another engine than the result."""
    engine = result.run["engine"]
    missing = [name for name in ("model", "dtype", "block_size", "device") if engine.get(name) is None]
    if missing:
        raise ResultError(f"the result has no one {missing[0]} of its engine, so no calibration can be matched to it")
    if engine["device"] == "none":
        raise UsageError("the result is of a schedule without a model: nothing was computed, so nothing was measured")
    calibration.require_fits(
        path,
        model=engine["model"],
        dtype=engine["dtype"],
        block_size=engine["block_size"],
        device=engine["device"],
    )


def eviction_costs(result: Result, calibration: Calibration) -> list[EvictionCost]:
    """Every eviction of a result, in its order. Raises ResultError if the ledger does not say what it takes."""
    resumes = _resumes(result)
    extra_ms = {point: _extra_ms(result, point) for point in result.tables["pools"]["point"]}
    nth: dict[tuple[int, str], int] = {}
    later: dict[tuple[int, str], list[int]] = {}
    for row in result.rows("evictions"):
        later.setdefault((row["point"], row["request_id"]), []).append(row["iteration"])
    costs = []
    for row in result.rows("evictions"):
        if row["reclaim"] is None or row["cached_tokens"] is None:
            raise ResultError("the result's engine does not report what became of a victim's K/V")
        key = (row["point"], row["request_id"])
        n = nth[key] = nth.get(key, -1) + 1
        until = later[key][n + 1] if len(later[key]) > n + 1 else math.inf
        rows = [p for p in resumes.get(key, ()) if row["iteration"] <= p["iteration"] < until]
        costs.append(_cost(row, rows, extra_ms[row["point"]], calibration))
    return costs


def point_costs(result: Result, costs: Sequence[EvictionCost]) -> list[PointCost]:
    """Sums of each point and strategy that had evictions, in the order of the sweep."""
    sums = []
    for point in result.rows("pools"):
        for reclaim in ("recompute", "swap"):
            own = [cost for cost in costs if (cost.point, cost.reclaim) == (point["point"], reclaim)]
            if not own:
                continue
            if reclaim == "swap":
                counted = own if point["copy_s"] is not None else []
                measured = None if point["copy_s"] is None else point["copy_s"] * 1e3
            else:
                counted = [cost for cost in own if cost.measured_ms is not None]
                measured = math.fsum(cost.measured_ms or 0.0 for cost in counted) if counted else None
            predicted = math.fsum(cost.predicted_ms for cost in counted) if counted else None
            where = (point["point"], point["pool_blocks"], point["choices"])
            sums.append(PointCost(*where, reclaim, len(own), len(own) - len(counted), predicted, measured))
    return sums


def recompute_rate(result: Result) -> RecomputeRate | None:
    """Of all points of a result, by DEFINITION; None where no time is taken or it does not tell resumes apart."""
    seconds, positions, iterations = 0.0, 0, 0
    for point in result.tables["pools"]["point"]:
        frame = result.point("iterations", point, ["iteration", "issued_tokens", "rebuilt_tokens", "step_s", *_BESIDE])
        decodes = frame[(frame[list(_BESIDE)] == 0).all(axis=1) & (frame["issued_tokens"] > 0)]
        medians = decodes.dropna(subset=["step_s"]).groupby("issued_tokens")["step_s"].median()
        usual = dict(zip(medians.index.tolist(), medians.tolist(), strict=True))
        prefills = result.point("prefills", point, ["iteration", "resumed"])
        fresh = prefills["iteration"][~prefills["resumed"].astype(bool)]
        resumes = frame[
            (frame["prefill_rows"] > 0)
            & (frame["rebuilt_tokens"] > 0)
            & (frame[["swapped_out_tokens", "swapped_in_tokens"]] == 0).all(axis=1)
            & ~frame["iteration"].isin(fresh)
            & frame["step_s"].notna()
        ]
        for rows, step_s, rebuilt in resumes[["issued_tokens", "step_s", "rebuilt_tokens"]].itertuples(index=False):
            if (without := at_rows(usual, rows)) is not None:
                seconds, positions, iterations = seconds + step_s - without, positions + int(rebuilt), iterations + 1
    return RecomputeRate(seconds / positions, positions, iterations) if seconds > 0 else None


def decode_step_s(iterations: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Rows -> median seconds of the iterations that decoded so many, and did nothing else."""
    seconds: dict[int, list[float]] = {}
    for row in iterations:
        if row["issued_tokens"] and _only_decodes(row):
            seconds.setdefault(row["issued_tokens"], []).append(row["step_s"])
    return {rows: median(found) for rows, found in sorted(seconds.items())}


def at_rows(step_s: Mapping[int, float], rows: int) -> float | None:
    """Seconds of an iteration of so many rows; between neighbours linearly, outside the nearest; null if there is none.

    step_s: of decode_step_s, the fewest rows first.
    """
    below, above = [n for n in step_s if n <= rows], [n for n in step_s if n >= rows]
    if not below or not above:
        return step_s[(below or above)[-1 if below else 0]] if step_s else None
    left, right = below[-1], above[0]
    if left == right:
        return step_s[left]
    return step_s[left] + (step_s[right] - step_s[left]) * (rows - left) / (right - left)


def _cost(row: Row, rows: Sequence[Row], extra_ms: Mapping[int, float], calibration: Calibration) -> EvictionCost:
    measured: float | None = None
    if row["reclaim"] == "swap":
        tokens = end = row["cached_tokens"]
        predicted = calibration.swap_ms(tokens)
    else:
        if row["rebuilt_tokens"] is None or row["recovered_tokens"] is None:
            raise ResultError("the result's engine does not report what its resumes computed again")
        # Positions found in the prefix cache are not computed again, but attended to.
        tokens, end = row["rebuilt_tokens"], row["recovered_tokens"] + row["rebuilt_tokens"]
        predicted = calibration.recompute_ms(end) - calibration.recompute_ms(row["recovered_tokens"])
        if rows and all(p["iteration"] in extra_ms for p in rows):
            measured = math.fsum(extra_ms[p["iteration"]] * p["share"] for p in rows)
    return EvictionCost(
        point=row["point"],
        pool_blocks=row["pool_blocks"],
        iteration=row["iteration"],
        request_id=row["request_id"],
        reclaim=row["reclaim"],
        tokens=tokens,
        predicted_ms=predicted,
        measured_ms=measured,
        extrapolated=end > calibration.max_tokens,
    )


def _resumes(result: Result) -> dict[tuple[int, str], list[Row]]:
    """(point, request) -> its resumed prefill rows, each with its `share` of its iteration's resumed positions."""
    resumed = [row for row in result.rows("prefills") if row["resumed"]]
    positions: dict[tuple[int, int], int] = {}
    for row in resumed:
        place = (row["point"], row["iteration"])
        positions[place] = positions.get(place, 0) + row["positions"]
    found: dict[tuple[int, str], list[Row]] = {}
    for row in resumed:
        share = row["positions"] / positions[row["point"], row["iteration"]]
        found.setdefault((row["point"], row["request_id"]), []).append({**row, "share": share})
    return found


def _extra_ms(result: Result, point: int) -> dict[int, float]:
    """Iteration -> milliseconds beyond a decode of as many rows; only of those whose prefills are all resumes."""
    iterations = [row for row in result.rows("iterations") if row["point"] == point]
    usual = decode_step_s(iterations)
    fresh = {p["iteration"] for p in result.rows("prefills") if p["point"] == point and not p["resumed"]}
    found = {}
    for row in iterations:
        resumes = row["prefill_rows"] and row["iteration"] not in fresh
        without = at_rows(usual, row["issued_tokens"])
        if resumes and without is not None and not row["swapped_out_tokens"] and not row["swapped_in_tokens"]:
            found[row["iteration"]] = (row["step_s"] - without) * 1e3
    return found


def _only_decodes(row: Mapping[str, Any]) -> bool:
    """Nothing known, and nothing unknown, beside decoding."""
    return all(row[name] == 0 for name in _BESIDE)
