"""Result folders: each pool saved as it finishes, the joined tables replaced atomically, read back whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from batchbench.errors import BatchbenchError, ResultError, UsageError
from batchbench.schema import SCHEMA_VERSION, TABLES, arrow_schema
from batchbench.tables import arrow_tables
from batchbench.timing import ContinuousTiming, reference_timing

_PARTS = "parts"


@dataclass(frozen=True)
class Result:
    """A result folder as read: run.json and every table as a data frame."""

    run: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame]

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
        """Begin with no parts. The folder must be writable (`require_writable`)."""
        self.discard_parts()
        self._parts.mkdir()

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
            for file in (*(f"{name}.parquet" for name in tables), "run.json"):
                os.replace(self._parts / file, self.folder / file)
            self.discard_parts()
        except OSError as error:
            raise BatchbenchError(f"output folder {self.folder}: {error.strerror or error}") from None

    def discard_parts(self) -> None:
        """Forget the pools saved so far."""
        if self._parts.exists():
            shutil.rmtree(self._parts)

    def _write_table(self, data: pa.Table, path: Path) -> None:
        metadata = {"schema_version": str(SCHEMA_VERSION), "run_id": self._run_id}
        pq.write_table(data.replace_schema_metadata(metadata), path)


def require_writable(folder: Path) -> None:
    """Create `folder` if need be and a file in it, for a moment. Raises UsageError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"output folder {folder}: {error.strerror or error}") from None


def load_result(folder: str | Path) -> Result:
    """Read a result folder. Raises ResultError if a file is missing, foreign or from another run."""
    folder = Path(folder)
    files = ["run.json", *(f"{name}.parquet" for name in TABLES)]
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ResultError(f"{folder} is not a result folder: it lacks {', '.join(missing)}")
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        read = {name: pq.read_table(folder / f"{name}.parquet", partitioning=None) for name in TABLES}
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, pa.ArrowException) as error:
        raise ResultError(f"{folder}: damaged file: {error}") from None
    if not isinstance(run, dict) or run.get("schema_version") != SCHEMA_VERSION:
        found = run.get("schema_version") if isinstance(run, dict) else None
        raise ResultError(f"{folder} has schema version {found}, this batchbench reads {SCHEMA_VERSION}")
    for name, table in read.items():
        if (table.schema.metadata or {}).get(b"run_id", b"").decode() != run.get("run_id"):
            raise ResultError(f"{folder}: {name}.parquet is from another run than run.json")
        if not table.schema.equals(arrow_schema(name)):
            raise ResultError(f"{folder}: {name}.parquet has other columns than schema version {SCHEMA_VERSION}")
    return Result(run, {name: table.to_pandas() for name, table in read.items()})
