"""Result folders: written point by point, resumed, replaced as a whole, opened again."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from batchbench.errors import BatchbenchError, ResultError, UsageError
from batchbench.ledger import LEDGER, Ledger
from batchbench.lock import FolderLock
from batchbench.parts import Parts, has_parts, located
from batchbench.protocol import EngineDescription, Point, RequestSpec
from batchbench.repetitions import Finished, Measured, measured
from batchbench.result_files import TableFiles, undamaged
from batchbench.resuming import difference
from batchbench.saved_ledger import check_ledger, row_groups
from batchbench.saved_timing import load_timing, readable, save_timing
from batchbench.schema import SCHEMA_VERSION, TABLES
from batchbench.schema_versions import lifted, table_names
from batchbench.service import Slo
from batchbench.table_writers import TableWriters
from batchbench.tables import point_key, point_tables
from batchbench.timing import ContinuousTiming, reference_timing

_FILES = (*(f"{name}.parquet" for name in TABLES), "run.json")


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
    """Writes one sweep into a folder. An earlier result there stays whole until `join`. `close` ends it.

    slo: the objectives that requests are held to.
    """

    def __init__(self, folder: Path, slo: Slo | None = None) -> None:
        self.folder, self._slo = folder, slo or Slo()
        self._parts, self._lock = Parts(folder, _FILES), FolderLock(folder)
        self._run_id = uuid.uuid4().hex
        self._saved = 0
        self._files: TableWriters | None = None  # the ledger of the point that is open
        self._ledger: Ledger | None = None

    def open(self, about: Mapping[str, Any] | None = None, *, resume: bool = False) -> None:
        """Lock the folder, and forget the parts in it, or with `resume` go on from them.

        about: what run.json will say, as far as it is known. Raises UsageError if the folder cannot be written, is
        another's, or holds parts that `about` does not describe; they are left as they are then.
        """
        about = {"schema_version": SCHEMA_VERSION, **(about or {})}
        try:
            self._take_folder()
            with _writing(self.folder, UsageError):
                before = self._parts.manifest() if resume else None
                if before is None:
                    self._parts.begin({**about, "run_id": self._run_id})
                elif changed := difference(before, about):
                    raise UsageError(
                        f"output folder {self.folder}: cannot resume, {changed}; sweep without --resume to start again"
                    )
                else:
                    self._run_id = str(before.get("run_id"))
        except BaseException:
            self.close()
            raise

    def complete(self, about: Mapping[str, Any]) -> bool:
        """Whether the folder holds this very sweep's result, with no point to resume. Raises as `open` does."""
        if not located(self.folder, _FILES):
            return False
        try:
            self._take_folder()
            if self._parts.manifest() is not None:
                return False
            was = load_result(self.folder).run
            self.discard_parts()  # of a sweep that ended while it deleted them
        finally:
            self.close()
        if changed := difference({**was, "points": None}, {"schema_version": SCHEMA_VERSION, **about, "points": None}):
            raise UsageError(
                f"output folder {self.folder}: nothing to resume but another result, {changed}; sweep without --resume "
                f"to replace it"
            )
        return True

    def _take_folder(self) -> None:
        """With its lock, and with what a sweep that died had joined put into place."""
        with _writing(self.folder, UsageError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in _FILES:
                if (self.folder / file).is_dir():
                    raise UsageError(f"output folder {self.folder}: {file} is a folder there")
            self._lock.acquire()
            self._parts.finish_installing()

    def close(self) -> None:
        """Let others write there. What is finished stays."""
        if self._files is not None:
            self._files.abandon()  # of a point that did not finish
        self._lock.release()

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- points --------------------------------------------------------------------------

    def finished(self, points: Sequence[Point], requests: Sequence[RequestSpec], repetitions: int) -> Finished:
        """What need not be run again. Raises ResultError if any of it, or of what `join` will need, is damaged."""
        self._saved = self._parts.saved(len(points))
        timings = [
            load_point(self._parts.point(n), n, points[n], requests, self._run_id, self._slo)
            for n in range(self._saved)
        ]
        repeated = []
        if self._saved == len(points):
            for number, place in product(range(1, repetitions), range(len(points))):
                run = self._parts.repetition(number, place)
                if run is None or run.keys() != measured(timings[place]).keys():
                    break
                repeated.append(run)
        return Finished(timings, repeated)

    def open_point(self, point: Point, engine: EngineDescription) -> Ledger:
        """What takes the next point's iterations as they happen."""
        with _writing(self.folder):
            folder = self._parts.begin_point(self._saved)
            self._files = TableWriters(folder, LEDGER, self._metadata)
        self._unfinished = folder
        self._ledger = Ledger(point_key(self._saved, point, engine), self._append)
        return self._ledger

    def save_point(self, timing: ContinuousTiming) -> None:
        """Finish the point that is open: all of it among the parts, or nothing. Paired columns wait for `join`."""
        assert self._ledger is not None and self._files is not None
        with _writing(self.folder):
            self._ledger.close()
            self._files.close()
            tables = point_tables(self._saved, timing, None, self._slo)
            with TableWriters(self._unfinished, tables, self._metadata) as files:
                for name, data in tables.items():
                    files.write(name, data)
            save_timing(self._unfinished, timing)
            self._parts.finish_point(self._saved)
        self._saved += 1

    def save_repetition(self, number: int, place: int, run: Measured) -> None:
        """What a repetition after the first measured."""
        with _writing(self.folder):
            self._parts.save_repetition(number, place, run)

    # ---- the whole -----------------------------------------------------------------------

    def join(self, timings: list[ContinuousTiming], run: Mapping[str, Any]) -> None:
        """Replace the folder's tables and run.json by this sweep's, drop the parts, and let others write."""
        document = {"schema_version": SCHEMA_VERSION, "run_id": self._run_id, **run}
        with _writing(self.folder):
            folder = self._parts.begin_joining()
            with TableWriters(folder, TABLES, self._metadata) as files:
                self._join_ledgers(len(timings), files)
                for place, timing in enumerate(timings):
                    for name, data in point_tables(place, timing, reference_timing(timings, timing), self._slo).items():
                        files.write(name, data)
            (folder / "run.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            self._parts.install()
        self.close()

    def _join_ledgers(self, points: int, files: TableWriters) -> None:
        """Row group by row group, so that no table is ever held whole."""
        for name, place in product(LEDGER, range(points)):
            for rows in row_groups(self._parts.point(place), name, self._run_id):
                files.write(name, rows)

    @property
    def _metadata(self) -> dict[str, str]:
        return {"schema_version": str(SCHEMA_VERSION), "run_id": self._run_id}

    def _append(self, name: str, data: pa.Table) -> None:
        """Rows of the ledger of the point that is open."""
        assert self._files is not None
        with _writing(self.folder):
            self._files.write(name, data)

    def discard_parts(self) -> None:
        """Forget the points saved so far. Raises UsageError rather than delete what batchbench did not make."""
        with _writing(self.folder):
            self._parts.discard()


def load_point(
    folder: Path, place: int, point: Point, requests: Sequence[RequestSpec], run_id: str, slo: Slo
) -> ContinuousTiming:
    """The finished point in a folder of parts. Raises ResultError unless a result can be joined from it."""
    timing = load_timing(folder, point, requests)
    check_ledger(folder, timing, run_id)
    with readable(folder):
        point_tables(place, timing, timing, slo)  # now, not when all the others have run
    return timing


@contextmanager
def _writing(folder: Path, refused: type[BatchbenchError] = BatchbenchError) -> Iterator[None]:
    """The system's refusals as one line that names the folder: bad input before a sweep, a failure during one."""
    try:
        yield
    except OSError as error:
        what = os.strerror(error.errno) if error.errno else str(error)  # Arrow's own words name its calls
        raise refused(f"output folder {folder}: {what}") from None


def replace_result(folder: Path, source: Path) -> None:
    """Make `folder` a copy of the result folder `source`, whole at every moment.

    Raises UsageError if something else is there, or a sweep that runs or could be resumed.
    """
    load_result(source)
    parts, lock = Parts(folder, _FILES), FolderLock(folder)
    with _writing(folder, UsageError):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            load_result(folder)
        lock.acquire()
        try:
            parts.finish_installing()
            if parts.manifest() is not None:
                raise UsageError(f"{folder} holds a sweep that has not ended; finish it with --resume, or delete it")
            parts.begin({"copy_of": load_result(source).run["run_id"]})
            copies = parts.begin_joining()
            for file, path in located(source, _FILES).items():
                shutil.copyfile(path, copies / file)
            parts.install()
        finally:
            lock.release()


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

    One of an older schema version is lifted to the current tables; its `run` says which. One that a sweep was putting
    into place when it ended is read from where its files are. Raises ResultError if a file is missing, damaged,
    foreign, from another run, or of a newer version.
    """
    folder = Path(folder)
    try:
        run, files = _opened(folder)
    except ResultError:
        run, files = _opened(folder)  # a sweep may just have replaced what was there, file by file
    files.check()
    return Result(run, files)


def _opened(folder: Path) -> tuple[dict[str, Any], TableFiles]:
    """run.json, and the open tables of that run, lifted if they are of an older version."""
    found = located(folder, _FILES)
    if "run.json" not in found:
        begun = "; a sweep into it has not finished, and --resume goes on with it" if has_parts(folder) else ""
        raise ResultError(f"{folder} is not a result folder: it lacks run.json{begun}")
    with undamaged(folder):
        run = json.loads(found["run.json"].read_text(encoding="utf-8"))
    version = run.get("schema_version") if isinstance(run, dict) else None
    names = table_names(version, folder)
    if missing := [f"{name}.parquet" for name in names if f"{name}.parquet" not in found]:
        raise ResultError(f"{folder} is not a result folder: it lacks {', '.join(missing)}")
    if not _complete(run):
        raise ResultError(f"{folder}: damaged file: run.json lacks the scenario's name, its engine or the run's id")
    sources: Mapping[str, Any] = {name: found[f"{name}.parquet"] for name in names}
    if version != SCHEMA_VERSION:
        with undamaged(folder):
            sources = lifted(run, sources)
        run = {"trace": None, "text_repetition": None, "inputs": {}, **run}
    return run, TableFiles(folder, sources, run["run_id"])


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
