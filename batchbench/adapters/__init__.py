"""Engines behind the seam; the only package that knows any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchbench.calibration import Calibration
from batchbench.errors import UsageError
from batchbench.protocol import EngineFactory, Tokenizer
from batchbench.scenario import EngineSettings

ENGINES = ("own", "schedule")


def engine_factory(name: str, settings: EngineSettings, *, audit: bool = False) -> EngineFactory:
    """A factory of engines of that name, one per pool size; a model is loaded once for all.

    audit: check the engine's invariants after every iteration. Raises UsageError for an unknown
    engine, model or device.
    """
    _require_known(name)
    if name == "schedule":
        from batchbench.adapters.schedule import ScheduleEngineFactory

        return ScheduleEngineFactory(settings, audit=audit)
    from batchbench.adapters.own import OwnEngineFactory  # torch takes seconds to import

    return OwnEngineFactory(settings, audit=audit)


def engine_tokenizer(name: str, settings: EngineSettings) -> Tokenizer:
    """The tokenizer of that engine's model, read without its weights.

    Raises UsageError for an unknown engine or model, and for a model that has no tokenizer.
    """
    _require_known(name)
    from batchbench.adapters.own import own_tokenizer

    return own_tokenizer(settings)


def examine_machine(model: str | None, threads: int) -> dict[str, Any]:
    """What `batchbench doctor` reports of this machine (adapters/doctor.py). Raises UsageError for an unknown model."""
    from batchbench.adapters.doctor import examine

    return examine(model, threads)


def measure_costs(
    settings: EngineSettings, max_tokens: int, rounds: int, on_round: Callable[[int], None]
) -> Calibration:
    """What `batchbench calibrate` measures (adapters/calibrate.py). Raises UsageError for an unknown model or device,
    or for one that `max_tokens` cached positions are too many for.
    """
    from batchbench.adapters.calibrate import calibrate

    return calibrate(settings, max_tokens, rounds, on_round)


def _require_known(name: str) -> None:
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
