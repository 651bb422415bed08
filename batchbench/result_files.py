"""The tables of a result folder as files: checked row group by row group, read in parts, refused when damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchbench.errors import ResultError
from batchbench.schema import SCHEMA_VERSION, TABLES, arrow_schema

T = TypeVar("T", pa.Table, pa.RecordBatch)
_BATCH = 1_048_576  # rows looked at together: what a check holds in memory


@contextmanager
def undamaged(folder: Path) -> Iterator[None]:
    """A file that cannot be read as one line that names the folder."""
    try:
        yield
    # ValueError: JSON, UTF-8, huge integers. The last four: old tables without a column, with other types or numbers.
    except (OSError, ValueError, RecursionError, pa.ArrowException, KeyError, TypeError, ArithmeticError) as error:
        raise ResultError(f"{folder}: damaged file: {error}") from None


class TableFiles(Mapping[str, pa.Table]):
    """Table name -> its rows, read anew whenever they are asked for.

    The files stay open, so that a sweep that replaces them meanwhile does not mix its rows with these. sources: of each
    table, a path or a buffer. Raises ResultError unless all are of that run.
    """

    def __init__(self, folder: Path, sources: Mapping[str, Any], run_id: str) -> None:
        self.folder = folder
        with undamaged(folder):
            self._files = {name: pq.ParquetFile(source) for name, source in sources.items()}
        for name, file in self._files.items():
            if (file.schema_arrow.metadata or {}).get(b"run_id", b"").decode(errors="replace") != run_id:
                raise ResultError(f"{folder}: {name}.parquet is from another run than run.json")

    def __getitem__(self, name: str) -> pa.Table:
        with undamaged(self.folder):
            return _sound(self._files[name].read())

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def point(self, name: str, point: int, columns: Sequence[str] | None) -> pa.Table:
        """The rows of one point, in the file's order; of the row groups that have any, only those columns."""
        file = self._files[name]
        wanted = list(columns or file.schema_arrow.names)
        with undamaged(self.folder):
            groups = [n for n in range(file.num_row_groups) if _may_hold(file.metadata.row_group(n).column(0), point)]
            found = _sound(file.read_row_groups(groups, columns=list(dict.fromkeys(["point", *wanted]))))
            return found.filter(pc.equal(found["point"], point)).select(wanted)

    def batches(self, name: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All rows of some columns, a part at a time."""
        with undamaged(self.folder):
            yield from map(_sound, self._files[name].iter_batches(_BATCH, columns=list(columns)))

    def check(self) -> None:
        """Raise ResultError unless the tables speak of the same points and requests, each once, in slots that exist."""
        for name, file in self._files.items():
            if not file.schema_arrow.equals(arrow_schema(name)):
                raise ResultError(
                    f"{self.folder}: {name}.parquet has other columns than schema version {SCHEMA_VERSION}"
                )
        points, slots = self._check_pools()
        ids = self._check_requests(points)
        for name in TABLES:
            if name not in ("pools", "requests"):
                self._check_ledger(name, points, ids, slots)
        self._check_statistics()

    def _check_pools(self) -> tuple[int, int]:
        """How many points there are, and slots at most."""
        pools = self["pools"]
        points = pools["point"].to_pylist()
        keys = set(zip(*(pools[c].to_pylist() for c in ("pool_blocks", "choices")), strict=True))
        if not points or points != list(range(len(points))) or len(keys) < len(points) or min(keys)[0] < 1:
            raise self._damage("pools.parquet has no points, or one twice, or one of no blocks")
        for name, column in zip(pools.column_names, pools.columns, strict=True):
            if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column), min_count=0).as_py():
                raise self._damage(f"pools.parquet has a {name} that is no number")
        return len(points), pc.max(pools["slots"]).as_py()

    def _check_requests(self, points: int) -> pa.Array:
        """The requests' names: the same at every point, in one order."""
        rows = self._files["requests"].metadata.num_rows
        count = rows // points
        ids, place, same = pa.array([], pa.string()), 0, rows > 0 and rows % points == 0
        for batch in self.batches("requests", ("point", "request_id")) if same else ():
            names = batch["request_id"]
            ids = pa.concat_arrays([ids, names.slice(0, count - len(ids))])
            for start, stop in _laps(place, place + len(names), count):  # stretches of one point
                mine, part = slice(start - place, stop - place), ids.slice(start % count, stop - start)
                same &= names[mine].equals(part) and pc.all(pc.equal(batch["point"][mine], start // count)).as_py()
            place += len(names)
        if not same or pc.count_distinct(ids).as_py() < count:
            raise self._damage("requests.parquet does not have every request once per point")
        return ids

    def _check_ledger(self, name: str, points: int, ids: pa.Array, slots: int) -> None:
        columns = [c for c in ("point", "request_id", "slot") if c in self._files[name].schema_arrow.names]
        for batch in self.batches(name, columns):
            known = _within(batch["point"], points)
            if "request_id" in columns:
                known &= pc.all(pc.is_in(batch["request_id"], value_set=ids), min_count=0).as_py()
            if not known:
                raise self._damage(f"{name}.parquet speaks of points or requests that are not there")
            if "slot" in columns and not _within(batch["slot"], slots):
                raise self._damage(f"{name}.parquet has a slot outside the {slots} there are")

    def _check_statistics(self) -> None:
        """An interval wherever there are several runs."""
        rows = self["statistics"]
        for name in ("low", "high"):
            if not pc.all(pc.equal(pc.is_null(rows[name]), pc.equal(rows["n"], 1)), min_count=0).as_py():
                raise self._damage(f"statistics.parquet has a {name} of one run, or none of several")

    def _damage(self, what: str) -> ResultError:
        return ResultError(f"{self.folder}: damaged file: {what}")


def _sound(rows: T) -> T:
    """Rows whose text is UTF-8, and whose values are all there; Arrow reads them unseen. Raises ArrowInvalid."""
    rows.validate(full=True)
    return rows


def _within(values: pa.Array, end: int) -> bool:
    """Whether every value that is not null is of 0 to end - 1."""
    found: dict[str, Any] = pc.min_max(values).as_py()
    return found["min"] is None or bool(0 <= found["min"] <= found["max"] < end)


def _laps(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """`start` to `stop`, cut at every multiple of `length`."""
    while start < stop:
        end = min(stop, (start // length + 1) * length)
        yield start, end
        start = end


def _may_hold(column: pq.ColumnChunkMetaData, point: int) -> bool:
    """Whether a row group may have rows of a point, by the least and greatest that are said of its `point` column."""
    known = column.statistics
    return known is None or not known.has_min_max or bool(known.min <= point <= known.max)
