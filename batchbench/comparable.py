"""Whether two results may be held against each other, and which of their points are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from batchbench.errors import Incomparable
from batchbench.results import Result

_SHOWN = 60  # characters of a value in a message


def require_same_requests(one: Result, other: Result) -> None:
    """Raise Incomparable unless both ran the same requests, whatever their columns mean."""
    _require(list(_of_requests(one, other)))


def require_same_workload(one: Result, other: Result) -> None:
    """Raise Incomparable, naming what differs, unless both mean the same columns and ran the same requests."""
    _require(_of_workload(one, other))


def require_same_engine(one: Result, other: Result) -> None:
    """Raise Incomparable unless the same engine ran the same model too, held to the same objectives: what a gate
    wants, a comparison does not.
    """
    _require([*_of_workload(one, other), *_of(one, other, "scenario", ("slo",)), *engine_differences(one, other)])


def engine_differences(one: Result, other: Result) -> list[str]:
    """What of the engines differs that no gate compares across."""
    return [*_of(one, other, "engine", ("engine",)), *_of_model(one, other), *_of(one, other, "engine", ("numerics",))]


def same_objectives(one: Result, other: Result) -> bool:
    """Whether goodput means the same in both."""
    return not list(_of(one, other, "scenario", ("slo",)))


def machine_differences(one: Result, other: Result) -> list[str]:
    """Why seconds measured by one do not tell of the other."""
    return [
        *_of(one, other, "machine", ("system", "processor", "cores")),
        *_of(one, other, "engine", ("device",)),
    ]


def _of_model(one: Result, other: Result) -> Iterator[str]:
    """By its weights where both know them: a name says neither that they are the same nor that they are not."""
    hashes = [_get(result, "engine", "model_hash") for result in (one, other)]
    yield from _of(one, other, "engine", ("model",) if None in hashes else ("model_hash",))


def _of_workload(one: Result, other: Result) -> Iterator[str]:
    yield from _differ("schema version", one.run.get("schema_version"), other.run.get("schema_version"))
    yield from _of_requests(one, other)
    yield from _of(one, other, "scenario", ("clock",))
    if _get(one, "scenario", "clock") == "virtual":
        yield from _of(one, other, "scenario", ("virtual",))


def _of_requests(one: Result, other: Result) -> Iterator[str]:
    mine, theirs = one.run.get("workload_hash"), other.run.get("workload_hash")
    if mine is None and theirs is None:
        yield "nothing says of which workloads they are"
    yield from _differ("workload", mine, theirs)


def _of(one: Result, other: Result, part: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield from _differ(f"{part}.{name}", _get(one, part, name), _get(other, part, name))


def _get(result: Result, part: str, name: str) -> Any:
    found = result.run.get(part)
    return found.get(name) if isinstance(found, dict) else None


def _differ(what: str, one: Any, other: Any) -> Iterator[str]:
    if one != other:
        yield f"{what} {_said(one)} against {_said(other)}"


def _said(value: Any) -> str:
    text = str(value)
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return text[:12]  # a digest
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _require(differences: Iterator[str] | Sequence[str]) -> None:
    if found := list(differences):
        raise Incomparable(f"the results cannot be compared: {'; '.join(found)}")


def matched(one: Result, other: Result) -> tuple[list[tuple[int, int]], list[Any], list[Any]]:
    """Places of the points that both have, by pool and choices, in the order of `one`; rows of `pools` that only one
    has, and that only the other has.
    """
    mine, theirs = one.rows("pools"), other.rows("pools")
    at = {(row["pool_blocks"], row["choices"]): place for place, row in enumerate(theirs)}
    pairs = [(place, at.pop(key)) for place, row in enumerate(mine) if (key := _key(row)) in at]
    paired = {place for place, _ in pairs}
    return pairs, [row for place, row in enumerate(mine) if place not in paired], [theirs[n] for n in at.values()]


def _key(row: Any) -> tuple[int, str]:
    return row["pool_blocks"], row["choices"]
