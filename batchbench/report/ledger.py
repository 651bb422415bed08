"""The ledger of evictions: what each point's sum up to, and each of them, or the largest where there are very many."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc

from batchbench.report.document import Cell, Paragraph, Part, Section, Table, counts, table, words
from batchbench.results import Result
from batchbench.sheets import escaped

LISTED = 250  # evictions; more than these nobody reads
_SHOWN = {
    "iteration": "iteration", "slot": "slot", "cached_tokens": "cached", "generated_tokens": "generated",
    "freed_blocks": "freed blocks", "resumed_iteration": "resumed in", "rebuilt_tokens": "rebuilt",
    "recovered_tokens": "recovered", "swapped_tokens": "swapped back",
}  # fmt: skip
_SUMS = {
    "preemptions": "evictions", "requests_preempted": "requests evicted", "most_preemptions": "most of one request",
    "thrashes": "thrashes", "recomputed_tokens": "recomputed", "rebuilt_tokens": "rebuilt",
    "recovered_tokens": "recovered", "swapped_tokens": "swapped out",
}  # fmt: skip


def ledger(result: Result) -> Section:
    """Sums of every point, then evictions: all, or the LISTED that dropped most, and how many there are."""
    parts: list[Part] = [_sums(result)]
    count = result.files["evictions"].num_rows
    if count:
        parts.append(_evictions(result, count))
    elif any(pool["preemptions"] is None for pool in result.rows("pools")):
        parts.append(Paragraph("The engine does not report its evictions one by one."))
    else:
        parts.append(Paragraph("Nobody was evicted."))
    return Section("evictions", "Evictions", tuple(parts))


def _sums(result: Result) -> Table:
    rows = [
        [*_where(pool), *counts(*(pool[column] for column in _SUMS))]
        for pool in result.rows("pools")
    ]  # fmt: skip
    note = (
        "Cached, recomputed, rebuilt, recovered and swapped are positions. Recomputed: of resumed rows; rebuilt: those "
        "of them whose K/V had existed before; recovered: found again in the prefix cache."
    )
    return _without_choices(
        table("Evictions of each point", ["pool", "choices", *_SUMS.values()], rows, [0, *range(2, 10)], note)
    )


def _evictions(result: Result, count: int) -> Table:
    found = result.files["evictions"]
    if count > LISTED:
        largest = pc.select_k_unstable(found, LISTED, [("cached_tokens", "descending")])
        found = found.take(largest.take(pc.array_sort_indices(largest)))  # in their order again
    rows = [
        [*_where(row), Cell(escaped(row["request_id"]), escaped(row["request_id"])), *counts(*(row[c] for c in _SHOWN)),
         *words(_fate(row))]
        for row in found.to_pylist()
    ]  # fmt: skip
    note = (
        f"{count:,} evictions; listed are the {LISTED} that dropped or copied the most positions. All of them are in "
        "evictions.parquet."
        if count > LISTED
        else f"All {count:,} of them, in the order in which they happened."
    )
    headings = ["pool", "choices", "request", *_SHOWN.values(), "its K/V"]
    caption = "Every eviction" if count <= LISTED else "The largest evictions"
    return _without_choices(table(caption, headings, rows, [0, *range(3, 3 + len(_SHOWN))], note))


def _without_choices(made: Table) -> Table:
    """Where only the pool varies, that column is empty."""
    if any(row[1].text for row in made.rows):
        return made
    rows = [(row[0], *row[2:]) for row in made.rows]
    numbers = [n - (n > 1) for n in made.numbers]
    return table(made.caption, (made.headings[0], *made.headings[2:]), rows, numbers, made.note)


def _where(row: dict[str, Any]) -> tuple[Cell, Cell]:
    blocks = row["pool_blocks"]
    return Cell(f"{blocks:,}", blocks), Cell(escaped(row["choices"]), escaped(row["choices"]))


def _fate(row: dict[str, Any]) -> str:
    """What became of its K/V."""
    fate = {"recompute": "dropped", "swap": "swapped", None: "not reported"}.get(row["reclaim"], "not reported")
    more = [name for name, holds in (("thrash", row["thrash"]), ("swap pool full", row["swap_full"])) if holds]
    return ", ".join([fate, *more])
