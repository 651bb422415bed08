"""`batchbench compare`: results of one workload side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from batchbench.commands.present import Format
from batchbench.commands.shared import DebugOption, FormatOption, errors, show
from batchbench.comparing import ONCE, Change, Comparison, MovedEvictions, PointComparison, compare
from batchbench.errors import UsageError
from batchbench.gate_formats import in_markdown, number
from batchbench.results import Result, load_result
from batchbench.sheets import Sheet, one_line

_SHOWN_REQUESTS = 8
_MEANING = {"unknown": "unknown", "not shown": "no difference shown"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="compare")(compare_command)


def compare_command(
    result_folders: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Folders that sweeps wrote.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="What to compare, as in gate; the headlines if left out."),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also what is equal, or was measured once.")] = False,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it (.png, .svg or .pdf).")] = None,
    output_format: FormatOption = Format.table,
    debug: DebugOption = False,
) -> None:
    """Lay results of one workload side by side, each against the first, whatever engines made them.

    Per pool: values, their difference and what it means; every request's latency over its own; which evictions moved.
    """
    with errors(debug):
        if len(result_folders) < 2:
            raise UsageError("compare takes at least two results")
        if figure is not None and not figure.parent.is_dir():
            raise UsageError(f"figure {figure}: there is no folder {figure.parent}")
        results = [load_result(folder) for folder in result_folders]
        names = _names(result_folders)
        found = [compare(results[0], other, metric) for other in results[1:]]
        document = {
            "first": names[0],
            "others": [{"name": name, **_document(one)} for name, one in zip(names[1:], found, strict=True)],
        }
        sheets = [
            sheet
            for name, one in zip(names[1:], found, strict=True)
            for sheet in _sheets(names[0], name, one, show_all)
        ]
        lines = [line for name, one in zip(names[1:], found, strict=True) for line in _lines(names[0], name, one)]
        lines += _drawn(results, names, found, figure)
        if output_format is Format.markdown:
            print("\n".join(f"- {in_markdown(line)}" for line in lines) + "\n")
        show(document, sheets, lines, output_format)


def _document(found: Comparison) -> dict[str, Any]:
    document = asdict(found)
    for point, told in zip(found.points, document["points"], strict=True):
        for change, line in zip(point.changes, told["changes"], strict=True):
            line["difference"] = change.difference
    return document


def _drawn(
    results: Sequence[Result], names: Sequence[str], found: Sequence[Comparison], figure: Path | None
) -> list[str]:
    if figure is None:
        return []
    from batchbench.figures.compare import save_comparison  # matplotlib takes a second to import

    drawn = save_comparison(results, names, found, figure)
    return [one_line(f"figure: {figure}" + ("" if drawn else " is not drawn, since no point is in common"))]


def _names(folders: Sequence[Path]) -> list[str]:
    """As short as tells them apart: last parts of the paths."""
    paths = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            break
    again = [names[:place].count(name) for place, name in enumerate(names)]  # the same folder twice
    return [one_line(name) + (f" ({n + 1})" if n else "") for name, n in zip(names, again, strict=True)]


def _sheets(first: str, other: str, found: Comparison, show_all: bool) -> list[Sheet]:
    rows = [
        (point.name, *_row(change))
        for point in found.points
        for change in point.changes
        if _is_known(change) and (show_all or (change.verdict != "equal" and change.detail != ONCE))
    ]
    headings = ("point", "metric", first, other, "difference", "verdict")
    changes = Sheet(
        headings,
        tuple(tuple(map(one_line, row)) for row in rows),
        f"{other} against {first}",
        words=("point", "metric", "verdict"),
    )
    paired = tuple(
        (
            one_line(point.name),
            latency.unit,
            f"{latency.mean_ratio:.4f}x",
            *map(str, (latency.slower, latency.faster, latency.equal)),
            f"{latency.worst_ratio:.3f}x {one_line(latency.worst_request)}",
        )
        for point in found.points
        for latency in point.latencies
    )
    latencies = Sheet(
        ("point", "latency in", "mean ratio", "slower", "faster", "equal", "worst"),
        paired,
        one_line(f"every request's latency in {other} over its own in {first}{_caveats(found)}"),
        words=("point", "latency in"),
    )
    moved = tuple((one_line(point.name), *_moved(point.evictions)) for point in found.points if point.evictions)
    evictions = Sheet(
        ("point", "as before", "moved", f"only in {first}", f"only in {other}", "victims of one only"),
        moved,
        "evictions, aligned by request and their order in it",
        words=("point", "victims of one only"),
    )
    return [sheet for sheet in (changes, latencies, evictions) if sheet.rows]


def _caveats(found: Comparison) -> str:
    """Of latencies that were measured."""
    details = {one.unit: one.detail for point in found.points for one in point.latencies if one.detail}
    return "".join(f"; in {unit}: {detail}" for unit, detail in details.items())


def _is_known(change: Change) -> bool:
    return change.first is not None or change.other is not None


def _row(change: Change) -> tuple[str, ...]:
    first, other, difference = (number(n, missing="null") for n in (change.first, change.other, change.difference))
    verdict = _MEANING.get(change.verdict, change.verdict)
    return change.metric, first, other, difference, verdict + (f" ({change.detail})" if change.detail else "")


def _moved(evictions: MovedEvictions) -> tuple[str, ...]:
    requests = [f"-{name}" for name in evictions.requests_only_first]
    requests += [f"+{name}" for name in evictions.requests_only_other]
    more = f" ... {len(requests) - _SHOWN_REQUESTS} more" if len(requests) > _SHOWN_REQUESTS else ""
    counts = (evictions.kept, evictions.moved, evictions.only_first, evictions.only_other)
    return (*map(str, counts), one_line(" ".join(requests[:_SHOWN_REQUESTS]) + more))


def _lines(first: str, other: str, found: Comparison) -> list[str]:
    changes = [change for point in found.points for change in point.changes]
    equal = sum(change.verdict == "equal" for change in changes)
    if not found.points:
        lines = [f"{first} and {other} have no point in common"]
    else:
        lines = [_text_line(other, found.points), f"{other}: {equal} of {len(changes)} figures are equal"]
        if once := sum(change.detail == ONCE for change in changes):
            lines.append(f"{other}: {once} figures were measured once, so no difference can be shown of them")
    for whose, points in ((first, found.only_first), (other, found.only_other)):
        if points:
            lines.append(f"only in {whose}: {'; '.join(points)}")
    return [one_line(line) for line in lines]


def _text_line(other: str, points: Sequence[PointComparison]) -> str:
    texts = {point.text for point in points}
    if "differs" in texts:
        names = ", ".join(point.name for point in points if point.text == "differs")
        return f"{other}: the text DIFFERS at {names}"
    if texts == {"equal"}:
        return f"{other}: the text is the same at every point"
    return f"{other}: not all texts were computed, so they are not compared"
