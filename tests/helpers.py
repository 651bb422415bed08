"""What several test modules share: engines of chosen sizes, and runs of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Decoder
from engine.block_pool import BlockCount, BlockPool
from engine.checkpoint import assemble, tensor_shapes
from engine.config import ModelConfig, SchedulerConfig
from engine.core import Engine, Output, Step
from engine.cpu_kernels import load_kernels
from engine.decoders import choose_decoder
from engine.errors import KernelsUnavailable
from engine.model import Model
from engine.plan import NoRunner, Plan
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.weights import tiny_model

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def _why_no_kernels() -> str:
    try:
        load_kernels()
    except KernelsUnavailable as error:
        return f"no native kernels: {error}"
    return ""


needs_compiler = pytest.mark.skipif(bool(_why_no_kernels()), reason=_why_no_kernels())
KERNELS = (pytest.param("native", marks=needs_compiler), "torch")


@cache
def _tiny(dtype: torch.dtype, kernels: str, threads: int) -> Decoder:
    return choose_decoder(tiny_model(0, dtype, CPU), kernels=kernels, threads=threads)


def tiny(dtype: torch.dtype = torch.float32, kernels: str = "auto") -> Decoder:
    """The embedded model, with its promise checked at the current thread count."""
    return _tiny(dtype, kernels, torch.get_num_threads())


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Model:
    """Matrices of unit gain, norms around 1: any shape, no dimension needs to suit a register."""
    draw, found = np.random.default_rng(0), tensor_shapes(config)

    def tensor(name: str) -> torch.Tensor:
        values = draw.standard_normal(found[name], np.float32)
        return torch.from_numpy(values * found[name][1] ** -0.5 if values.ndim == 2 else 1 + 0.2 * values)

    return assemble(config, found, tensor, dtype, device)


def prompt(number: int, tokens: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(256) for _ in range(tokens)]


class LogitsRunner(ModelRunner):
    """Keeps every row's logits by (request id, position of the token they predict)."""

    def __init__(self, model: Decoder, config: SchedulerConfig) -> None:
        super().__init__(model, config, track_writes=True)
        self.seen: dict[tuple[str, int], torch.Tensor] = {}

    def logits(self, plan: Plan) -> torch.Tensor:
        logits = super().logits(plan).clone()  # valid until the next forward only
        rows = zip(plan.request_ids, plan.stops, plan.keeps, logits, strict=True)
        self.seen.update({(name, stop): row for name, stop, keeps, row in rows if keeps})
        return logits


def bare_engine(
    slots: int, pool_blocks: int, block_size: int = 4, watermark_blocks: int = 0, *, rows: bool = False, **choices: Any
) -> Engine:
    """A schedule without a model, audited. rows: its plans have them. choices: further fields of SchedulerConfig."""
    config = SchedulerConfig(slots, pool_blocks, block_size, watermark_blocks, **choices)
    return Engine(config, NoRunner(reads_tokens=rows), with_audit=True)


def real_engine(
    slots: int,
    pool_blocks: int,
    block_size: int = 4,
    watermark_blocks: int = 0,
    dtype: torch.dtype = torch.float32,
    kernels: str = "auto",
    **choices: Any,
) -> Engine:
    """The tiny model, audited down to its K/V writes. choices: further fields of SchedulerConfig."""
    config = SchedulerConfig(slots, pool_blocks, block_size, watermark_blocks, **choices)
    return Engine(config, LogitsRunner(tiny(dtype, kernels), config), with_audit=True)


def drain(engine: Engine, limit: int = 10_000) -> list[Step]:
    """Step until no work is left."""
    steps: list[Step] = []
    while engine.has_work:
        steps.append(engine.step())
        assert len(steps) < limit, "the schedule does not end"
    return steps


def take_all(engine: Engine, ids: Sequence[str]) -> dict[str, Output]:
    return {request_id: engine.take(request_id) for request_id in ids}


def assert_whole(scheduler: Scheduler) -> None:
    """Every block of either pool, and every slot, is back."""
    assert sorted(scheduler.host.free) == list(range(scheduler.config.swap_blocks))
    if isinstance(scheduler.blocks, BlockPool):
        assert not any(scheduler.blocks.owners)
    assert scheduler.unused == scheduler.decoding == 0
    if isinstance(scheduler.blocks, BlockCount):
        assert len(scheduler.blocks) == scheduler.config.pool_blocks
    else:
        assert sorted(scheduler.blocks.free) == list(range(scheduler.config.pool_blocks))
    assert sorted(scheduler.slots.free) == list(range(scheduler.config.slots))


def assert_same_weights(a: Model, b: Model) -> None:
    """Every tensor of two models, and their configurations."""
    assert a.config == b.config
    assert torch.equal(a.weights.embedding, b.weights.embedding)
    assert torch.equal(a.weights.norm, b.weights.norm)
    for (name, x), (_, y) in zip(a.weights.matrices(), b.weights.matrices(), strict=True):
        assert torch.equal(x, y), name
    for x, y in zip(a.weights.layers, b.weights.layers, strict=True):
        for name in ("attention_norm", "mlp_norm", "qkv_bias", "q_norm", "k_norm"):
            p, q = getattr(x, name), getattr(y, name)
            assert p is q is None or torch.equal(p, q), name
