"""`batchbench cost`: recompute against swap, with constants or as measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from batchbench.calibration import Calibration, load_calibration, require_savable
from batchbench.commands.cost_report import (
    calibration_document,
    comparison_lines,
    comparison_sheet,
    constants_document,
    evictions_document,
    evictions_lines,
    evictions_sheet,
    kv_bytes,
)
from batchbench.commands.present import Format
from batchbench.commands.shared import DebugOption, FormatOption, errors, show
from batchbench.cost import BANDWIDTH_BYTES_PER_S, MS_PER_TOKEN, VICTIM_TOKENS
from batchbench.errors import UsageError
from batchbench.eviction_cost import eviction_costs, point_costs, require_same_engine
from batchbench.results import Result, load_result
from batchbench.sheets import Sheet, one_line


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(cost)


def cost(
    tokens: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="Cached positions of the victim; 1000 if left out.")
    ] = None,
    ms_per_token: Annotated[
        float | None,
        typer.Option(help="Milliseconds to recompute a position; 0.1 if left out."),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Of the link to the swap pool, in bytes per second; 25e9 if left out."),
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="Bytes of K/V per position; 131072 if left out.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Or of a model: its layers,")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="K/V heads,")] = None,
    head_size: Annotated[int | None, typer.Option(help="elements of a head,")] = None,
    element_bytes: Annotated[int | None, typer.Option(help="and bytes of an element.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Measured costs that batchbench calibrate wrote, instead of constants.")
    ] = None,
    result: Annotated[
        Path | None,
        typer.Option(help="Folder that a sweep wrote: what its evictions cost, predicted against measured."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a figure (PNG).")] = None,
    output_format: FormatOption = Format.table,
    debug: DebugOption = False,
) -> None:
    """What an eviction costs: recompute against swap, with constants or as measured on this machine."""
    with errors(debug):
        shape = {"layers": layers, "kv_heads": kv_heads, "head_size": head_size, "element_bytes": element_bytes}
        constants = {"ms_per_token": ms_per_token, "bandwidth": bandwidth, "bytes_per_token": bytes_per_token, **shape}
        if result is not None and calibration is None:
            raise UsageError("--result needs --calibration: what its evictions are predicted by")
        if result is not None and tokens is not None:
            raise UsageError("--result and --tokens do not go together: its evictions have lengths of their own")
        if plot is not None:
            require_savable(plot, "figure")
        if calibration is None:
            if wrong := _not_positive(ms_per_token=ms_per_token, bandwidth=bandwidth):
                raise UsageError(wrong)
            toy = _toy(ms_per_token, bandwidth, kv_bytes(bytes_per_token, shape))
            document = constants_document(tokens or VICTIM_TOKENS, *toy)
            _plot_comparison(plot, None, toy)
            _print_cost(document, comparison_sheet(document), comparison_lines(document, None), plot, output_format)
            return
        if given := next((name for name, value in constants.items() if value is not None), None):
            raise UsageError(f"--{given.replace('_', '-')} and --calibration do not go together: the file says it")
        measured = load_calibration(calibration)
        if result is not None:
            _print_evictions(load_result(result), measured, calibration, plot, output_format)
            return
        document = calibration_document(measured, str(calibration), tokens or VICTIM_TOKENS)
        _plot_comparison(plot, measured, _toy(None, None, kv_bytes(None, {})))
        _print_cost(document, comparison_sheet(document), comparison_lines(document, measured), plot, output_format)


def _not_positive(**values: float | None) -> str | None:
    """What is wrong with an option that must be a number above 0, or None."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            return f"--{name.replace('_', '-')} is {value}, must be a finite number above 0"
        if value is not None and not 1e-9 <= value <= 1e15:
            return f"--{name.replace('_', '-')} is {value}, must be between 1e-9 and 1e15"
    return None


def _toy(ms_per_token: float | None, bandwidth: float | None, per_token_bytes: int) -> tuple[float, float, int]:
    """Constants, with the toy's where they are not given."""
    return ms_per_token or MS_PER_TOKEN, bandwidth or BANDWIDTH_BYTES_PER_S, per_token_bytes


def _plot_comparison(path: Path | None, measured: Calibration | None, toy: tuple[float, float, int]) -> None:
    if path is not None:
        from batchbench.figures.cost import save_comparison  # matplotlib takes a second to import

        save_comparison(path, measured, *toy)


def _print_evictions(
    result: Result, measured: Calibration, path: Path, plot: Path | None, output_format: Format
) -> None:
    require_same_engine(result, measured, str(path))
    costs = eviction_costs(result, measured)
    sums, name = point_costs(result, costs), str(result.run["scenario"]["name"])
    if plot is not None:
        from batchbench.figures.cost import save_evictions

        save_evictions(plot, name, costs, sums)
    document = evictions_document(name, str(path), measured, costs, sums)
    lines = evictions_lines(measured, costs, sums, result.run["engine"].get("threads"))
    _print_cost(document, evictions_sheet(sums), lines, plot, output_format)


def _print_cost(
    document: dict[str, Any], sheet: Sheet, lines: list[str], plot: Path | None, output_format: Format
) -> None:
    if plot is not None:
        document, lines = {**document, "figure": str(plot)}, [*lines, one_line(f"figure: {plot}")]
    show(document, [sheet], lines, output_format)
