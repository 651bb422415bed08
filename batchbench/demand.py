"""Pool sizes as people state them, in blocks, bytes or shares of the demand, turned into blocks."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from batchbench.asking import describe, offer
from batchbench.driver import Pacing, RunObserver, run_workload
from batchbench.errors import RequestRefused, UsageError
from batchbench.protocol import (
    Choices,
    EngineDescription,
    EngineFactory,
    IterationBatch,
    IterationOutcome,
    Point,
    RequestSpec,
)
from batchbench.scenario import MAX_BLOCKS, Sweep

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def resolve_points(
    sweep: Sweep,
    requests: Sequence[RequestSpec],
    make_engine: EngineFactory,
    make_schedule: EngineFactory,
    pacing: Pacing | None = None,
) -> list[Point]:
    """Every point of a sweep with its pool in blocks.

    A share or a size that comes to a pool that is there already is run once. Bytes are rounded down to whole blocks,
    of the K/V that `make_engine`'s model keeps; shares of the demand are rounded up. make_schedule: builds the same
    schedule without a model, which finds the demand. Raises UsageError.
    """

    @cache
    def demand(choices: Choices) -> int:
        if pacing is not None and pacing.clock == "wall":
            raise UsageError(
                "pools relative to the demand: a schedule finds it, and takes no real time; "
                "with clock = 'wall' give blocks or bytes"
            )
        return roomy_pool(requests, make_schedule, choices, pacing)

    @cache
    def block_bytes(choices: Choices) -> int:
        return _block_bytes(make_engine, choices)

    points = []
    for pool, choices in sweep.declared:
        if isinstance(pool, int):
            blocks = pool
        elif pool.endswith("x"):
            blocks = math.ceil(Fraction(pool[:-1]) * demand(choices))
        else:
            blocks = int(_bytes(pool) // block_bytes(choices))
        if blocks < 1:
            why = "" if str(pool).endswith("x") else f": one takes {block_bytes(choices)} bytes"
            raise UsageError(f"a pool of {pool} has no block{why}")
        if blocks > MAX_BLOCKS:
            raise UsageError(f"a pool of {pool} is {blocks} blocks, more than {MAX_BLOCKS}")
        point = Point(blocks, choices)
        if isinstance(pool, int) or point not in points:  # who writes shares cannot know that two of them meet
            points.append(point)
    return points


def roomy_pool(
    requests: Sequence[RequestSpec],
    make_schedule: EngineFactory,
    choices: Choices = (),
    pacing: Pacing | None = None,
) -> int:
    """Blocks of the smallest pool from which up nothing is evicted.

    A reservation evicts in no pool, so that is the smallest that takes every request. Else the schedule is run in ever
    smaller pools, from one that never binds down to the first that evicts. Raises UsageError or RequestRefused.
    """
    about = describe(make_schedule, Point(1, choices))
    if about.admission != "incremental":
        most = 1
        while not _takes_all(requests, make_schedule, most, choices):
            most *= 2
        return bisect_left(range(most), True, key=lambda n: _takes_all(requests, make_schedule, n + 1, choices)) + 1
    found = _never_binds(requests, make_schedule, about, choices, pacing)
    while found > 1 and _takes_all(requests, make_schedule, found - 1, choices):
        if run_workload(make_schedule(found - 1, **dict(choices)), requests, pacing=pacing).preemptions:
            break
        found -= 1
    return found


def _never_binds(
    requests: Sequence[RequestSpec],
    make_schedule: EngineFactory,
    about: EngineDescription,
    choices: Choices,
    pacing: Pacing | None,
) -> int:
    """Blocks of a pool from which up nothing is evicted, if not of the smallest."""
    size, watermark = about.block_size, about.watermark_blocks or 0
    needed = sorted((-(-(r.prompt_tokens + r.output_tokens + 1) // size) for r in requests), reverse=True)
    most = sum(needed[: about.slots]) + watermark  # the longest requests in all slots at once
    if about.rules == "sglang" or about.batching == "static":  # admits by what is free; finished members keep blocks
        return most
    blocks = {r.request_id: -(-(r.prompt_tokens + r.output_tokens) // size) for r in requests}
    peak = _Peak(most, blocks)
    run_workload(make_schedule(most, **dict(choices)), requests, observer=peak, pacing=pacing)
    return min(most, peak.used + watermark)


class _Peak(RunObserver):
    """Most blocks in use during an iteration. blocks: of each request when it finishes."""

    def __init__(self, pool_blocks: int, blocks: dict[str, int]) -> None:
        self._pool, self._blocks, self.used = pool_blocks, blocks, 0

    def on_iteration(self, iteration: int, outcome: IterationOutcome) -> None:
        # Free blocks are counted after the iteration; those of the finished were in use during it.
        finished = sum(self._blocks[name] for name in outcome.finished)
        self.used = max(self.used, self._pool - (outcome.free_blocks or 0) + finished)

    def on_batch(self, first: int, batch: IterationBatch) -> None:
        self.used = max(self.used, self._pool - min(batch.free_blocks))
        for event in batch.events:
            finished = sum(self._blocks[name] for name in event.finished)
            self.used = max(self.used, self._pool - batch.free_blocks[event.place] + finished)


def _takes_all(
    requests: Sequence[RequestSpec], make_schedule: EngineFactory, pool_blocks: int, choices: Choices
) -> bool:
    """Whether no request is refused at the door of that pool."""
    try:
        offer(requests, make_schedule, Point(pool_blocks, choices))
    except RequestRefused:
        return False
    return True


def _block_bytes(make_engine: EngineFactory, choices: Choices) -> int:
    about = describe(make_engine, Point(1, choices))
    if about.kv_bytes_per_token is None:
        raise UsageError(f"pools in bytes: the engine {about.engine!r} does not say what a position takes; give blocks")
    return about.block_size * about.kv_bytes_per_token


def _bytes(text: str) -> Fraction:
    """As `1.5GiB`; in bytes, exactly."""
    number, prefix, binary = re.fullmatch(r"([0-9.]+)([KMGT]?)(i?)B", text).groups()  # type: ignore[union-attr]
    return Fraction(number) * (_BINARY if binary else _UNITS)[prefix]
