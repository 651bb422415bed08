"""The ledger of a finished point among the parts: checked before a sweep goes on from it, read to be joined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchbench.ledger import LEDGER
from batchbench.saved_timing import readable
from batchbench.schema import arrow_schema
from batchbench.timing import ContinuousTiming


def check_ledger(folder: Path, timing: ContinuousTiming, run_id: str) -> None:
    """Raise ResultError unless every table of the point's ledger is there, can be read, and is of that run."""
    rows = _rows(timing)
    for name in LEDGER:
        found = sum(part.num_rows for part in row_groups(folder, name, run_id))
        with readable(folder):
            if found != rows.get(name, found):
                raise ValueError(f"{found} rows of {name}, where the run had {rows[name]}")


def row_groups(folder: Path, name: str, run_id: str) -> Iterator[pa.Table]:
    """A table of the point, part by part, so that it is never held whole. Raises ResultError if it is damaged."""
    with readable(folder):
        file = pq.ParquetFile(folder / f"{name}.parquet")
    with file:
        with readable(folder):
            said = (file.schema_arrow.metadata or {}).get(b"run_id", b"").decode(errors="replace")
            if said != run_id or not file.schema_arrow.equals(arrow_schema(name)):
                raise ValueError(f"{name} of another run, or with other columns")
        for group in range(file.num_row_groups):
            with readable(folder):
                rows = file.read_row_group(group)
                rows.validate(full=True)
            yield rows


def _rows(timing: ContinuousTiming) -> dict[str, int]:
    """Rows of the tables that the run itself knows the length of."""
    record = timing.record
    admitted = sum(iteration >= 0 for iteration in record.admitted) + len(record.resumes)
    known = {"iterations": len(record.iterations), "evictions": len(record.evictions), "admissions": admitted}
    return known if record.runs is None else known | {"token_runs": len(record.runs)}
