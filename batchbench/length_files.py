"""Files of recorded lengths: one or two columns of whole numbers."""

from __future__ import annotations

import os
from array import array

from batchbench.errors import ScenarioError
from batchbench.limits import MAX_TOKENS
from batchbench.text_files import read_text

_MAX_BYTES = 2**26  # of a file: millions of requests


def read_columns(
    path: str | os.PathLike[str], columns: int, least: int = 1, greatest: int = MAX_TOKENS
) -> tuple[array[int], ...]:
    """The columns of a file, as many as its lines have, and at least `columns`.

    A line has one number, or two with a comma or space between: tokens of a prompt, of its output. Blank lines and
    those that begin with # are passed over, and so is a first line of names. A line is left out if the last of the
    asked columns is not in least..greatest. Raises ScenarioError, one line.
    """
    found: tuple[array[int], ...] = ()
    lines = [
        (n, line)
        for n, line in enumerate(read_text(path, _MAX_BYTES).split("\n"), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    for place, (number, line) in enumerate(lines):
        parts = [part.strip() for part in line.split(",")] if "," in line else line.split()
        if place == 0 and not any(part.isdecimal() for part in parts):
            continue  # names of the columns
        found = found or tuple(array("q") for _ in parts)
        if len(parts) != len(found) or not columns <= len(parts) <= 2:
            raise ScenarioError(f"{path}: line {number}: {len(parts)} columns, not {min(2, max(columns, len(found)))}")
        values = [_tokens(path, number, part) for part in parts]
        if least <= values[columns - 1] <= greatest:
            for column, value in zip(found, values, strict=True):
                column.append(value)
    if not found or not found[0]:
        raise ScenarioError(f"{path}: there is no length in {least}..{greatest} in it")
    return found


def _tokens(path: str | os.PathLike[str], line: int, text: str) -> int:
    if not text.isdecimal() or len(text) > 20 or not 1 <= int(text) <= MAX_TOKENS:
        raise ScenarioError(f"{path}: line {line}: {text[:40]!r} is no whole number from 1 to {MAX_TOKENS}")
    return int(text)
