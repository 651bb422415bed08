"""Result folders: each point saved as it finishes, the joined tables replaced atomically, opened again."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from batchbench.errors import BatchbenchError, ResultError, UsageError
from batchbench.ledger import LEDGER, Ledger
from batchbench.protocol import EngineDescription, Point
from batchbench.result_files import TableFiles, undamaged
from batchbench.schema import SCHEMA_VERSION, TABLES, arrow_schema
from batchbench.service import Slo
from batchbench.tables import point_key, point_tables
from batchbench.timing import ContinuousTiming, reference_timing

PARTS = "batchbench-parts"  # points saved while a sweep runs
_FILES = (*(f"{name}.parquet" for name in TABLES), "run.json")
_MARK = ".made-by-batchbench"  # in PARTS: this folder is ours to delete


class Result:
    """A result folder as read: run.json, and tables that are read when they are asked for.

    files: where the tables are. Only whole tables are kept once read; `point` reads what it is asked for, every time.
    """

    def __init__(self, run: Mapping[str, Any], files: TableFiles) -> None:
        self.run, self.files = run, files
        self.tables: Mapping[str, pd.DataFrame] = _Frames(files)

    def rows(self, table: str) -> list[dict[str, Any]]:
        """A table's rows with exact types, nulls as None."""
        return list(self.files[table].to_pylist())

    def point(self, table: str, point: int, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The rows of one point of the sweep; of these columns, or of all."""
        frame: pd.DataFrame = self.files.point(table, point, columns).to_pandas()
        return frame


class _Frames(Mapping[str, pd.DataFrame]):
    """Every table as a data frame; a column with nulls becomes floating point."""

    def __init__(self, files: TableFiles) -> None:
        self._files, self._read = files, dict[str, pd.DataFrame]()

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._read:
            self._read[name] = self._files[name].to_pandas()
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class ResultWriter:
    """Writes one sweep into a folder. An earlier result there stays whole until `join`.

    slo: the objectives that requests are held to.
    """

    def __init__(self, folder: Path, slo: Slo | None = None) -> None:
        self.folder, self._parts, self._slo = folder, folder / PARTS, slo or Slo()
        self._run_id = uuid.uuid4().hex
        self._saved = 0
        self._files: dict[str, pq.ParquetWriter] = {}
        self._ledger: Ledger | None = None

    def open(self) -> None:
        """Create the folder with no parts in it. Raises UsageError if it cannot be written or is not ours."""
        with _writing(self.folder, UsageError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in _FILES:
                if (self.folder / file).is_dir():
                    raise UsageError(f"output folder {self.folder}: {file} is a folder there")
            self.discard_parts()
            self._parts.mkdir()
            (self._parts / _MARK).touch()

    def open_point(self, point: Point, engine: EngineDescription) -> Ledger:
        """What takes the next point's iterations as they happen."""
        with _writing(self.folder):
            self._unfinished.mkdir()
            self._files = {name: self._writer(name, self._unfinished) for name in LEDGER}
        self._ledger = Ledger(point_key(self._saved, point, engine), self._append)
        return self._ledger

    def save_point(self, timing: ContinuousTiming) -> None:
        """Finish the point that is open: all of it among the parts, or nothing. Paired columns wait for `join`."""
        assert self._ledger is not None
        with _writing(self.folder):
            self._ledger.close()
            self._close_files()
            for name, data in point_tables(self._saved, timing, None, self._slo).items():
                with self._writer(name, self._unfinished) as file:
                    file.write_table(data)
            self._unfinished.rename(self._parts / f"point-{self._saved}")
        self._saved += 1

    def join(self, timings: list[ContinuousTiming], run: Mapping[str, Any]) -> None:
        """Replace the folder's tables and run.json by this sweep's, then drop the parts."""
        document = {"schema_version": SCHEMA_VERSION, "run_id": self._run_id, **run}
        with _writing(self.folder):
            self._join_ledgers(len(timings))
            self._files = {name: self._writer(name, self._parts) for name in TABLES if name not in LEDGER}
            for place, timing in enumerate(timings):
                for name, data in point_tables(place, timing, reference_timing(timings, timing), self._slo).items():
                    self._append(name, data)
            self._close_files()
            (self._parts / "run.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            for file in _FILES:
                os.replace(self._parts / file, self.folder / file)
            self.discard_parts()

    def _join_ledgers(self, points: int) -> None:
        """Row group by row group, so that no table is ever held whole."""
        for name in LEDGER:
            with self._writer(name, self._parts) as joined:
                for place in range(points):
                    part = pq.ParquetFile(self._parts / f"point-{place}" / f"{name}.parquet")
                    for group in range(part.num_row_groups):
                        joined.write_table(part.read_row_group(group).replace_schema_metadata(self._metadata))

    @property
    def _unfinished(self) -> Path:
        return self._parts / f".point-{self._saved}"

    @property
    def _metadata(self) -> dict[str, str]:
        return {"schema_version": str(SCHEMA_VERSION), "run_id": self._run_id}

    def _writer(self, name: str, folder: Path) -> pq.ParquetWriter:
        return pq.ParquetWriter(folder / f"{name}.parquet", arrow_schema(name).with_metadata(self._metadata))

    def _append(self, name: str, data: pa.Table) -> None:
        with _writing(self.folder):
            self._files[name].write_table(data.replace_schema_metadata(self._metadata))

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def discard_parts(self) -> None:
        """Forget the points saved so far. Raises UsageError rather than delete what batchbench did not make."""
        if not self._parts.exists() and not self._parts.is_symlink():
            return
        mark = self._parts / _MARK
        if self._parts.is_symlink() or mark.is_symlink() or not mark.is_file():
            raise UsageError(f"{self._parts} was not made by batchbench; move it away")
        shutil.rmtree(self._parts)


@contextmanager
def _writing(folder: Path, refused: type[BatchbenchError] = BatchbenchError) -> Iterator[None]:
    """The system's refusals as one line that names the folder: bad input before a sweep, a failure during one."""
    try:
        yield
    except OSError as error:
        raise refused(f"output folder {folder}: {error.strerror or error}") from None


def require_writable(folder: Path) -> None:
    """Raise UsageError if `folder` could not be written or created. Leaves nothing behind."""
    with _writing(folder, UsageError):
        target = folder.absolute()
        nearest = next(path for path in (target, *target.parents) if _there(path))
        for part in target.relative_to(nearest).parts:
            _there(nearest / part)  # a name that is too long
        with tempfile.TemporaryFile(dir=nearest):
            pass


def _there(path: Path) -> bool:
    """Whether a path exists; raises OSError for one that never could, such as too long a name."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def load_result(folder: str | Path) -> Result:
    """Open a result folder and check its tables, a part at a time; they are read when they are asked for.

    Raises ResultError if a file is missing, damaged, foreign or from another run.
    """
    folder = Path(folder)
    if missing := [file for file in _FILES if not (folder / file).is_file()]:
        raise ResultError(f"{folder} is not a result folder: it lacks {', '.join(missing)}")
    with undamaged(folder):
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    files = TableFiles(folder)
    found = run.get("schema_version") if isinstance(run, dict) else None
    if type(found) is not int or found != SCHEMA_VERSION:
        raise ResultError(f"{folder} has schema version {found}, this batchbench reads {SCHEMA_VERSION}")
    if not _complete(run):
        raise ResultError(f"{folder}: damaged file: run.json lacks the scenario's name, its engine or the run's id")
    files.check(run["run_id"])
    return Result(run, files)


def _complete(run: Mapping[str, Any]) -> bool:
    """Whether run.json has what readers rely on."""
    scenario, engine = run.get("scenario"), run.get("engine")
    return (
        isinstance(run.get("run_id"), str)
        and isinstance(scenario, dict)
        and isinstance(scenario.get("name"), str)
        and scenario["name"].isprintable()
        and isinstance(engine, dict)
    )
