"""Benchmark and pool-size sweep harness for LLM inference under KV-cache pressure."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchbench.adapters import engine_factory, engine_tokenizer
    from batchbench.driver import Limits
    from batchbench.errors import RequestRefused, UsageError
    from batchbench.protocol import (
        Admission,
        BenchEngine,
        EngineDescription,
        Eviction,
        IterationOutcome,
        Prefill,
        RequestSpec,
        Sampling,
        Text,
        Tokenizer,
    )
    from batchbench.results import Result, load_result
    from batchbench.running import run_scenario
    from batchbench.scenario import Scenario, load_scenario
    from batchbench.sweep import Pass, SweepObserver, sweep_pool_sizes
    from batchbench.timing import ContinuousTiming
    from batchbench.workload import build_requests

__all__ = [
    "Admission",
    "BenchEngine",
    "ContinuousTiming",
    "EngineDescription",
    "Eviction",
    "IterationOutcome",
    "Limits",
    "Pass",
    "Prefill",
    "RequestRefused",
    "RequestSpec",
    "Result",
    "Sampling",
    "Scenario",
    "SweepObserver",
    "Text",
    "Tokenizer",
    "UsageError",
    "build_requests",
    "engine_factory",
    "engine_tokenizer",
    "load_result",
    "load_scenario",
    "run_scenario",
    "sweep_pool_sizes",
]
_HOMES = {
    "adapters": ("engine_factory", "engine_tokenizer"),
    "driver": ("Limits",),
    "errors": ("RequestRefused", "UsageError"),
    "protocol": ("Admission", "BenchEngine", "EngineDescription", "Eviction", "IterationOutcome", "Prefill",
                 "RequestSpec", "Sampling", "Text", "Tokenizer"),
    "results": ("Result", "load_result"),
    "running": ("run_scenario",),
    "scenario": ("Scenario", "load_scenario"),
    "sweep": ("Pass", "SweepObserver", "sweep_pool_sizes"),
    "timing": ("ContinuousTiming",),
    "workload": ("build_requests",),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: a command can be interrupted before numbers are read, by one line."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
