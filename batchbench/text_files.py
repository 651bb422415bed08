"""Reads a scenario's files: whole, as UTF-8, and never more than anyone means."""

from __future__ import annotations

import os

from batchbench.errors import ScenarioError


def read_text(path: str | os.PathLike[str], most_bytes: int) -> str:
    """The text of a file, without its byte order mark, with \\n for every line end. Raises ScenarioError, one line."""
    try:
        with open(path, "rb") as file:
            data = file.read(most_bytes + 1)  # a device has no size to ask for
        if len(data) > most_bytes:
            raise ScenarioError(f"{path}: more than {most_bytes} bytes")
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: not UTF-8: {error}") from None
