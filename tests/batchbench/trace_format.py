"""The Trace Event Format's rules as code: what Perfetto and chrome://tracing take, and neither repair nor drop.

From the format's description (Trace Event Format, the object form): phases and their fields, slices of a thread that
nest, metadata once per track, arrows that bind to enclosing slices. Three rules are the readers': Perfetto turns
microseconds into nanoseconds by cutting off, and its scanner takes no control character, DEL included; chrome://tracing
gives an arrow that ends where two slices meet to the first of them.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from numbers import Real

_FIELDS = {  # of each phase
    "M": {"ph", "pid", "tid", "ts", "name", "args"},
    "X": {"ph", "pid", "tid", "ts", "dur", "name", "cat", "args"},
    "C": {"ph", "pid", "tid", "ts", "name", "cat", "args"},
    "i": {"ph", "pid", "tid", "ts", "name", "cat", "s", "args"},
    "s": {"ph", "pid", "tid", "ts", "name", "cat", "id"},
    "f": {"ph", "pid", "tid", "ts", "name", "cat", "id", "bp"},
}
_COLOURS = {"grey", "terrible", "white", *(f"thread_state_{name}" for name in ("iowait", "runnable", "running"))}
_METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}


def read(data: bytes) -> dict:
    """The document in a file's bytes: strict JSON, in which no object has a name twice."""
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    assert text.startswith('{"'), "readers tell the format by how it begins"
    assert all(c == "\n" or 32 <= ord(c) < 127 for c in text), "a character that a scanner may refuse"
    return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)


def _once(pairs):
    assert len({name for name, _ in pairs}) == len(pairs), f"a name twice: {pairs}"
    return dict(pairs)


def _refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def validate(document: dict) -> None:
    """Raise AssertionError, which says what is wrong, unless the document keeps every rule."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}, set(document)
    assert document["displayTimeUnit"] in ("ms", "ns"), "display"
    assert isinstance(document["otherData"], dict)
    events = document["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        _validate_event(event)
    assert events == sorted(events, key=lambda event: event["ts"]), "not in order of time"  # stable
    _validate_names(events)
    slices = _validate_nesting(events)
    _validate_counters(events)
    _validate_arrows(events, slices)


def _validate_event(event):
    assert isinstance(event, dict) and event.get("ph") in _FIELDS, f"no such phase: {event}"
    required = _FIELDS[event["ph"]]
    assert set(event) - {"cname"} == required, f"fields: {event}"
    assert "cname" not in event or (event["ph"] == "X" and event["cname"] in _COLOURS), f"colour: {event}"
    assert all(type(event[name]) is int and 0 < event[name] < 2**31 for name in ("pid", "tid")), f"track: {event}"
    for name in required & {"ts", "dur"}:
        assert _is_time(event[name]), f"{name}: {event}"
    for name in required & {"name", "cat"}:
        assert isinstance(event[name], str) and event[name], f"{name}: {event}"
    assert isinstance(event.get("args", {}), dict)
    assert event["ph"] != "i" or event["s"] in ("g", "p", "t"), f"scope: {event}"
    assert event["ph"] != "f" or event["bp"] == "e", f"binding point: {event}"
    assert "id" not in required or (type(event["id"]) is int and event["id"] >= 0), f"id: {event}"


def _is_time(value):
    """A number that is not negative, and whole nanoseconds whether a reader rounds them or cuts off."""
    return (
        isinstance(value, Real)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
        and int(value * 1000) == ns(value)
    )


def ns(value) -> int:
    """Microseconds as whole nanoseconds."""
    return round(value * 1000)


def _validate_names(events):
    named = Counter((e["name"], e["pid"], None if e["name"].startswith("process") else e["tid"])
                    for e in events if e["ph"] == "M")  # fmt: skip
    assert all(name in _METADATA for name, *_ in named), named
    assert set(named.values()) <= {1}, "a track is named twice"
    for event in events:
        if event["ph"] == "M":
            ((key, value),) = event["args"].items()
            assert key == ("sort_index" if event["name"].endswith("sort_index") else "name"), event
            assert type(value) is _METADATA[event["name"]], event
        else:
            assert ("process_name", event["pid"], None) in named, f"a process without a name: {event}"
            assert event["ph"] == "C" or ("thread_name", event["pid"], event["tid"]) in named, f"no name: {event}"
    threads = defaultdict(set)
    for event in events:
        threads[event["tid"]].add(event["pid"])
    assert all(len(pids) == 1 for pids in threads.values()), "a thread of two processes"
    main = {event["pid"] for event in events}
    assert not any(e["ph"] not in "MC" and e["tid"] in main for e in events), "a track with a process's number"


def _validate_nesting(events):
    """Of each track its slices; none may overlap another by a part only."""
    slices, open_ = defaultdict(list), defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            start, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
            while open_[track] and open_[track][-1] <= start:
                open_[track].pop()
            assert not open_[track] or end <= open_[track][-1], f"overlaps what it does not fit in: {event}"
            open_[track].append(end)
            slices[track].append((start, end))
    return slices


def _validate_counters(events):
    series = defaultdict(set)
    for event in events:
        if event["ph"] == "C":
            assert event["args"], event
            assert all(type(value) in (int, float) and math.isfinite(value) for value in event["args"].values()), event
            series[event["pid"], event["name"]].add(tuple(event["args"]))
    assert all(len(names) == 1 for names in series.values()), "a counter with now these, now those numbers"


def _validate_arrows(events, slices):
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]].append(event)
            at = ns(event["ts"])
            held = slices[event["pid"], event["tid"]]
            inside = [span for span in held if span[0] <= at <= span[1]]
            assert inside, f"in no slice: {event}"
            assert len(inside) == 1 or min(end - start for start, end in inside) <= 1, f"between two slices: {event}"
    for pair in ends.values():
        assert [event["ph"] for event in pair] == ["s", "f"], f"not one start and one end, in this order: {pair}"
        assert pair[0]["ts"] <= pair[1]["ts"]
