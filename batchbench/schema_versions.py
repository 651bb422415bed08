"""Results that an older batchbench wrote, lifted to the current tables: what they do not tell is null, or no row.

Version 1: one scheduling choice, so a pool size names a point. Version 2: prefills apart from admissions. Both: every
run on the clock of iterations, once, and nothing of single tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchbench.errors import ResultError
from batchbench.intervals import median_interval
from batchbench.schema import POINT_COLUMNS, SCHEMA_VERSION, TABLES, arrow_schema
from batchbench.tables import service_row

Rows = list[dict[str, Any]]
Tables = dict[str, Rows]
_KEY = [column.name for column in POINT_COLUMNS]
_SINCE_2 = ("prefills",)
_SINCE_3 = ("token_runs", "service", "repetitions", "statistics")


def table_names(version: object, folder: Path) -> tuple[str, ...]:
    """The tables that a result of that version has. Raises ResultError for one that nobody has written, or not yet."""
    if type(version) is int and version > SCHEMA_VERSION:
        raise ResultError(
            f"{folder} has schema version {version}, newer than the {SCHEMA_VERSION} that this batchbench reads; "
            f"upgrade"
        )
    if type(version) is not int or version < 1:
        raise ResultError(f"{folder} has schema version {version!r:.40}, which no batchbench has written")
    later = {1: _SINCE_2 + _SINCE_3, 2: _SINCE_3}.get(version, ())
    return tuple(name for name in TABLES if name not in later)


def lifted(run: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, pa.BufferReader]:
    """Parquet files in memory, of the current version. Raises ValueError, KeyError, TypeError or ArrowException for
    tables that no batchbench of the run's version has written.
    """
    files = {name: pq.ParquetFile(path) for name, path in paths.items()}
    if strangers := [name for name, file in files.items() if _run_id(file) != run["run_id"]]:
        raise ValueError(f"{strangers[0]}.parquet is from another run than run.json")
    tables: Tables = {name: file.read().to_pylist() for name, file in files.items()}
    for step in _STEPS[run["schema_version"] - 1 :]:
        step(tables, run["engine"])
    return {name: _written(name, tables.get(name, []), run["run_id"]) for name in TABLES}


def _run_id(file: pq.ParquetFile) -> str:
    found: bytes = (file.schema_arrow.metadata or {}).get(b"run_id", b"")
    return found.decode(errors="replace")


def _written(name: str, rows: Rows, run_id: str) -> pa.BufferReader:
    """A table of whatever of the current columns the rows have."""
    schema, sink = arrow_schema(name), pa.BufferOutputStream()
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
    for field, array in zip(schema, arrays, strict=True):
        if array.null_count and not field.nullable:
            raise ValueError(f"{name}.parquet lacks {field.name}")
    about = {"schema_version": str(SCHEMA_VERSION), "run_id": run_id}
    pq.write_table(pa.table(arrays, schema=schema.with_metadata(about)), sink)
    return pa.BufferReader(sink.getvalue())


def _to_2(tables: Tables, engine: Mapping[str, Any]) -> None:
    """Pools number the points; an admission computed its whole context at once."""
    tables["prefills"] = [row for row in tables["admissions"] if row["positions"] is not None]
    for pool in tables["pools"]:
        pool |= {name: engine.get(name) for name in ("slots", "block_size", "watermark_blocks", "victim")}
        pool["utilization"] = pool["occupancy"] * (1.0 - pool["waste_fraction"])
    _number(tables)


def _number(tables: Tables) -> None:
    """Points by their pools; the first results of version 2 have none, either."""
    place = {pool["pool_blocks"]: number for number, pool in enumerate(tables["pools"])}
    for row in (row for rows in tables.values() for row in rows):
        row["point"], row["choices"] = place[row["pool_blocks"]], ""


def _to_3(tables: Tables, engine: Mapping[str, Any]) -> None:
    if any("point" not in pool for pool in tables["pools"]):
        _number(tables)
    for row in tables["requests"]:
        row["returning_iterations"] = row["evicted_iterations"]
    tables |= {name: [] for name in _SINCE_3}
    for pool in tables["pools"]:
        requests, iterations = (
            [r for r in tables[t] if r["point"] == pool["point"]] for t in ("requests", "iterations")
        )
        key = {name: pool.get(name) for name in _KEY}
        pool |= {"clock": "iterations", "counters": "exact", "repetitions": 1}
        pool |= _rates(pool) | _occupied(pool, iterations) | _spread(pool, requests)
        tables["service"] += [key | row for row in _service(requests)]
        seconds = {"wall_s": pool["wall_s"], "engine_s": pool["engine_s"]}
        tables["repetitions"].append(key | {"repetition": 0} | seconds)
        tables["statistics"] += [
            key | {"metric": name, "unit": "s", **asdict(median_interval([value]))} for name, value in seconds.items()
        ]


def _rates(pool: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "collected_per_iteration": pool["collected_tokens"] / pool["iterations"],
        "forward_per_iteration": pool["forward_tokens"] / pool["iterations"],
    }


def _occupied(pool: Mapping[str, Any], iterations: Rows) -> dict[str, Any]:
    free = [row["free_blocks"] for row in iterations]
    if not free or None in free:
        return {}
    return {
        "mean_used_blocks": pool["pool_blocks"] - sum(free) / len(free),
        "peak_used_blocks": pool["pool_blocks"] - min(free),
    }


def _spread(pool: Mapping[str, Any], requests: Rows) -> dict[str, Any]:
    """How evictions spread over requests, and whose latency grew most."""
    found: dict[str, Any] = {}
    evictions = [row["preemptions"] for row in requests]
    if None not in evictions:
        victims = [number for number in evictions if number]
        found |= {
            "share_preempted": len(victims) / len(evictions),
            "preemptions_per_victim": sum(victims) / len(victims) if victims else None,
            "most_preemptions": max(evictions),
        }
    ratios = [row["paired_latency_ratio"] for row in requests]
    return found | ({} if None in ratios else {"worst_paired_latency_ratio": max(ratios)})


def _service(requests: Rows) -> Rows:
    """What is known without single tokens."""
    columns = (
        ("e2e", "iterations", "latency_iterations"),
        ("queue", "iterations", "queued_iterations"),
        ("e2e", "s", "latency_s"),
    )
    found = []
    for metric, unit, name in columns:
        values = [row[name] for row in requests]
        if None not in values:
            found.append(service_row(metric, unit, np.array(values, dtype=np.float64), None))
    return found


_STEPS: tuple[Callable[[Tables, Mapping[str, Any]], None], ...] = (_to_2, _to_3)
