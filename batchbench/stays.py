"""Who was in which slot when, told from a result's tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchbench.results import Result

Ints = NDArray[np.int64]
PREFILL, RESUME, SWAPPED = range(3)  # the work with which a stay begins


@dataclass(frozen=True, slots=True)
class Stays:
    """Requests in slots, each from an admission to its eviction or its last token, in order of admission."""

    request: Ints  # place among the point's requests
    slot: Ints
    start: Ints
    end: Ints  # the first iteration in which it is no longer there
    evicted: NDArray[np.bool_]
    begins: Ints
    first: Ints  # iterations of the work it begins with
    held: (
        Ints  # the first iteration in which it is not forwarded: in a static batch, finished members are until it ends
    )

    def __len__(self) -> int:
        return len(self.request)


def stays_of(result: Result, point: int) -> Stays | None:
    """Of one point; None where the engine does not report slots, or admitted nobody."""
    admissions = result.point("admissions", point, ["request_id", "iteration", "slot", "resumed", "swapped_tokens"])
    if not len(admissions) or admissions["slot"].isna().any():
        return None
    requests = result.point("requests", point, ["request_id", "finished_iteration"])
    names = pd.Index(requests["request_id"])
    finished = requests["finished_iteration"].to_numpy(dtype=np.int64)
    request, start = _keys(admissions, names)
    end, evicted = _ends(
        request, finished, *_keys(result.point("evictions", point, ["request_id", "iteration"]), names)
    )
    prefills = _keys(result.point("prefills", point, ["request_id", "iteration"]), names)
    swapped = admissions["swapped_tokens"].fillna(0).to_numpy() > 0
    begins = np.where(admissions["resumed"].to_numpy(dtype=bool), np.where(swapped, SWAPPED, RESUME), PREFILL)
    held = end
    if (
        result.tables["pools"]["batching"].iloc[point] == "static"
    ):  # who is admitted together stays for the last of them
        last = pd.Series(end).groupby(start).transform("max").to_numpy(dtype=np.int64)
        held = np.where(evicted, end, last)
    slot = admissions["slot"].to_numpy(dtype=np.int64)
    return Stays(request, slot, start, end, evicted, begins, _first(request, start, end, *prefills), held)


def _ends(request: Ints, finished: Ints, victim: Ints, out: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """The n-th stay of a request ends with its n-th eviction, if there is one, else with its last token."""
    ends = dict(zip(zip(victim.tolist(), _nth(victim), strict=True), out.tolist(), strict=True))
    found = [ends.get(key, -1) for key in zip(request.tolist(), _nth(request), strict=True)]
    end = np.array(found, dtype=np.int64)
    return np.where(end < 0, finished[request] + 1, end), end >= 0


def _first(request: Ints, start: Ints, end: Ints, prefilled: Ints, at: Ints) -> Ints:
    """Iterations up to the last prefill of each stay; 1 where none is known."""
    horizon = int(end.max()) + 1  # request and iteration make one number
    prefills = np.append(np.sort(prefilled * horizon + at), -1)  # the last stands for none
    found = prefills[np.searchsorted(prefills[:-1], request * horizon + end) - 1]
    first: Ints = np.maximum(found - (request * horizon + start), 0) + 1
    return first


def _keys(frame: pd.DataFrame, names: pd.Index[str]) -> tuple[Ints, Ints]:
    """Of each row, the request's place and the iteration."""
    return names.get_indexer(pd.Index(frame["request_id"])).astype(np.int64), frame["iteration"].to_numpy(
        dtype=np.int64
    )


def _nth(request: Ints) -> list[int]:
    """Of each row, how many rows of the same request are before it."""
    return [int(n) for n in pd.Series(request).groupby(request).cumcount()]
