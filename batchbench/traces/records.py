"""Streams the records of a file, whatever it is: CSV, JSON a line, JSON values, Parquet. Knows no format's columns."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchbench.errors import TraceError
from batchbench.regular_files import open_regular
from batchbench.traces.cells import Number, RefusedCell, shown

MAX_CHARS = 16 * 2**20  # of a line or a JSON value: room for a million token ids, not for a file without line breaks
_CHUNK = 2**18
_BATCH = 8192
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}

BOM = "byte order mark"
BLANK = "blank lines"
UNENDED = "no line break at the end of the file, so the last row may be cut short"
UNCLOSED = "the array is not closed"

Record = dict[str, Any]
Note = Callable[[str], None]
Records = Iterator[tuple[int, Record | None]]  # None: a last line that is cut short

_DECODER = json.JSONDecoder(parse_float=Number, parse_constant=Number)


def ignore(_: str) -> None:
    """A note that nobody keeps: of a first look at the file."""


def look(path: Path) -> str:
    """What a file is by its first character: "csv", "jsonl", "json" or "parquet".

    Raises TraceError if it cannot be read, is empty, packed, or no regular file (it is read more than once).
    """
    try:
        with open_regular(path) as file:
            start = file.read(8)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise TraceError(f"trace {path}: {getattr(error, 'strerror', None) or error}") from None
    if packed := next((name for magic, name in _PACKED.items() if start.startswith(magic)), None):
        raise TraceError(f"trace {path} is packed ({packed}); unpack it first")
    if start.startswith(b"PAR1"):
        return "parquet"
    first = _first_character(path)
    if first == "":
        raise TraceError(f"trace {path} is empty")
    return {"[": "json", "{": "jsonl"}.get(first, "csv")


def _first_character(path: Path) -> str:
    """That is no space; nothing if there is none. A JSON array may be one line of gigabytes, so no line is read."""
    with open_regular(path) as file:
        encoding = _encoding(file, ignore)
        while chunk := file.read(_CHUNK):
            if text := chunk.decode(encoding, "replace").lstrip():
                return text[0]
    return ""


def lines(path: Path, note: Note) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its line break) of every line that is not blank. UTF-8, or UTF-16 with a mark."""
    with open_regular(path) as file:
        encoding = _encoding(file, note)
        text = file if encoding == "utf-8" else io.TextIOWrapper(file, encoding, newline="\n")
        number = 0
        while True:
            number += 1
            try:
                raw = text.readline(MAX_CHARS + 1)
                line = raw if isinstance(raw, str) else _decoded(raw)
            except UnicodeDecodeError:
                raise TraceError(f"{path}:{number}: not {encoding.upper()} text") from None
            if len(line) > MAX_CHARS:
                raise TraceError(f"{path}:{number}: the line is longer than {MAX_CHARS} characters")
            if not line:
                return
            if not line.endswith("\n"):
                note(UNENDED)
            if line.strip():
                yield number, line.rstrip("\r\n")
            else:
                note(BLANK)


def _decoded(raw: bytes) -> str:
    """A line as text; where the file ends within a character, without that."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data" or len(raw) > MAX_CHARS:
            raise
        return raw[: error.start].decode("utf-8")


def _encoding(file: io.BufferedReader, note: Note) -> str:
    """By the byte order mark, which is passed over; UTF-8 without one."""
    start = file.peek(4)
    for mark, encoding in _BOMS:
        if start.startswith(mark):
            note(BOM)
            file.read(len(mark))
            return encoding
    return "utf-8"


def csv_records(path: Path, note: Note) -> Records:
    """A record a line after the line of names; cells are texts. Raises TraceError: a cell too many or too few.

    Tabs divide cells where the line of names has some and no comma. Names are compared as `plain_name` makes them.
    """
    numbered = lines(path, note)
    number, header = next(numbered)
    comma = "\t" if "\t" in header and "," not in header else ","
    names = _cells(path, number, header, comma)
    for number, line in numbered:
        try:
            cells = _split(line, comma)
            wrong = f"{len(cells)} cells, the line of names has {len(names)}" if len(cells) != len(names) else None
            short = len(cells) < len(names)
        except csv.Error as error:
            wrong, short = f"not CSV: {error}", True
        if wrong is None:
            yield number, dict(zip(names, cells, strict=True))
        elif short and next(numbered, None) is None:
            yield number, None
        else:
            raise TraceError(f"{path}:{number}: {wrong}")


def csv_names(path: Path) -> list[str]:
    """The first line's cells. Raises TraceError if there is none."""
    for number, header in lines(path, ignore):
        return _cells(path, number, header, "\t" if "\t" in header and "," not in header else ",")
    raise TraceError(f"trace {path} holds no line")


def _cells(path: Path, number: int, line: str, comma: str) -> list[str]:
    try:
        return _split(line, comma)
    except csv.Error as error:
        raise TraceError(f"{path}:{number}: not CSV: {error}") from None


def _split(line: str, comma: str) -> list[str]:
    """A line's cells. A quoted cell ends on its line, so a stray quote cannot swallow the rest of the file."""
    if '"' not in line:
        return [cell.strip() for cell in line.split(comma)]
    return [cell.strip() for cell in next(csv.reader([line], delimiter=comma, strict=True, skipinitialspace=True))]


