"""Reads a scenario's files: whole, as UTF-8, and never more than anyone means."""

from __future__ import annotations

import os

from batchbench.errors import ScenarioError
from batchbench.regular_files import open_regular


def read_text(path: str | os.PathLike[str], most_bytes: int) -> str:
    """The text of a file, without its byte order mark, with \\n for every line end. Raises ScenarioError, one line."""
    try:
        with open_regular(path) as file:
            data = file.read(most_bytes + 1)  # it may grow meanwhile, and some files say that they have no size
        if len(data) > most_bytes:
            raise ScenarioError(f"{path}: more than {most_bytes} bytes")
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: not UTF-8: {error}") from None
