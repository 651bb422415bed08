"""`batchbench plot`: the figures of a result folder, drawn again."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from batchbench.commands.shared import FOLDER, DebugOption, draw, errors
from batchbench.results import load_result, require_writable
from batchbench.sheets import one_line


class Picture(StrEnum):
    """What a figure may be written as."""

    png = "png"
    svg = "svg"
    pdf = "pdf"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plot)


def plot(
    result_folder: Annotated[Path, typer.Argument(metavar="RESULT", help="Folder that a sweep wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figures; RESULT/plots if left out.", **FOLDER)
    ] = None,
    point: Annotated[
        int | None,
        typer.Option(
            help="Point of the slot timeline, by its place in the sweep from 0; the one that recomputes most."
        ),
    ] = None,
    picture: Annotated[Picture, typer.Option("--format", help="Files to write.")] = Picture.png,
    debug: DebugOption = False,
) -> None:
    """Draw a result folder's figures again."""
    with errors(debug):
        result, folder = load_result(result_folder), out or result_folder / "plots"
        require_writable(folder)
        for path in draw(result, folder, point, picture):
            print(one_line(str(path)))