def jsonl_records(path: Path, note: Note) -> Records:
    """A JSON object a line. Raises TraceError: a line that is none, unless it is the last and cut short."""
    numbered = lines(path, note)
    for number, line in ((number, line.strip()) for number, line in numbered):
        try:
            record = _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            if line[0] == "{" and is_cut(line, error) and next(numbered, None) is None:
                yield number, None
                return
            raise TraceError(f"{path}:{number}: not JSON: {_complaint(error)}") from None
        if not isinstance(record, dict):
            raise TraceError(f"{path}:{number}: {shown(record)} is no JSON object")
        yield number, record


def json_records(path: Path, note: Note) -> Records:
    """The objects of a JSON array, or objects one after another, numbered from 1; never more than one in memory."""
    with open_regular(path) as file:
        encoding = _encoding(file, note)
        stream = _Values(path, file, codecs.getincrementaldecoder(encoding)())
        try:
            yield from stream.records(note)
        except UnicodeDecodeError:
            raise TraceError(f"{path}: record {stream.number}: not {encoding.upper()} text") from None


class _Values:
    """JSON values off a stream, decoded from a buffer that is filled until the next one is whole."""

    def __init__(self, path: Path, file: BinaryIO, decoder: codecs.IncrementalDecoder) -> None:
        self.number, self._path, self._file, self._decoder = 1, path, file, decoder
        self._buffer, self._at, self._ended = "", 0, False

    def records(self, note: Note) -> Records:
        array = self._peek() == "["
        if array:
            self._at += 1
        while True:
            mark = self._peek()
            if array and self.number > 1 and mark == ",":
                self._at += 1
                mark = self._peek()
            elif array and self.number > 1 and mark not in ("]", ""):
                raise self._refused(f"{shown(mark)} where a comma or ] should be")
            if mark == "" and array:
                note(UNCLOSED)
            if mark == "" or (array and mark == "]"):
                break
            record = self._value()
            yield self.number, record
            self.number += 1
        self._at += bool(mark)
        if (extra := self._peek()) != "":
            raise self._refused(f"{shown(extra)} after the end of the array")

    def _value(self) -> Record | None:
        """The next object; None if the file ends within it."""
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._buffer, self._at)
                break
            except (ValueError, RecursionError) as error:
                if not is_cut(self._buffer, error):
                    raise self._refused(f"not JSON: {_complaint(error)}") from None
            if not self._fill():
                self._at = len(self._buffer)
                return None
        if not isinstance(value, dict):
            raise self._refused(f"{shown(value)} is no JSON object")
        return value

    def _peek(self) -> str:
        """The next character that is no space, without taking it; nothing at the end of the file."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _fill(self) -> bool:
        self._buffer, self._at = self._buffer[self._at :], 0
        if len(self._buffer) > MAX_CHARS:
            raise self._refused(f"longer than {MAX_CHARS} characters")
        more = self._file.read(max(_CHUNK, len(self._buffer)))  # doubling, so that a long value is not parsed n times
        self._buffer += self._decoder.decode(more)  # where the file ends within a character, without that
        return more != b""

    def _refused(self, reason: str) -> TraceError:
        return TraceError(f"{self._path}: record {self.number}: {reason}")


def is_cut(text: str, error: Exception) -> bool:
    """Whether JSON text is wrong only in that it ends too early: more of it could mend it."""
    if not isinstance(error, json.JSONDecodeError) or error.msg == "Extra data":
        return False
    if error.msg.startswith("Unterminated string") or error.pos >= len(text):
        return True
    return error.pos > len(text) - len("-Infinity") and not text.endswith(("}", "]"))


def _complaint(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.colno if error.lineno == 1 else error.pos + 1}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"


def parquet_names(path: Path) -> list[str]:
    """The columns of a Parquet file."""
    with _arrow_errors(path), pq.ParquetFile(path) as file:
        return list(file.schema_arrow.names)


def parquet_records(path: Path, columns: list[str]) -> Records:
    """The rows of these columns, numbered from 1; times as (nanoseconds since 1970 UTC, whether they have a zone)."""
    number = 0
    with _arrow_errors(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH, columns=columns):
            cells = [_column(batch.column(name)) for name in columns]
            for row in zip(*cells, strict=True):
                number += 1
                yield number, dict(zip(columns, row, strict=True))


def _column(array: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(array.type):
        zoned = array.type.tz is not None
        return [None if ns is None else (ns, zoned) for ns in _ns(array).to_pylist()]
    if pa.types.is_nested(array.type) or not (pa.types.is_date(array.type) or pa.types.is_time(array.type)):
        cells: list[Any] = array.to_pylist()
        return cells
    raise RefusedCell(f"a column of type {array.type} is neither a number nor a date with a time")


def _ns(array: pa.Array) -> pa.Array:
    return array.cast(pa.timestamp("ns", array.type.tz)).cast(pa.int64())


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """What Arrow says of a damaged file, as a TraceError."""
    try:
        yield
    except (pa.ArrowException, OSError, RefusedCell, UnicodeDecodeError, OverflowError) as error:
        text = "".join(c if c.isprintable() else " " for c in str(error))
        raise TraceError(f"trace {path}: not readable as Parquet: {text[:200]}") from None
