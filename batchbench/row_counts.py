"""Whether the tables of a point hold as many rows as its `pools` and `requests` speak of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow.compute as pc

from batchbench.results import Result

_ASKED = ("request_id", "output_tokens", "latency_iterations", "latency_s", "ttft_iterations", "ttft_s",
          "queued_iterations", "queued_s", "recomputed_tokens")  # fmt: skip
Columns = dict[str, list[Any]]


def lost_rows(result: Result, place: int, pool: Mapping[str, Any]) -> str:
    """Which table of counts lacks rows at a point, in words; empty if none does. pool: the point's row of `pools`.

    What the engine does not report is asked of no table: its columns of `pools` and `requests` are null.
    """
    requests: Columns = result.files.point("requests", place, _ASKED).to_pydict()
    return next(_lost(result, place, pool, requests), "")


def lost_texts(result: Result, place: int) -> str:
    """The same of `texts`, for a point whose text was computed."""
    requests = result.files.point("requests", place, ("request_id", "output_tokens")).to_pydict()
    texts = result.files.point("texts", place, ("request_id", "token_ids"))
    lengths = pc.list_value_length(texts["token_ids"]).fill_null(0).to_pylist()
    wanted = Counter(zip(requests["request_id"], requests["output_tokens"], strict=True))
    found = Counter(zip(texts["request_id"].to_pylist(), lengths, strict=True))
    for name, tokens in (wanted - found) or (found - wanted):
        there = [held for request, held in found if request == name]
        return _cannot_be("texts", f"{there[0] if there else 'no'} tokens of {name}", f"`requests` has {tokens}")
    return ""


def _lost(result: Result, place: int, pool: Mapping[str, Any], requests: Columns) -> Iterator[str]:
    names, evictions = requests["request_id"], pool["preemptions"]
    if len(names) != pool["requests"]:
        yield _cannot_be("requests", f"{len(names)} rows", f"`pools` counts {pool['requests']}")
    issued = result.files.point("iterations", place, ("issued_tokens",))["issued_tokens"]
    if (busy := pc.sum(pc.greater(issued, 0), min_count=0).as_py()) != pool["iterations"]:
        yield _cannot_be("iterations", f"{busy} rows that forwarded", f"`pools` counts {pool['iterations']}")
    if evictions is not None and (held := len(_requests_of(result, "evictions", place))) != evictions:
        yield _cannot_be("evictions", f"{held} rows", f"`pools` counts {evictions}")
    if _known(requests["queued_iterations"]):
        admitted = _requests_of(result, "admissions", place)
        yield from _none_of("admissions", names, admitted)
        if evictions is not None and len(admitted) != (want := len(names) + evictions):
            yield _cannot_be("admissions", f"{len(admitted)} rows", f"requests and evictions are {want}")
    if _known(requests["recomputed_tokens"]) and pool["prefill_rows"] != 0:
        yield from _none_of("prefills", names, _requests_of(result, "prefills", place))
    if _known(requests["ttft_iterations"]):
        yield from _lost_tokens(result, place, requests)
    yield from _lost_service(result, place, requests)


def _lost_tokens(result: Result, place: int, requests: Columns) -> Iterator[str]:
    runs = result.files.point("token_runs", place, ("request_id", "tokens"))
    sums = runs.group_by("request_id").aggregate([("tokens", "sum")]).to_pydict()
    held = dict(zip(sums["request_id"], sums["tokens_sum"], strict=True))
    for name, tokens in zip(requests["request_id"], requests["output_tokens"], strict=True):
        if held.get(name, 0) != tokens:
            yield _cannot_be("token_runs", f"{held.get(name, 0)} tokens of {name}", f"`requests` has {tokens}")


def _lost_service(result: Result, place: int, requests: Columns) -> Iterator[str]:
    table = result.files.point("service", place, ("metric", "unit", "count")).to_pydict()
    held = dict(zip(zip(table["metric"], table["unit"], strict=True), table["count"], strict=True))
    outputs = requests["output_tokens"]
    for unit in ("iterations", "s"):
        told = {"e2e": f"latency_{unit}", "ttft": f"ttft_{unit}", "queue": f"queued_{unit}"}
        wanted = {metric: len(outputs) for metric, column in told.items() if _known(requests[column])}
        if "ttft" in wanted:
            wanted |= {"tpot": sum(tokens > 1 for tokens in outputs), "itl": sum(outputs) - len(outputs)}
        for metric, values in wanted.items():
            if (count := held.get((metric, unit), 0)) != values:
                yield _cannot_be("service", f"{count} values of {metric} in {unit}", f"`requests` has {values}")


def _requests_of(result: Result, table: str, place: int) -> list[str]:
    return list(result.files.point(table, place, ("request_id",))["request_id"].to_pylist())


def _none_of(table: str, names: list[str], held: list[str]) -> Iterator[str]:
    missing = set(names) - set(held)
    for name in names:
        if name in missing:
            yield _cannot_be(table, f"no row of {name}", "every request has one")


def _known(values: list[Any]) -> bool:
    """Whether the engine reports it: of some requests, or of every one."""
    return any(value is not None for value in values)


def _cannot_be(table: str, found: str, said: str) -> str:
    return f"the table {table} has {found}, which cannot be: {said}"
