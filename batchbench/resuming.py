"""Whether a sweep may go on from what another left: only if nothing that its numbers depend on has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SAME = ("schema_version", "scenario", "workload_hash", "points", "inputs", "engine", "versions", "git", "machine")
_NOT_OF = {"machine": ("memory_bytes",), "versions": ("pandas",)}  # a reboot changes the one; the other draws
_MISSING = object()
_SHOWN = 80  # characters of a value


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first thing that differs between two sweeps' run.json, in words; None if the one may continue the other.

    `created`, results, and what neither counts nor seconds depend on are not compared. What neither says is the same.
    """
    for key in _SAME:
        for path, was, new in _differences(key, before.get(key, _MISSING), now.get(key, _MISSING)):
            place, _, leaf = path.partition(".")
            if leaf not in _NOT_OF.get(place, ()):
                return f"{path} was {_said(was)} and is {_said(new)}"
    return None


def _differences(path: str, was: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, Mapping) and isinstance(new, Mapping):
        for key in [*was, *(key for key in new if key not in was)]:
            yield from _differences(f"{path}.{key}", was.get(key, _MISSING), new.get(key, _MISSING))
    elif isinstance(was, list) and isinstance(new, list) and len(was) == len(new):
        for place, (one, other) in enumerate(zip(was, new, strict=True)):
            yield from _differences(f"{path}.{place}", one, other)
    elif type(was) is not type(new) or was != new:
        yield path, was, new


def _said(value: Any) -> str:
    text = "missing" if value is _MISSING else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
