"""What the commands share: options, one line and one exit code per error, printing, and drawing."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from batchbench.commands.present import Format, to_json
from batchbench.errors import BatchbenchError
from batchbench.results import Result
from batchbench.sheets import Sheet, one_line


def _folder(text: str) -> Path:
    """An empty name would be the working folder, which a script with an unset variable does not mean."""
    if not text:
        raise typer.BadParameter("must name a folder; the working folder is '.'")
    return Path(text)


FOLDER: Any = {"parser": _folder, "metavar": "<path>"}  # of an option that names one
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the table.")]
ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="Scenario file (TOML).")]
TrustOption = Annotated[
    list[str] | None,
    typer.Option("--trust", metavar="MODULE", help="Module that the scenario's victim rule may be imported from."),
]


@contextmanager
def errors(debug: bool) -> Iterator[None]:
    """One line on stderr and the error's exit code, instead of a traceback; warnings as one line each too."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(one_line(f"warning: {message}"), file=sys.stderr)
            yield
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except (KeyboardInterrupt, Exception) as error:
        if debug or isinstance(error, typer.Exit):
            raise
        if isinstance(error, BrokenPipeError):  # the reader has seen enough; nothing may be flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        if isinstance(error, BatchbenchError):
            line = f"error: {error}"
        elif isinstance(error, KeyboardInterrupt):
            line = "interrupted"
        elif isinstance(error, OSError):
            line = f"error: {error.filename or 'output'}: {error.strerror or error}"
        else:
            line = f"internal error: {type(error).__name__}: {error} (--debug shows where)"
        print(one_line(line), file=sys.stderr)
        raise typer.Exit(exit_code_of(error)) from None


def exit_code_of(error: BaseException) -> int:
    """What a command ends with for it; 1 for what nobody expected."""
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


def show(document: dict[str, Any], sheets: Sequence[Sheet], lines: list[str], output_format: Format) -> None:
    """A command's result: all of it as JSON, its tables as Markdown, or tables and lines for a terminal."""
    if output_format is Format.json:
        print(to_json(document))
    elif output_format is Format.markdown:
        print("\n\n".join(sheet.markdown() for sheet in sheets))
    else:
        for place, sheet in enumerate(sheets):
            print("\n" if place else "", end="")
            sheet.print()
        print("\n" + "\n".join(lines))


def draw(result: Result, folder: Path, point: int | None = None, ending: str = "png") -> list[Path]:
    """A result's figures as png, svg or pdf; point: of the slot timeline, the one that recomputes most if None."""
    from batchbench.figures.drawing import draw_all  # matplotlib takes a second to import

    return draw_all(result, folder, point, ending)
