"""Engines as they were asked for: built, held to what they say of themselves, asked, closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from batchbench.errors import BatchbenchError, EngineFailed
from batchbench.protocol import BenchEngine, EngineDescription, EngineFactory, Point, RequestSpec


@contextmanager
def built(make_engine: EngineFactory, point: Point) -> Iterator[tuple[BenchEngine, EngineDescription]]:
    """The point's engine and what it says of itself; closed at the end.

    Raises UsageError, as its factory does; EngineFailed if that raises anything else, or builds another engine than it
    was asked for.
    """
    try:
        engine = make_engine(point.pool_blocks, **dict(point.choices))
        about = engine.describe()
    except BatchbenchError:
        raise
    except Exception as error:
        raise EngineFailed(f"{point.name}: it could not be built: {type(error).__name__}: {error}") from error
    try:
        require_described(about, {"pool_blocks": point.pool_blocks, **dict(point.choices)}, point.name)
        yield engine, about
    finally:
        engine.close()


def require_described(about: EngineDescription, asked: Mapping[str, Any], who: str) -> None:
    """Raise EngineFailed unless the engine describes itself by the values asked for, where it says them at all."""
    for name, value in asked.items():
        said = getattr(about, name, None)
        if said is not None and said != value:
            raise EngineFailed(f"{who}: {name} = {value!r} was asked for, and the engine says that it has {said!r}")


def describe(make_engine: EngineFactory, point: Point) -> EngineDescription:
    """The engine as that point would build it. Raises as `built`."""
    with built(make_engine, point) as (_, about):
        return about


def offer(requests: Sequence[RequestSpec], make_engine: EngineFactory, point: Point) -> None:
    """Ask that point whether each of the requests could run. Raises RequestRefused for the first that could not."""
    with built(make_engine, point) as (engine, _):
        for request in requests:
            engine.check(request)
