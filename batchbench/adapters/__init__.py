"""Engines behind the seam; the only package that knows any of them."""

from __future__ import annotations

from batchbench.errors import UsageError
from batchbench.protocol import EngineFactory
from batchbench.scenario import EngineSettings

ENGINES = ("own",)


def engine_factory(name: str, settings: EngineSettings, *, audit: bool = False) -> EngineFactory:
    """A factory of engines of that name, one per pool size; a model is loaded once for all.

    audit: check the engine's invariants after every iteration. Raises UsageError for an unknown
    engine, model or device.
    """
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    from batchbench.adapters.own import OwnEngineFactory  # torch takes seconds to import

    return OwnEngineFactory(settings, audit=audit)
