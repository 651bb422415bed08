"""The values of a figure as a table: all of them, or, of very many, the least and greatest of each series."""

from __future__ import annotations

from collections.abc import Sequence

from batchbench.figures.marks import Mark, number
from batchbench.report.document import Cell, Table, table

LISTED = 300


def values(title: str, marks: Sequence[Mark]) -> Table | None:
    """None where nothing in the figure is a value of its own: then it is all bands and summaries."""
    if not marks:
        return None
    if len(marks) <= LISTED:
        rows = [[_text(m.panel), _text(m.series), _text(m.at), Cell(number(m.value), m.value)] for m in marks]
        return table(f"Values of the figure: {title}", ("panel", "what", "at", "value"), rows, [3])
    groups: dict[tuple[str, str], list[float]] = {}
    for mark in marks:
        groups.setdefault((mark.panel, mark.series), []).append(mark.value)
    rows = [
        [_text(panel), _text(series), *(Cell(number(v), v) for v in (len(found), min(found), max(found)))]
        for (panel, series), found in groups.items()
    ]
    note = f"The figure has {len(marks):,} values, too many to list: this is the range of each series."
    shown, left = rows[:LISTED], len(rows) - LISTED
    note += f" {left:,} more series are left out." if left > 0 else ""
    return table(
        f"Values of the figure: {title}", ("panel", "what", "values", "least", "greatest"), shown, [2, 3, 4], note
    )


def _text(text: str) -> Cell:
    return Cell(text, text)
