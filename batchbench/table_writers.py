"""Tables on their way to Parquet files: opened together, closed together, given up in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchbench.schema import arrow_schema


class TableWriters:
    """A file for each of some tables of a folder. In a `with`: closed at its end, abandoned when that raises.

    metadata: of every file. Raises OSError where the system refuses; no file is left open then.
    """

    def __init__(self, folder: Path, names: Iterable[str], metadata: Mapping[str, str]) -> None:
        self._metadata = dict(metadata)
        self._files: dict[str, pq.ParquetWriter] = {}
        try:
            for name in names:
                schema = arrow_schema(name).with_metadata(self._metadata)
                self._files[name] = pq.ParquetWriter(folder / f"{name}.parquet", schema)
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, rows: pa.Table) -> None:
        """The next rows of a table."""
        self._files[name].write_table(rows.replace_schema_metadata(self._metadata))

    def close(self) -> None:
        """Finish every file."""
        try:
            for file in self._files.values():
                file.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of files that nobody will read, whatever the system says to that."""
        for file in self._files.values():
            with suppress(OSError, pa.ArrowException):
                file.close()
            file.is_open = False  # else it tries again when it is collected, and prints a traceback
            if file.file_handle is not None:
                with suppress(OSError, pa.ArrowException):
                    file.file_handle.close()
        self._files = {}

    def __enter__(self) -> TableWriters:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
