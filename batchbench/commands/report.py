"""`batchbench report`: results as one file to read, HTML, PDF or Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchbench.commands.shared import DebugOption, errors
from batchbench.errors import BatchbenchError, UsageError
from batchbench.results import load_result, require_writable
from batchbench.sheets import one_line

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
        results = [load_result(folder) for folder in result_folders]
        from batchbench.report.content import report as content_of  # matplotlib takes a second to import

        content, pictures = content_of(results), dict[str, bytes]()
        if ending == ".html":
            from batchbench.report.html import html

            data = html(content).encode()
        elif ending == ".md":
            from batchbench.report.markdown import markdown

            text, pictures = markdown(content, f"{out.stem}-figures")
            data = text.encode()
        else:
            from batchbench.report.pdf import pdf

            data = pdf(content)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            for name, picture in pictures.items():
                folder = out.with_name(f"{out.stem}-figures")
                folder.mkdir(exist_ok=True)
                (folder / name).write_bytes(picture)
            out.write_bytes(data)
        except OSError as error:
            raise BatchbenchError(f"report {out}: {error.strerror or error}") from None
        print(one_line(f"{out}: {len(data):,} bytes"))
