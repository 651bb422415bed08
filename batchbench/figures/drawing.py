"""Every figure of a result folder: which there are, drawn from its tables alone, written as pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from batchbench.errors import BatchbenchError, UsageError
from batchbench.figures.pool_use import pool_use, says_pool_use
from batchbench.figures.rows import rows_against_positions
from batchbench.figures.service import says_victims, service, victims
from batchbench.figures.slots import slot_timeline
from batchbench.figures.staircase import staircase
from batchbench.figures.style import LINES, STYLE
from batchbench.figures.sweep import compare_choices, pool_sweep, pool_sweep_by_choice
from batchbench.results import Result
from batchbench.stays import stays_of

# The same figure is the same file: no dates, no names of the program that wrote it.
FORMATS: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def draw_all(result: Result, folder: Path, point: int | None = None, ending: str = "png") -> list[Path]:
    """Draw every figure into `folder`, as files of an ending of FORMATS.

    point: that of the slot timeline and of the one iteration; the one that recomputes most if None. Where more than the
    pool varies, `choices` compares the points. Left out: what the engine does not report (slots, blocks, whose tokens
    come), the victims where there are none or no reference pool, and the curves over the pool's size where there is
    one size or too many choices.
    """
    point = closer_look(result, point)
    with mpl.rc_context(STYLE):
        drawn = {folder / f"{name}.{ending}": draw() for name, draw in figures(result, point).items()}  # then written
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, figure in drawn.items():
                figure.savefig(path, metadata=FORMATS[ending])
        except OSError as error:
            raise BatchbenchError(f"figure folder {folder}: {error.strerror or error}") from None
    return list(drawn)


def figures(result: Result, point: int) -> dict[str, Callable[[], Figure]]:
    """Name -> how to draw it, of every figure that the result has; to be called in the context of STYLE."""
    pools = result.tables["pools"]
    choices, sizes = pools["choices"].nunique(), pools["pool_blocks"].nunique()
    by_choice = choices > 1 and sizes > 1 and choices <= len(LINES)
    known: dict[str, tuple[bool, Callable[[], Figure]]] = {
        "pool_sweep": (
            choices == 1 or by_choice,
            lambda: pool_sweep_by_choice(result) if by_choice else pool_sweep(result),
        ),
        "choices": (choices > 1, lambda: compare_choices(result)),
        "staircase": (True, lambda: staircase(result)),
        "slot_timeline": (stays_of(result, point) is not None, lambda: slot_timeline(result, point)),
        "pool_use": (says_pool_use(result), lambda: pool_use(result)),
        "service": (True, lambda: service(result)),
        "victims": (says_victims(result), lambda: victims(result)),
        "rows_against_positions": (True, lambda: rows_against_positions(result, point)),
    }
    return {name: draw for name, (has, draw) in known.items() if has}


def closer_look(result: Result, asked: int | None) -> int:
    """The point asked for, else the one with the largest recompute fraction."""
    shares = result.tables["pools"]["recompute_fraction"].to_numpy(dtype=float)
    if asked is None:
        return int(np.nan_to_num(shares).argmax())
    if not 0 <= asked < len(shares):
        raise UsageError(f"the result has no point {asked}; it has 0 to {len(shares) - 1}")
    return asked
