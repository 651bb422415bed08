"""The content of a report: what is said of one result or several, in which order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from batchbench.figures.drawing import closer_look, figures
from batchbench.report.document import (
    Cell,
    Chapter,
    Facts,
    Paragraph,
    Part,
    Picture,
    Report,
    Section,
    Table,
    table,
)
from batchbench.report.ledger import ledger
from batchbench.report.link import link
from batchbench.report.measured import measured
from batchbench.report.reproduce import reproduce
from batchbench.report.verdict import verdict
from batchbench.results import Result
from batchbench.service_sheet import service_sheet
from batchbench.sheets import Sheet, escaped, sweep_sheet
from batchbench.units import show_bytes

_FIGURES = {
    "pool_sweep": (
        "What a smaller pool costs",
        "Occupancy, evictions, recompute and latency over the pool's size in blocks.",
    ),
    "choices": ("The choices side by side", "A bar for each point: occupancy, evictions, recompute, latency."),
    "staircase": (
        "Every request from arrival to last token",
        "A panel for each point. Each request is a bar over iterations: filled while it is in a slot, marked where it "
        "was evicted. Of many requests: latency and evictions by order of arrival.",
    ),
    "slot_timeline": ("Who held which slot when", "Slots over iterations, at one point of the sweep."),
    "pool_use": ("The pool over time", "For each point: blocks in use, requests that run, and requests that wait."),
    "service": ("How long callers wait", "Percentiles of the waiting times of all requests, for each point."),
    "victims": (
        "What the victims' extra latency is made of",
        "A bar for each point: what the evicted requests lost against the reference pool, by parts.",
    ),
    "rows_against_positions": (
        "Rows against positions",
        "The same work counted in rows and in positions: only positions show what is computed again.",
    ),
}
_SCALES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)(?: ?(us|ms|s)\b)?")


def report(results: Sequence[Result]) -> Report:
    """One chapter for each result; of several, a table in front that sets them side by side if they may be."""
    names = _names(results)
    title = f"{names[0]}: what a smaller KV pool costs" if len(names) == 1 else "Results side by side"
    versions = {str(_inside(result.run, "versions").get("kv-batchbench", "unknown")) for result in results}
    subtitle = f"batchbench {', '.join(map(escaped, sorted(versions)))}: " + ", ".join(dict.fromkeys(names))
    chapters = tuple(_chapter(result, name) for result, name in zip(results, names, strict=True))
    return Report(title, subtitle, tuple(_opening(results, names)) if len(results) > 1 else (), chapters)


def _names(results: Sequence[Result]) -> list[str]:
    """Their scenarios; and, of those that share one, what tells them apart: the folders that they were read from."""
    names = [escaped(result.run["scenario"]["name"]) for result in results]
    shared = {name for name in names if names.count(name) > 1}
    folders = [escaped(str(result.files.folder)) for result in results]
    return [f"{name} ({where})" if name in shared else name for name, where in zip(names, folders, strict=True)]


def _opening(results: Sequence[Result], names: Sequence[str]) -> Sequence[Part]:
    hashes = [result.run.get("workload_hash") for result in results]
    if None in hashes or len(set(hashes)) > 1:
        return [
            Paragraph(
                "These results are of different workloads, or do not say of which, so they are not set side by side: "
                "what differs between them may be the workload's."
            )
        ]
    heads = [sweep_sheet(result.rows("pools")) for result in results]
    headings = list(dict.fromkeys(heading for head in heads for heading in head.headings))
    rows = [
        [
            Cell(f"{place}. {name}", place),
            *(_cell(dict(zip(head.headings, row, strict=True)).get(h, "")) for h in headings),
        ]
        for place, (name, head) in enumerate(zip(names, heads, strict=True), 1)
        for row in head.rows
    ]
    made = table("All of one workload", ["result", *headings], rows, [])
    return [_aligned(made, f"They share the workload of hash {escaped(str(hashes[0]))}.")]


def _chapter(result: Result, name: str) -> Chapter:
    drawn = figures(result, closer_look(result, None))
    pictures = {key: Picture(key, *_FIGURES[key], draw) for key, draw in drawn.items()}
    stairs = pictures.pop("staircase")
    sections = (
        Section("sweep", "The sweep", tuple(_tables(result))),
        Section("figures", "Figures", tuple(pictures.values())),
        Section("staircase", "Staircase", (stairs,)),
        ledger(result),
        link(result),
        measured(result),
        _environment(result),
        reproduce(result),
    )
    return Chapter(name, verdict(result), sections)


def _tables(result: Result) -> Sequence[Part]:
    pools, service = result.rows("pools"), result.rows("service")
    objectives = bool(result.run["scenario"].get("slo"))
    callers = service_sheet(pools, service, objectives=objectives)
    return [
        _of_sheet("What each point cost", sweep_sheet(pools, result.rows("statistics"))),
        _of_sheet("What callers saw", callers),
        Paragraph(
            "Victim latency: of the evicted requests over that of the others; contaminated, since victims are the "
            "youngest. Paired latency: of the evicted over their own in the reference pool, the largest that evicted "
            "nobody. Time to first token is ttft, between two tokens itl, per token after the first tpot, from arrival "
            "to last token e2e."
        ),
    ]


def _of_sheet(caption: str, sheet: Sheet) -> Table:
    rows = [[_cell(text) for text in row] for row in sheet.rows]
    return _aligned(table(caption, sheet.headings, rows, []), sheet.title)


def _aligned(made: Table, note: str) -> Table:
    """With the columns that hold numbers marked as such."""
    columns = range(len(made.headings))
    numbers = [c for c in columns if any(isinstance(row[c].sort, float) for row in made.rows)]
    numbers = [c for c in numbers if made.headings[c] not in ("choices", "result")]
    return table(made.caption, made.headings, made.rows, numbers, note)


def _cell(text: str) -> Cell:
    """A finished string, ordered by the number that it begins with, in its unit; by itself where there is none."""
    found = _NUMBER.match(text)
    if found is None:
        return Cell(text, text)
    return Cell(text, float(found[1].replace(",", "")) * _SCALES.get(found[2] or "", 1.0))


def _environment(result: Result) -> Section:
    run = result.run
    engine, machine, versions = run["engine"], _inside(run, "machine"), _inside(run, "versions")
    pairs = [
        ("made", run.get("created")),
        *((name.replace("_", " "), engine.get(name)) for name in ("engine", "model", "dtype", "device")),
        ("numerics", engine.get("numerics_detail") or engine.get("numerics")),
        ("threads", engine.get("threads")),
        ("K/V per position", _bytes(engine.get("kv_bytes_per_token"))),
        ("weights", _bytes(engine.get("weight_bytes"))),
        ("model hash", engine.get("model_hash")),
        ("system", machine.get("system")),
        ("processor", machine.get("processor")),
        ("cores", machine.get("cores")),
        ("memory", _bytes(machine.get("memory_bytes"))),
        *((f"{name} version", version) for name, version in versions.items()),
    ]
    told = tuple((escaped(name), escaped(str(value))) for name, value in pairs if value is not None)
    return Section("environment", "Environment", (Facts("Where it ran", told),))


def _bytes(value: Any) -> str | None:
    return show_bytes(value) if type(value) is int else None


def _inside(run: Any, key: str) -> dict[str, Any]:
    """A part of run.json that may be missing."""
    found = run.get(key)
    return found if isinstance(found, dict) else {}
