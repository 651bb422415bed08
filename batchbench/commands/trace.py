"""`batchbench trace`: a point of a result as a timeline for Perfetto and chrome://tracing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from batchbench.calibration import require_savable
from batchbench.commands.shared import DebugOption, errors
from batchbench.errors import UsageError
from batchbench.instants import TimeUnit
from batchbench.results import Result, load_result
from batchbench.sheets import escaped, one_line
from batchbench.timeline import timeline
from batchbench.timeline_file import save_timeline, write_timeline
from batchbench.units import show_blocks, show_bytes, show_count

_LISTED = 12  # candidates that an error names


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(trace)


def trace(
    result_folder: Annotated[Path, typer.Argument(metavar="RESULT", help="Folder that a sweep wrote.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="File to write, .json or .json.gz (compressed); - for standard output.")
    ],
    pool: Annotated[int | None, typer.Option(min=1, help="The point of that many blocks.")] = None,
    choices: Annotated[
        str | None, typer.Option(metavar="LABEL", help="The point of these choices, as the tables name them.")
    ] = None,
    point: Annotated[
        int | None,
        typer.Option(
            min=0, help="The point, by its place in the sweep from 0; if none is named, the one that recomputes most."
        ),
    ] = None,
    time: Annotated[
        TimeUnit | None,
        typer.Option(help="Time axis; s where the point has seconds, if left out.", show_default=False),
    ] = None,
    first: Annotated[int, typer.Option("--from", min=0, help="First iteration to draw.")] = 0,
    stop: Annotated[int | None, typer.Option("--to", min=1, help="Iteration to stop before.")] = None,
    debug: DebugOption = False,
) -> None:
    """Write a point of a result as a timeline: slots, requests, pool and queue, evictions and resumes.

    Open it in ui.perfetto.dev or chrome://tracing.
    """  # fmt: skip
    with errors(debug):
        if str(out) != "-":
            require_savable(out, "timeline")
            if not out.name.endswith((".json", ".json.gz")) or out.resolve() == (result_folder / "run.json").resolve():
                raise UsageError(f"timeline {out}: must be a .json or .json.gz of its own")
        result = load_result(result_folder)
        chosen = _point(result, point, pool, choices)
        drawn = timeline(result, chosen, time, (first, stop))
        if str(out) == "-":
            write_timeline(drawn, sys.stdout.buffer)
            return
        count = save_timeline(drawn, out)
        size = show_bytes(out.stat().st_size)
        print(one_line(f"timeline: {out} ({show_count(count, 'event')}, {size})"))
        print(one_line(f"{_name(result, chosen)}; {drawn.metadata['time']}: {drawn.metadata['unit']}"))
        if missing := drawn.metadata["not_reported"]:
            print(f"not reported, so left out: {', '.join(missing)}")


def _point(result: Result, point: int | None, pool: int | None, choices: str | None) -> int:
    """The place of the one point that is meant. Raises UsageError if there is none or more than one."""
    pools = result.rows("pools")
    if point is not None:
        if pool is not None or choices is not None:
            raise UsageError("--point names a point by itself: leave out --pool and --choices")
        if point >= len(pools):
            raise UsageError(f"the result has no point {point}; it has 0 to {len(pools) - 1}")
        return point
    if pool is None and choices is None:
        return max(range(len(pools)), key=lambda place: (pools[place]["recompute_fraction"] or 0.0, -place))
    found = [place for place, row in enumerate(pools) if pool in (None, row["pool_blocks"])]
    found = [place for place in found if choices in (None, pools[place]["choices"])]
    if len(found) == 1:
        return found[0]
    listed = found or range(len(pools))
    names = "; ".join(f"{place}: {_name(result, place)}" for place in listed[:_LISTED])
    more = f"; and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    what = f"{len(found)} points fit; use --point, or --pool and --choices" if found else "no point fits"
    raise UsageError(f"{what}: {names}{more}")


def _name(result: Result, place: int) -> str:
    about = result.rows("pools")[place]
    label = f", {escaped(about['choices'])}" if about["choices"] else ""
    return f"pool of {show_blocks(about['pool_blocks'])}{label}"
