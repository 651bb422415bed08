"""Writes a timeline as it is made: JSON, compressed if the name ends with .gz, whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO

from batchbench.errors import BatchbenchError
from batchbench.timeline import Timeline

_EVENTS = 1000  # whose text is held at once
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def save_timeline(drawn: Timeline, path: Path) -> int:
    """Write it, by way of another file. Returns how many events it has. Raises BatchbenchError if it cannot."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("xb") as file:
            count = write_timeline(drawn, file, compressed=path.suffix == ".gz")
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise BatchbenchError(f"timeline {path}: {error.strerror or error}") from None
        raise
    return count


def write_timeline(drawn: Timeline, file: IO[bytes], *, compressed: bool = False) -> int:
    """Write it to a file that is open. Returns how many events it has."""
    with ExitStack() as stack:
        out: IO[bytes] | gzip.GzipFile = file
        if compressed:  # without a name and a time, so that the same timeline is the same file
            out = stack.enter_context(gzip.GzipFile("", "wb", 6, file, mtime=0))
        count = 0
        out.write(f'{{"displayTimeUnit":"ms","otherData":{_json(drawn.metadata)},"traceEvents":['.encode())
        while some := list(islice(drawn.events, _EVENTS)):
            out.write(("," * bool(count) + "\n" + ",\n".join(map(_json, some))).encode())
            count += len(some)
        out.write(b"\n]}\n")
        return count


def _json(value: object) -> str:
    """In ASCII. A reader of this format takes DEL for the end of the file, and JSON does not want it escaped."""
    return _encode(value).replace("\x7f", "\\u007f")
