"""The tables that a command prints: for a terminal, for Markdown, for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from batchbench.predict import floor_iterations, floor_positions
from batchbench.protocol import EngineDescription, Point, RequestSpec, Tokenizer
from batchbench.results import Result
from batchbench.schema import MAY_DIFFER
from batchbench.timing import DEGENERATE_REPETITION, REPETITION_WINDOW
from batchbench.units import show_blocks, show_bytes, show_count, show_seconds

UNSTEADY = "counters may differ between runs"  # by the wall clock


class Format(StrEnum):
    """How a command prints its table."""

    table = "table"
    json = "json"
    markdown = "markdown"


@dataclass(frozen=True)
class Sheet:
    """A printed table: headings over rows of finished strings. title: a line above it, none if empty."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def print(self) -> None:
        """On standard output, as wide as it needs: a terminal may wrap it, but no figure is cut."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in self.headings:
            side: Literal["left", "right"] = "left" if heading == "choices" else "right"
            table.add_column(heading.replace(" ", "\n", 1), justify=side, no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        if self.title:
            print(self.title)
        Console(width=1000).print(table, highlight=False, markup=False)

    def markdown(self) -> str:
        """A bar in a cell is escaped: what a file says makes no column."""
        rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in self.rows]
        lines = [self.headings, ("---:",) * len(self.headings), *rows]
        above = f"{self.title}\n\n" if self.title else ""
        return above + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sweep_sheet(pools: Sequence[Mapping[str, Any]], statistics: Sequence[Mapping[str, Any]] = ()) -> Sheet:
    """The headline of each point, in the roundings that the field's texts use.

    statistics: rows of that table. A column more where choices vary, where counters may differ between runs, where
    points were repeated, or where numerics is fast; a title where counters may not come out again.
    """
    verdict = "identical" if len(pools) > 1 else "not compared"
    if any(pool["text_digest"] is None for pool in pools):
        verdict = "not computed"
    varied = any(pool["choices"] for pool in pools)
    more = _more_columns(pools, statistics)
    return Sheet(
        (
            "pool",
            *(("choices",) if varied else ()),
            "occupancy",
            "evictions per request",
            "recompute share",
            "victim latency",
            "paired latency",
            "text",
            *more,
        ),
        tuple(
            (
                show_blocks(pool["pool_blocks"]),
                *((one_line(pool["choices"]),) if varied else ()),
                f"{pool['occupancy']:.3f}",
                _per_request(pool["preemptions_per_request"]),
                shown(pool["recompute_fraction"], "{:.1%}", "not reported"),
                shown(pool["preemption_latency_penalty"], "{:.2f}x", "no control group"),
                shown(pool["paired_latency_penalty"], "{:.2f}x", "no reference"),
                verdict,
                *(column[place] for column in more.values()),
            )
            for place, pool in enumerate(pools)
        ),
        f"real time: {UNSTEADY}" if any(pool["clock"] == "wall" for pool in pools) else "",
    )


def _more_columns(pools: Sequence[Mapping[str, Any]], statistics: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By heading. Times are those of the iterations, or of the whole runs where theirs are modelled."""
    more: dict[str, list[str]] = {}
    if any(pool["numerics"] == "fast" for pool in pools):
        more["numerics"] = ["fast"] * len(pools)
    if any(pool["counters"] == MAY_DIFFER for pool in pools):
        more["counters"] = [pool["counters"] for pool in pools]
    for metric, name in (("engine_s", "engine time"), ("wall_s", "wall time")):
        rows = [row for row in statistics if row["metric"] == metric and row["n"] > 1]  # one for each point, or none
        if rows:
            more[f"{name}, median [low, high]"] = [_show_interval(row) for row in rows]
            break
    return more


def _show_interval(row: Mapping[str, Any]) -> str:
    median, low, high = (show_seconds(row[name]) for name in ("median", "low", "high"))
    return f"{median} [{low}, {high}] n={row['n']}"


def _per_request(value: float | None) -> str:
    """Two decimals, or two digits of what these would not tell from nothing."""
    return shown(value, "{:.2g}" if value is not None and 0 < value < 0.1 else "{:.2f}", "not reported")


def plan_rows(
    requests: Sequence[RequestSpec],
    points: Sequence[Point],
    engines: Sequence[EngineDescription],
    bandwidth: float | None,
) -> list[dict[str, Any]]:
    """What a sweep would run, per point, with the floor that no run can undercut.

    engines: as each point would build it. bandwidth: bytes per second at which this machine reads that many weights;
    None if unknown.
    """
    rows = []
    for point, engine in zip(points, engines, strict=True):
        weights = engine.iteration_weight_bytes
        iterations = floor_iterations(
            requests, engine.slots, engine.block_size, point.pool_blocks, shared=bool(engine.prefix_cache)
        )
        rows.append(
            {
                "pool_blocks": point.pool_blocks,
                "choices": point.label,
                "pool_bytes": replace(engine, pool_blocks=point.pool_blocks).pool_bytes,
                "floor_iterations": iterations,
                "floor_positions": floor_positions(requests),
                "weights_read_s": None if weights is None or bandwidth is None else iterations * weights / bandwidth,
            }
        )
    return rows


