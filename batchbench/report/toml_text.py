"""A stored scenario as TOML to read: short values of an array side by side, nothing that a terminal would act on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tomli_w

_WIDTH = 110  # characters of a line with several values


def toml_text(document: Mapping[str, Any]) -> str:
    """The document as TOML, which has no null: what is null is left out. What cannot be printed is an escape."""
    mark, arrays = "array ", list[str]()
    while mark in json.dumps(document, ensure_ascii=False):
        mark += "_"

    def with_marks(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: with_marks(item) for key, item in value.items() if item is not None}
        if not isinstance(value, list) or not _is_plain(value):
            return [with_marks(item) for item in value] if isinstance(value, list) else value
        arrays.append(_array(value))
        return f"{mark}{len(arrays) - 1}."

    text = tomli_w.dumps(with_marks(document))
    for place, array in enumerate(arrays):
        text = text.replace(f'"{mark}{place}."', array)
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _is_plain(values: list[Any]) -> bool:
    """Whether it has no table in it, at any depth."""
    return all(_is_plain(one) if isinstance(one, list) else not isinstance(one, Mapping) for one in values)


def _array(values: list[Any], width: int = _WIDTH) -> str:
    cells = [_array(one, width - 4) if isinstance(one, list) else tomli_w.dumps({"x": one})[4:-1] for one in values]
    lines = [""]
    for cell in cells:
        if lines[-1] and ("\n" in cell or len(lines[-1]) + len(cell) > width):
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{cell},"
    if len(lines) == 1 and "\n" not in lines[0]:
        return f"[{lines[0].removesuffix(',')}]"
    inner = "\n".join(lines).replace("\n", "\n    ")  # a string has its line breaks escaped
    return f"[\n    {inner}\n]"


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
