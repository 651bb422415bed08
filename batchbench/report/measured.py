"""What a result measured and what it did not: clock, repetitions, and every column with nulls and why."""

from __future__ import annotations

from typing import Any

from batchbench.report.document import Facts, Paragraph, Part, Section, Table, table, words
from batchbench.results import Result
from batchbench.schema import MAY_DIFFER, SCHEMA_VERSION, TABLES
from batchbench.sheets import shown
from batchbench.units import show_count

_CLOCKS = {
    "iterations": "Arrivals are counted in iterations. Seconds are measured inside the engine: what the harness does "
    "between two iterations is nobody's latency.",
    "virtual": "Seconds are modelled: a part per iteration, per row, and per position beyond one a row. They come out "
    "the same on every machine, and say nothing of this one.",
    "wall": "Seconds are real, the harness's own work between two iterations included.",
}


def measured(result: Result) -> Section:
    """Clock, repetitions and numerics; then what is null, by reason."""
    pools = result.rows("pools")
    parts: list[Part] = [_facts(result, pools)]
    if missing := _missing(result):
        parts.append(missing)
    else:
        parts.append(Paragraph("No value of any table is null."))
    return Section("measured", "What is and is not measured", tuple(parts))


def _facts(result: Result, pools: list[dict[str, Any]]) -> Facts:
    clocks = sorted({pool["clock"] for pool in pools})
    counters = "may differ between runs" if any(pool["counters"] == MAY_DIFFER for pool in pools) else "exact"
    timed = any(pool["engine_s"] is not None for pool in pools)
    repetition = result.run["scenario"].get("run")
    warmup = repetition.get("warmup") if isinstance(repetition, dict) else None
    text = "compared" if len(pools) > 1 else "computed, compared with nothing"
    return Facts(
        "What figures mean here",
        (
            ("counters", f"{counters}, of the engine's own arithmetic"),
            ("texts", "not computed" if any(pool["text_digest"] is None for pool in pools) else text),
            ("clock", " ".join(_CLOCKS.get(clock, clock) for clock in clocks)),
            ("seconds", _seconds(pools, timed)),
            ("repetitions", _repetitions(pools, warmup)),
            ("text repetition", _repetition(result.run.get("text_repetition"))),
        ),
    )


def _seconds(pools: list[dict[str, Any]], timed: bool) -> str:
    if not timed:
        return "none: a schedule on the clock of iterations takes no time"
    if all(pool["clock"] == "virtual" for pool in pools):
        return "modelled; only wall_s and copy_s are this machine's"
    return "measured on the machine below; of another machine they say nothing"


def _repetitions(pools: list[dict[str, Any]], warmup: Any) -> str:
    least = min(pool["repetitions"] for pool in pools)
    before = f", after {show_count(warmup, 'pass')} to warm up" if type(warmup) is int and warmup else ""
    if least == 1:
        return f"one run of each point{before}: a measured time is one sample, and has no interval"
    return f"{least} runs of each point{before}; tables tell of the first, intervals of all"


def _repetition(value: Any) -> str:
    missing = "not known: no text of at least 32 tokens"
    return shown(value if isinstance(value, float) else None, "{:.0%} of the median text's tokens repeat", missing)


def _missing(result: Result) -> Table | None:
    """By reason: which columns are null, in all rows of their table or in some."""
    reasons: dict[str, list[str]] = {}
    version = result.run.get("schema_version")
    older = (
        ""
        if version == SCHEMA_VERSION
        else f"the result is of schema version {version}, or for the column's own reason"
    )
    for name, columns in TABLES.items():
        nullable = [column for column in columns if column.null_when]
        rows, nulls = 0, dict.fromkeys((column.name for column in nullable), 0)
        for batch in result.files.batches(name, [column.name for column in nullable] or [columns[0].name]):
            rows += batch.num_rows
            for column in nullable:
                nulls[column.name] += batch[column.name].null_count
        for column in nullable:
            if count := nulls[column.name]:
                if older and count == rows:
                    reasons.setdefault(older, []).append(f"{name}.{column.name}")
                    continue
                share = "" if count == rows else f" ({count:,} of {rows:,} rows)"
                reasons.setdefault(column.null_when.replace("`", ""), []).append(f"{name}.{column.name}{share}")
    if not reasons:
        return None
    found = [words(reason, ", ".join(columns)) for reason, columns in reasons.items()]
    note = "Null is never 0. Without a count in brackets a column is null in every row of its table."
    return table("Values that are null", ["null when", "columns"], found, [], note)
