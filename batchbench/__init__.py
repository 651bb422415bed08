"""Benchmark and pool-size sweep harness for LLM inference under KV-cache pressure."""

from batchbench.adapters import engine_factory
from batchbench.protocol import (
    Admission,
    BenchEngine,
    EngineDescription,
    Eviction,
    IterationOutcome,
    RequestSpec,
    Text,
)
from batchbench.scenario import Scenario, load_scenario
from batchbench.sweep import SweepObserver, sweep_pool_sizes
from batchbench.timing import ContinuousTiming
from batchbench.workload import build_requests

__all__ = [
    "Admission",
    "BenchEngine",
    "ContinuousTiming",
    "EngineDescription",
    "Eviction",
    "IterationOutcome",
    "RequestSpec",
    "Scenario",
    "SweepObserver",
    "Text",
    "build_requests",
    "engine_factory",
    "load_scenario",
    "sweep_pool_sizes",
]
