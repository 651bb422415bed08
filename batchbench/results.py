"""Result folders: each pool saved as it finishes, the joined tables replaced atomically, read back whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from batchbench.errors import BatchbenchError, ResultError, UsageError
from batchbench.schema import SCHEMA_VERSION, TABLES, arrow_schema
from batchbench.tables import arrow_tables
from batchbench.timing import ContinuousTiming, reference_timing

_PARTS = "batchbench-parts"  # pools saved while a sweep runs
_FILES = (*(f"{name}.parquet" for name in TABLES), "run.json")
_MARK = ".made-by-batchbench"  # in _PARTS: this folder is ours to delete


@dataclass(frozen=True)
class Result:
    """A result folder as read: run.json and every table."""

    run: Mapping[str, Any]
    arrow: Mapping[str, pa.Table]

    @cached_property
    def tables(self) -> Mapping[str, pd.DataFrame]:
        """Every table as a data frame; a column with nulls becomes floating point."""
        return {name: table.to_pandas() for name, table in self.arrow.items()}

    def rows(self, table: str) -> list[dict[str, Any]]:
        """A table's rows with exact types, nulls as None."""
        return list(self.arrow[table].to_pylist())

    def pool(self, table: str, pool_blocks: int) -> pd.DataFrame:
        """The rows of one pool."""
        frame = self.tables[table]
        return frame[frame["pool_blocks"] == pool_blocks]


class ResultWriter:
    """Writes one sweep into a folder. An earlier result there stays whole until `join`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._parts = folder, folder / _PARTS
        self._run_id = uuid.uuid4().hex

    def open(self) -> None:
        """Create the folder with no parts in it. Raises UsageError if it cannot be written or is not ours."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in _FILES:
                if (self.folder / file).is_dir():
                    raise UsageError(f"output folder {self.folder}: {file} is a folder there")
            self.discard_parts()
            self._parts.mkdir()
            (self._parts / _MARK).touch()
        except OSError as error:
            raise UsageError(f"output folder {self.folder}: {error.strerror or error}") from None

    def save_pool(self, timing: ContinuousTiming) -> None:
        """Save a finished pool under parts/, complete or not at all; paired columns wait for `join`."""
        name = f"pool-{timing.pool_blocks}"
        unfinished = self._parts / f".{name}"
        try:
            unfinished.mkdir()
            for table, data in arrow_tables([timing], None).items():
                self._write_table(data, unfinished / f"{table}.parquet")
            unfinished.rename(self._parts / name)
        except OSError as error:
            raise BatchbenchError(f"output folder {self.folder}: {error.strerror or error}") from None

    def join(self, timings: list[ContinuousTiming], run: Mapping[str, Any]) -> None:
        """Replace the folder's tables and run.json by this sweep's, then drop the parts."""
        tables = arrow_tables(timings, reference_timing(timings))
        document = {"schema_version": SCHEMA_VERSION, "run_id": self._run_id, **run}
        try:
            for name, data in tables.items():
                self._write_table(data, self._parts / f"{name}.parquet")
            (self._parts / "run.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            for file in _FILES:
                os.replace(self._parts / file, self.folder / file)
            self.discard_parts()
        except OSError as error:
            raise BatchbenchError(f"output folder {self.folder}: {error.strerror or error}") from None

    def discard_parts(self) -> None:
        """Forget the pools saved so far. Raises UsageError rather than delete what batchbench did not make."""
        if not self._parts.exists() and not self._parts.is_symlink():
            return
        if self._parts.is_symlink() or not (self._parts / _MARK).is_file():
            raise UsageError(f"{self._parts} was not made by batchbench; move it away")
        shutil.rmtree(self._parts)

    def _write_table(self, data: pa.Table, path: Path) -> None:
        metadata = {"schema_version": str(SCHEMA_VERSION), "run_id": self._run_id}
        pq.write_table(data.replace_schema_metadata(metadata), path)


def require_writable(folder: Path) -> None:
    """Raise UsageError if `folder` could not be written or created. Leaves nothing behind."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UsageError(f"output folder {folder}: {error.strerror or error}") from None


def load_result(folder: str | Path) -> Result:
    """Read a result folder. Raises ResultError if a file is missing, foreign or from another run."""
    folder = Path(folder)
    if missing := [file for file in _FILES if not (folder / file).is_file()]:
        raise ResultError(f"{folder} is not a result folder: it lacks {', '.join(missing)}")
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        read = {name: pq.read_table(folder / f"{name}.parquet", partitioning=None) for name in TABLES}
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, pa.ArrowException) as error:
        raise ResultError(f"{folder}: damaged file: {error}") from None
    found = run.get("schema_version") if isinstance(run, dict) else None
    if found != SCHEMA_VERSION:
        raise ResultError(f"{folder} has schema version {found}, this batchbench reads {SCHEMA_VERSION}")
    if not _complete(run):
        raise ResultError(f"{folder}: damaged file: run.json lacks the scenario's name, its engine or the run's id")
    for name, table in read.items():
        if (table.schema.metadata or {}).get(b"run_id") != run["run_id"].encode():
            raise ResultError(f"{folder}: {name}.parquet is from another run than run.json")
        if not table.schema.equals(arrow_schema(name)):
            raise ResultError(f"{folder}: {name}.parquet has other columns than schema version {SCHEMA_VERSION}")
    if not read["pools"].num_rows:
        raise ResultError(f"{folder}: pools.parquet is empty")
    return Result(run, read)


def _complete(run: Mapping[str, Any]) -> bool:
    """Whether run.json has what readers rely on."""
    scenario, engine = run.get("scenario"), run.get("engine")
    return (
        isinstance(run.get("run_id"), str)
        and isinstance(scenario, dict)
        and isinstance(scenario.get("name"), str)
        and isinstance(engine, dict)
        and isinstance(slots := engine.get("slots"), int)
        and slots >= 1
    )
