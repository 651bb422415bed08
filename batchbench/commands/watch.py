"""`batchbench watch`: a sweep that runs in another terminal."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from batchbench.commands.shared import DebugOption, errors
from batchbench.commands.watch_view import HISTORY, fill_of, watch_display, watch_document, watch_line
from batchbench.errors import BatchbenchError, UsageError
from batchbench.scenario import load_scenario
from batchbench.sheets import one_line
from batchbench.status import Sighting, sight

_POLL_S = 0.25
_SILENT_S = 3.0  # how long parts may lie there without a status: a sweep begins, or ends
Show = Callable[[Sighting], None]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(watch)


def watch(
    place: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Output folder of the sweep, or its scenario file, for results/NAME."),
    ],
    once: Annotated[bool, typer.Option("--once", help="Say how it stands, and end.")] = False,
    wait: Annotated[
        float, typer.Option(min=0, max=1e6, help="Seconds to wait for one to begin, if nothing is there yet.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON document per line.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show a running sweep: pool fill, running and waiting, evictions so far.

    Ends with the sweep. Exit code 0 if it left a result, 1 if it did not, 2 if there is no sweep.
    """
    with errors(debug):
        folder = Path("results") / load_scenario(place).name if place.suffix == ".toml" else place
        first = _first(folder, 0 if once else wait)
        last, watched = first, not once and first.state == "running"
        if watched:
            with _display(folder, as_json) as show:
                last = _follow(folder, first, show)
        _say(folder, last, as_json)
        ended = _end(folder, last, first if watched else None)
        if ended and not as_json:
            print(one_line(ended))


def _first(folder: Path, wait_s: float) -> Sighting:
    """How it stands at first; a sweep loads its model before it writes. Raises UsageError if nothing is there."""
    for n in range(round(wait_s / _POLL_S)):
        if sight(folder).state != "none":
            break
        if n == 0:
            print(one_line(f"{folder}: waiting for a sweep to begin"), file=sys.stderr)
        time.sleep(_POLL_S)
    for _ in range(round(_SILENT_S / _POLL_S)):
        seen = sight(folder)
        if seen.state == "none":
            raise UsageError(f"{folder}: no sweep runs here, and there is no result")
        if seen.state != "silent":
            return seen
        time.sleep(_POLL_S)
    raise UsageError(f"{folder}: a sweep left points here that say nothing of how it stands")


def _follow(folder: Path, seen: Sighting, show: Show) -> Sighting:
    """Show it until it has ended; returns what is there then."""
    silent_s = 0.0
    while seen.state == "running" or (seen.state == "silent" and silent_s < _SILENT_S):
        if seen.state == "running":
            silent_s = 0.0
            show(seen)
        time.sleep(_POLL_S)
        seen = sight(folder)
        silent_s += _POLL_S
    return seen


@contextmanager
def _display(folder: Path, as_json: bool) -> Iterator[Show]:
    """A live display on a terminal; elsewhere a line whenever there is news."""
    console = Console()
    if as_json or not console.is_terminal:
        told = [""]

        def line(seen: Sighting) -> None:
            assert seen.status is not None
            if (news := seen.status.model_dump_json()) != told[0]:
                told[0] = news
                print(json.dumps(watch_document(folder, seen)) if as_json else watch_line(seen), flush=True)

        yield line
        return
    fills: deque[float] = deque(maxlen=HISTORY)
    drawn = [-1.0]
    plain = not console.encoding.lower().startswith("utf")
    with Live(console=console, auto_refresh=False) as live:

        def draw(seen: Sighting) -> None:
            assert seen.status is not None
            if seen.status.elapsed_s != drawn[0] and (fill := fill_of(seen.status)) is not None:
                drawn[0] = seen.status.elapsed_s
                fills.append(fill)
            live.update(watch_display(folder, seen, fills, plain=plain), refresh=True)

        yield draw


def _say(folder: Path, seen: Sighting, as_json: bool) -> None:
    """One snapshot."""
    if as_json:
        print(json.dumps(watch_document(folder, seen)))
    elif seen.status is not None:
        print(watch_line(seen))


def _end(folder: Path, seen: Sighting, first: Sighting | None) -> str:
    """What it came to. first: how it stood, if it was watched. Raises BatchbenchError if it left no result."""
    if seen.state == "died":
        assert seen.status is not None
        raise BatchbenchError(
            f"{folder}: the sweep of process {seen.status.pid} has died; the points it finished are under "
            f"batchbench-parts/"
        )
    if first is None:
        return (
            "" if seen.state == "running" else f"{folder}: no sweep runs here; the result of the last one is complete"
        )
    if seen.state == "result" and seen.result_ns != first.result_ns:
        return f"{folder}: the sweep has ended; its result is complete"
    raise BatchbenchError(f"{folder}: the sweep has ended without a result")
