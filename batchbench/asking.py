"""Engines that are built to be asked one thing before anything runs, and closed."""

from __future__ import annotations

from collections.abc import Sequence

from batchbench.protocol import EngineDescription, EngineFactory, Point, RequestSpec


def describe(make_engine: EngineFactory, point: Point) -> EngineDescription:
    """The engine as that point would build it. Raises UsageError."""
    engine = make_engine(point.pool_blocks, **dict(point.choices))
    try:
        return engine.describe()
    finally:
        engine.close()


def offer(requests: Sequence[RequestSpec], make_engine: EngineFactory, point: Point) -> None:
    """Ask that point whether each of the requests could run. Raises RequestRefused for the first that could not."""
    engine = make_engine(point.pool_blocks, **dict(point.choices))
    try:
        for request in requests:
            engine.check(request)
    finally:
        engine.close()
