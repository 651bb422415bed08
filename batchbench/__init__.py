"""Benchmark and pool-size sweep harness for LLM inference under KV-cache pressure."""

from batchbench.adapters import engine_factory, engine_tokenizer
from batchbench.driver import Limits
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
    "RequestSpec",
    "Sampling",
    "Scenario",
    "SweepObserver",
    "Text",
    "Tokenizer",
    "build_requests",
    "engine_factory",
    "engine_tokenizer",
    "load_scenario",
    "sweep_pool_sizes",
]
