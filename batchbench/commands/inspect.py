"""`batchbench inspect`: what a trace holds, before it is replayed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from batchbench.calibration import require_savable
from batchbench.commands.present import Format, to_json
from batchbench.commands.shared import DebugOption, FormatOption, errors
from batchbench.errors import UsageError
from batchbench.sheets import Sheet, one_line
from batchbench.trace_stats import PEAK_WINDOW_S, Demand, TraceFacts, collect, describe, kv_demand
from batchbench.traces import FORMATS, Trace, open_trace

SECONDS_PER_TOKEN = 0.02  # 50 tokens a second, a speed at which people read along


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(name="inspect")
    def inspect_command(
        trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file (docs/traces.md).")],
        trace_format: Annotated[
            str | None,
            typer.Option(help=f"Its format, if its content does not tell: {', '.join(FORMATS)}.", show_default=False),
        ] = None,
        prefix_tokens: Annotated[
            int | None, typer.Option(help="Positions that a hash id stands for; the format's own if left out.")
        ] = None,
        window: Annotated[
            str | None,
            typer.Option(metavar="A:B", help="Only what arrives from A to before B seconds after the first arrival."),
        ] = None,
        seconds_per_token: Annotated[
            float, typer.Option(help="Assumed time that a token takes, for the demand.")
        ] = SECONDS_PER_TOKEN,
        block_size: Annotated[int, typer.Option(min=1, max=65_536, help="Positions in a block of the KV pool.")] = 16,
        plot: Annotated[Path | None, typer.Option("-o", "--plot", help="File for a figure (PNG).")] = None,
        output_format: FormatOption = Format.table,
        debug: DebugOption = False,
    ) -> None:
        """Say what a trace holds: rows used and dropped, lengths, arrivals, shared prefixes, KV demand over time."""
        with errors(debug):
            if not 1e-6 <= seconds_per_token <= 100:
                raise UsageError(f"--seconds-per-token is {seconds_per_token}, must be between 1e-6 and 100")
            if plot is not None:
                require_savable(plot, "figure")
            trace = open_trace(trace_file, trace_format, prefix_tokens=prefix_tokens)
            facts = collect(trace, None if window is None else _window(window))
            demand = _demand(facts, seconds_per_token)
            if plot is not None and facts.rows:
                from batchbench.figures.trace import save_trace  # matplotlib takes a second to import

                save_trace(plot, one_line(trace_file.name), facts, demand, block_size)
            _print(trace, facts, demand, block_size, plot if facts.rows else None, output_format)


def _window(text: str) -> tuple[float, float]:
    """`600:1200` -> (600.0, 1200.0); a side left out is open."""
    start, colon, end = text.partition(":")
    try:
        window_s = (float(start or 0), float(end or math.inf))
    except ValueError:
        window_s = (math.nan, math.nan)
    if not colon or not window_s[0] < window_s[1] or math.isinf(window_s[0]):
        raise UsageError(f"--window is {text!r}, must be A:B in seconds with A below B, such as 600:1200")
    return window_s


def _demand(facts: TraceFacts, seconds_per_token: float) -> Demand | None:
    if facts.arrival_ns is None or not facts.rows:
        return None
    return kv_demand(facts.arrival_ns, facts.prompt, facts.output, seconds_per_token)


def _print(
    trace: Trace, facts: TraceFacts, demand: Demand | None, block_size: int, plot: Path | None, output_format: Format
) -> None:
    found = describe(facts, demand, block_size) if facts.rows else None
    books = trace.tally
    if output_format is Format.json:
        about = {"trace": str(trace.path), "format": trace.format, "prefix_tokens": trace.prefix_tokens}
        rows = {"rows_read": books.rows_read, "rows_used": books.rows_used}
        figure = {"figure": None if plot is None else str(plot)}
        print(to_json({**about, **rows, "dropped": books.dropped, "noted": books.noted, **(found or {}), **figure}))
        return
    head = [f"{trace.path}: {trace.format}", *books.lines()]
    tail = ["no row can be used, so there is nothing to say of them"] if found is None else _lines(found)
    if plot is not None:
        tail.append(f"figure: {plot}")
    sheets = [] if found is None else _sheets(found)
    if output_format is Format.markdown:
        parts = ["\n".join(f"- {line}" for line in map(one_line, head + tail)), *(sheet.markdown() for sheet in sheets)]
        print("\n\n".join(parts))
        return
    print("\n".join(map(one_line, head)))
    for sheet in sheets:
        print()
        sheet.print()
    print("\n" + "\n".join(map(one_line, tail)))


def _sheets(found: dict[str, Any]) -> list[Sheet]:
    """Lengths, and the demand over time where there are times."""
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    lengths = [(what, found[what]) for what in ("prompt", "output") if found[what] is not None]
    some = len({one["rows"] for _, one in lengths}) > 1  # not every row says the length of its output
    sheets = [
        Sheet(
            ("length", *names),
            tuple(
                (
                    f"{what} [{one['unit']}]" + (f" of {one['rows']} rows" if some else ""),
                    *(f"{one[name]:.0f}" for name in names),
                )
                for what, one in lengths
            ),
        )
    ]
    if demand := found["demand"]:
        rows = tuple(
            (
                f"{one['from_s']:.1f}",
                str(one["arrivals"]),
                f"{one['mean_positions']:.0f}",
                f"{one['max_positions']:.0f}",
            )
            for one in demand["over_time"]
        )
        sheets.append(Sheet(("from [s]", "arrivals", "demand, mean [positions]", "demand, max [positions]"), rows))
    return sheets


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    if arrivals := found["arrivals"]:
        mean = "all at once" if arrivals["mean_per_s"] is None else f"{arrivals['mean_per_s']:.3g} per second"
        lines.append(
            f"arrivals: {mean}, over {arrivals['span_s']:.6g} s; at most {arrivals['peak_in_10_s']} "
            f"in one of the stretches of {PEAK_WINDOW_S} s"
        )
    else:
        lines.append("arrivals: the format has no times")
    if found["prompt"]["unit"] == "characters":
        lines.append("lengths: the trace holds texts; how many tokens they are, only a tokenizer tells")
    if found["shared_prefix_share"] is not None:
        lines.append(
            f"shared prefixes: {found['shared_prefix_share']:.1%} of prompt positions, by hash ids seen before"
        )
    if demand := found["demand"]:
        least, most = demand["peak_blocks_at_least"], demand["peak_blocks_at_most"]
        blocks = f"{least} to {most}" if least < most else str(least)
        lines.append(
            f"KV demand, as if nobody waited and a token took {demand['seconds_per_token']:g} s (an assumption: "
            f"--seconds-per-token), prefixes not shared: "
            f"peak {demand['peak_positions']} positions, {blocks} blocks of {demand['block_size']}; "
            f"mean {demand['mean_positions']:.0f} positions; at most {demand['peak_requests']} requests at once"
        )
    return lines
