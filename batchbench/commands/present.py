"""The tables that a command prints: for a terminal, for Markdown, for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from batchbench.predict import floor_iterations, floor_positions
from batchbench.protocol import EngineDescription, Point, RequestSpec, Tokenizer
from batchbench.results import Result
from batchbench.sheets import Sheet, escaped, one_line
from batchbench.timing import DEGENERATE_REPETITION, REPETITION_WINDOW
from batchbench.units import show_blocks, show_bytes, show_count, show_seconds


class Format(StrEnum):
    """How a command prints its table."""

    table = "table"
    json = "json"
    markdown = "markdown"


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


def _nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _nulls(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nulls(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
