"""Events of Chrome's Trace Event Format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

Event = dict[str, Any]


class Track(NamedTuple):
    """A process and a thread of the format: a group of tracks, and one of them."""

    pid: int
    tid: int


def complete(
    track: Track, category: str, name: str, start_ns: int, end_ns: int, args: Event, colour: str = ""
) -> Event:
    """A slice. On one track, slices lie beside each other or within each other.

    colour: one that the format reserves a name for; else the reader takes one by the slice's name.
    """
    event = {**_at("X", track, start_ns), "dur": microseconds(end_ns - start_ns)}
    return {**event, "cat": category, "name": name, **({"cname": colour} if colour else {}), "args": args}


def counter(track: Track, category: str, name: str, at_ns: int, values: dict[str, int]) -> Event:
    """Numbers that hold from then on."""
    return {**_at("C", track, at_ns), "cat": category, "name": name, "args": values}


def instant(track: Track, category: str, name: str, at_ns: int, args: Event) -> Event:
    return {**_at("i", track, at_ns), "s": "t", "cat": category, "name": name, "args": args}


def arrow(track: Track, category: str, name: str, at_ns: int, number: int, *, arrives: bool) -> Event:
    """One end of an arrow between the slices that hold these ends. number: the same at both, and of no other arrow."""
    end = {**_at("f", track, at_ns), "bp": "e"} if arrives else _at("s", track, at_ns)
    return {**end, "cat": category, "name": name, "id": number}


def process_name(track: Track, name: str, place: int) -> Iterator[Event]:
    """What a group of tracks is called, and where it stands."""
    return _named(track, "process", name, place)


def thread_name(track: Track, name: str, place: int) -> Iterator[Event]:
    """What a track is called, and where it stands in its group."""
    return _named(track, "thread", name, place)


def microseconds(ns: int) -> int | float:
    """The format's unit. Readers multiply by 1000 and may cut off what is left: they must come out at `ns` again."""
    if ns % 1000 == 0:
        return ns // 1000
    nearest = ns / 1000
    return nearest if int(nearest * 1000) == ns else math.nextafter(nearest, math.inf)


def _at(phase: str, track: Track, at_ns: int) -> Event:
    return {"ph": phase, "pid": track.pid, "tid": track.tid, "ts": microseconds(at_ns)}


def _named(track: Track, what: str, name: str, place: int) -> Iterator[Event]:
    yield {**_at("M", track, 0), "name": f"{what}_name", "args": {"name": name}}
    yield {**_at("M", track, 0), "name": f"{what}_sort_index", "args": {"sort_index": place}}
