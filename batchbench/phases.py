"""What every request did when, from its arrival to its last token, told from a result's tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchbench.results import Result
from batchbench.stays import Stays

Ints = NDArray[np.int64]
Span = tuple[int, int]


class Kind(StrEnum):
    """The first three are the parts of a latency of those names; the others together are `decoding`."""

    queued = "queued"  # from arrival to first admission
    returning = "returning"  # from an eviction to the resume
    rebuilding = "rebuilding"  # from a resume to the iteration that brings a token, that one left out
    prefill = "prefill"  # of the prompt, before the iteration that brings the first token
    decode = "decode"  # a token in each iteration
    paused = "paused"  # in a slot, without a token
    running = "running"  # in a slot; the engine does not tell whose tokens come


@dataclass(frozen=True, slots=True)
class Phases:
    """Stretches of iterations, in order of their first; of each request they lie end to end."""

    request: Ints  # place among the point's requests
    kind: NDArray[np.str_]
    start: Ints  # first iteration
    end: Ints  # the first that is not of it


def phases_of(result: Result, point: int, stays: Stays | None) -> Phases:
    """Of one point. Without stays, only when tokens came; without that either, nothing."""
    requests = result.point("requests", point, ["request_id", "arrival_iteration"])
    runs = _runs(result, point, pd.Index(requests["request_id"]))
    found: list[tuple[int, int, str, int]] = []  # start, request, kind, end
    if stays is None:
        found = [(at, request, Kind.decode, end) for request, spans in runs.items() for at, end in spans]
    else:
        in_slot: defaultdict[int, list[Span]] = defaultdict(list)
        for request, *span in zip(*(part.tolist() for part in (stays.request, stays.start, stays.end)), strict=True):
            in_slot[request].append((span[0], span[1]))
        arrived = requests["arrival_iteration"].tolist()
        for request, spans in in_slot.items():
            told = runs.get(request, []) if runs else None
            found += ((at, request, kind, end) for kind, at, end in _walk(arrived[request], spans, told))
    found.sort()
    start, request_, kind_, end_ = zip(*found, strict=True) if found else ((), (), (), ())
    return Phases(_ints(request_), np.array(kind_, dtype=np.str_), _ints(start), _ints(end_))


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _runs(result: Result, point: int, names: pd.Index[str]) -> dict[int, list[Span]]:
    """Of each request, the stretches of iterations in each of which it got a token, in order."""
    frame = result.point("token_runs", point, ["request_id", "first_iteration", "tokens"])
    runs: defaultdict[int, list[Span]] = defaultdict(list)
    places = names.get_indexer(pd.Index(frame["request_id"])).tolist()
    for place, first, tokens in zip(places, frame["first_iteration"].tolist(), frame["tokens"].tolist(), strict=True):
        runs[place].append((first, first + tokens))
    for spans in runs.values():
        spans.sort()
    return runs


def _walk(arrived: int, stays: list[Span], runs: list[Span] | None) -> Iterator[tuple[Kind, int, int]]:
    """One request's phases. runs: None if not told. A phase of no iteration is left out but for the first: who arrives
    during an iteration waits for the next, which is time and no iteration.
    """
    yield Kind.queued, arrived, stays[0][0]
    left, at = list(reversed(runs or ())), stays[0][0]
    for number, (start, end) in enumerate(stays):
        if at < start:
            yield Kind.returning, at, start
        at = start
        idle = Kind.running if runs is None else Kind.rebuilding if number else Kind.prefill
        while left and left[-1][0] < end:
            first, stop = left.pop()
            if at < first:
                yield idle, at, first
            yield Kind.decode, first, stop
            at, idle = stop, Kind.paused
        if at < end:
            yield idle, at, end
        at = end
