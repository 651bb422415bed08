"""`batchbench report`: results as one file to read, HTML, PDF or Markdown."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from batchbench.commands.shared import DebugOption, errors
from batchbench.errors import BatchbenchError, UsageError
from batchbench.results import Result, load_result, require_writable
from batchbench.sheets import one_line
from batchbench.units import show_bytes, show_count

_ENDINGS = (".html", ".pdf", ".md")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(
    result_folders: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Folders that sweeps wrote.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: its ending says the format, .html, .pdf or .md.")
    ] = Path("report.html"),
    debug: DebugOption = False,
) -> None:
    """Write a report on results that needs nothing else: the verdict on the texts first, then tables and figures."""
    with errors(debug):
        ending = out.suffix.lower()
        if ending not in _ENDINGS:
            raise UsageError(f"--out {out}: ends in {ending or 'nothing'}, must end in {', '.join(_ENDINGS)}")
        if out.is_dir():
            raise UsageError(f"--out {out}: is a folder")
        require_writable(out.parent)
        data, pictures = _written([load_result(folder) for folder in result_folders], out, ending)
        figures = out.with_name(f"{out.stem}-figures")
        folder = figures if pictures else out.parent
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _replace({**{figures / name: picture for name, picture in pictures.items()}, out: data})
        except OSError as error:
            for path in made:
                with suppress(OSError):
                    path.rmdir()
            raise BatchbenchError(f"report {out}: {error.strerror or error}") from None
        beside = f", and {show_count(len(pictures), 'figure')} in {figures}" if pictures else ""
        print(one_line(f"{out}: {show_bytes(len(data))}{beside}"))


def _replace(files: Mapping[Path, bytes]) -> None:
    """Write all beside their places, then put them there: an earlier report stays whole if one cannot be written."""
    begun = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in files}
    try:
        for path, data in files.items():
            begun[path].write_bytes(data)
        for path, unfinished in begun.items():
            os.replace(unfinished, path)
    finally:
        for unfinished in begun.values():
            unfinished.unlink(missing_ok=True)


def _written(results: Sequence[Result], out: Path, ending: str) -> tuple[bytes, dict[str, bytes]]:
    """The report's file, and the pictures that go beside it by name."""
    from batchbench.report.content import report as content_of  # matplotlib takes a second to import

    content = content_of(results)
    if ending == ".html":
        from batchbench.report.html import html

        return html(content).encode(), {}
    if ending == ".pdf":
        from batchbench.report.pdf import pdf

        return pdf(content), {}
    from batchbench.report.markdown import markdown

    text, pictures = markdown(content, f"{out.stem}-figures")
    return text.encode(), pictures
