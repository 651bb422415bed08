"""A path that a scenario names: kept as it is written, opened from the scenario's folder, and confined to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationInfo, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, core_schema

FOLDER = "folder"
"""Key of the validation context that says where a scenario lies; without it, paths are a caller's own."""


@dataclass(frozen=True, slots=True)
class FilePath(os.PathLike[str]):
    """As `written`, from `folder`. `open` and `Path` take it, `str` says where it leads, a record has what is written.

    In a file's tables, a path that is not absolute may not leave the folder, by `..` or by a link: so a scenario that
    somebody else wrote reads what came with it, or what it names in full. folder: None for a path of the caller's own.
    """

    written: str
    folder: Path | None = None

    def __fspath__(self) -> str:
        return str((self.folder or Path()) / self.written)

    __str__ = __fspath__

    def may_read(self, place: Path) -> bool:
        """Whether that place, the path's own or one in it, lies where it may lead. Raises OSError, RuntimeError."""
        if self.folder is None or os.path.isabs(self.written):
            return True
        return place.resolve().is_relative_to(self.folder.resolve())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(
            _checked,
            core_schema.str_schema(strict=True, min_length=1, max_length=1000),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda path: path.written),
        )


def _checked(value: Any, as_text: ValidatorFunctionWrapHandler, info: ValidationInfo) -> FilePath:
    if isinstance(value, FilePath):
        return value
    written = as_text(value)
    if "\0" in written:
        raise ValueError("is no path: it holds a zero byte")
    if not info.context:
        return FilePath(written)
    path = FilePath(written, info.context[FOLDER])
    try:
        inside = path.may_read(Path(path))
    except (OSError, RuntimeError):
        raise ValueError("is no path: its links lead in a circle") from None
    if not inside:
        raise ValueError("leads out of the scenario's folder; write an absolute path if it should")
    return path