def plan_sheet(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    varied = any(row["choices"] for row in rows)
    return Sheet(
        (
            "pool",
            *(("choices",) if varied else ()),
            "KV bytes",
            "iterations, at least",
            "positions, at least",
            "reading the weights",
        ),
        tuple(
            (
                show_blocks(row["pool_blocks"]),
                *((one_line(row["choices"]),) if varied else ()),
                "not reported" if row["pool_bytes"] is None else show_bytes(row["pool_bytes"]),
                str(row["floor_iterations"]),
                str(row["floor_positions"]),
                "unknown" if row["weights_read_s"] is None else show_seconds(row["weights_read_s"]),
            )
            for row in rows
        ),
    )


def promise_sheet(found: Sequence[Mapping[str, Any]]) -> Sheet:
    """The numerics self-test of `batchbench doctor`, a row for each model, dtype and decoder."""
    return Sheet(
        ("model", "dtype", "device", "decoder", "promise", "taking"),
        tuple(
            (
                one_line(one["model"]),
                one["dtype"],
                one["device"],
                one["kernels"] + (" (default)" if one["default"] else ""),
                {True: "kept", False: "BROKEN", None: "not available"}[one["keeps"]],
                show_seconds(one["seconds"]),
            )
            for one in found
        ),
    )


def doctor_lines(report: Mapping[str, Any]) -> list[str]:
    """The rest of what `batchbench doctor` found."""
    about, numerics = report["machine"], report["numerics"]
    lines = [f"{one['model']} in {one['dtype']}, {one['kernels']}: {one['detail']}" for one in numerics]
    memory, load, cores = about["memory_bytes"], about["load_average"], about["cores"]
    lines += [
        "",
        f"machine: {about['system']}, {about['processor']}, {show_count(cores, 'core')}, "
        + ("memory unknown" if memory is None else show_bytes(memory)),
        f"devices: {', '.join(report['devices'])}; threads of the self-test: {report['threads']}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version),
        f"compiler: {report['compiler'] or 'none'}; native kernels: {report['native_kernels']}",
        "",
        "load average before: "
        + ("unknown" if load is None else f"{load:.1f}")
        + ("" if load is None or load < 0.3 * (cores or 1) else ": others are at work, so the rates below may be low"),
    ]
    for what, dtype in dict.fromkeys((one["what"], one["dtype"]) for one in report["ceilings"]):
        rates = [one for one in report["ceilings"] if (one["what"], one["dtype"]) == (what, dtype)]
        shown = (f"{one['rate']:.1f} {one['unit']} with {show_count(one['threads'], 'thread')}" for one in rates)
        lines.append(f"{what}, {dtype}: {', '.join(shown)}")
    return [one_line(line) for line in lines]


def text_rows(requests: Sequence[RequestSpec], result: Result, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Every request's prompt and completion as text, in submission order."""
    texts = result.point("texts", 0, ["request_id", "token_ids"]).set_index("request_id")["token_ids"]
    return [
        {
            "request_id": request.request_id,
            "prompt": tokenizer.decode(request.prompt),
            "completion": tokenizer.decode(texts[request.request_id].tolist()),
        }
        for request in requests
    ]


def text_lines(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A blank line and two lines for each of `text_rows`, safe for a terminal."""
    lines = []
    for row in rows:
        name, indent = row["request_id"], " " * len(row["request_id"])
        lines += [
            "",
            f"{name} prompt      {escaped(row['prompt'])}",
            f"{indent} completion  {escaped(row['completion'])}",
        ]
    return lines


def degenerate_warning(text_repetition: float | None) -> str | None:
    """The line that says so if the texts run in circles, else None."""
    if text_repetition is None or text_repetition <= DEGENERATE_REPETITION:
        return None
    return (
        f"warning: the texts are degenerate, so their identity proves little: in the median text {text_repetition:.0%} "
        f"of the tokens occur among the {REPETITION_WINDOW} before them (limit {DEGENERATE_REPETITION:.0%}); "
        f'other prompts, such as prompts = "natural", may help'
    )


def to_json(document: Mapping[str, Any]) -> str:
    """JSON without NaN: a missing number is null."""
    return json.dumps(_nulls(document), indent=2, allow_nan=False)


def one_line(text: str) -> str:
    """Control characters out, line breaks folded: what a file says cannot drive the terminal."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def escaped(text: str) -> str:
    """As one_line, but nothing is lost: line breaks and what cannot be printed as Python's escapes, \\ as \\\\."""
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: float | None, pattern: str, missing: str) -> str:
    """A number in its rounding, or what is said where there is none."""
    return missing if value is None or math.isnan(value) else pattern.format(value)


def _nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _nulls(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nulls(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
