"""A finished run in files, and out of them again: equal in everything, so that metrics do not depend on who ran it."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchbench.errors import ResultError
from batchbench.protocol import EngineDescription, Point, RequestSpec, Text
from batchbench.recorder import Recorder
from batchbench.timing import ContinuousTiming

_COLUMNS, _FACTS = "run.npz", "run.json"
_DAMAGE = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError,
           RuntimeError,  # of zipfile: an encryption, a version; a recursion
           zipfile.BadZipFile, zlib.error, pa.ArrowException)  # fmt: skip


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """A part that cannot be read, or says what no run leaves, as one line."""
    try:
        yield
    except _DAMAGE:
        raise ResultError(f"{path}: damaged; sweep again without --resume") from None


def save_timing(folder: Path, timing: ContinuousTiming) -> None:
    """All of it but its requests and its texts, which are in the scenario and in the table `texts`."""
    columns = {name: np.asarray(values) for name, values in timing.record.columns().items()}
    np.savez(folder / _COLUMNS, **columns)  # type: ignore[arg-type]  # no name is that of an option
    facts = {
        "engine": asdict(timing.engine),
        "wall_s": timing.wall_s,
        "clock": timing.clock,
        "record": timing.record.facts(),
    }
    (folder / _FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def load_timing(folder: Path, point: Point, requests: Sequence[RequestSpec]) -> ContinuousTiming:
    """The run of that point and those requests. Raises ResultError if the files are damaged."""
    with readable(folder):
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        engine = EngineDescription(**facts["engine"] | {"reports": tuple(facts["engine"]["reports"])})
        # Opened here: of a damaged file numpy would leave it open.
        with open(folder / _COLUMNS, "rb") as file, np.load(file, allow_pickle=False) as columns:
            record = Recorder.restored(
                requests, engine.block_size, {name: columns[name].tolist() for name in columns.files}, facts["record"]
            )
        texts = _texts(folder) if engine.computes_text else {}
        if engine.computes_text and texts.keys() != record.index.keys():
            raise ValueError("texts of other requests")
        wall_s, clock = float(facts["wall_s"]), facts["clock"]
    return ContinuousTiming(engine, tuple(requests), record, texts, wall_s, point.choices, clock)


def _texts(folder: Path) -> dict[str, Text]:
    rows = pq.read_table(folder / "texts.parquet", columns=["request_id", "token_ids", "logit_gaps"]).to_pylist()
    return {
        row["request_id"]: Text(
            tuple(row["token_ids"]), None if row["logit_gaps"] is None else tuple(row["logit_gaps"])
        )
        for row in rows
    }
