"""The engine on a GPU: same promises, same counters. Skips, visibly, where there is none."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from engine.config import SchedulerConfig
from engine.core import Engine
from engine.decoders import choose_decoder
from engine.weights import tiny_model
from tests.helpers import DTYPES, LogitsRunner, drain, prompt

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU and a CUDA build of torch; run `make test` where both are"
)


@pytest.fixture(params=product(("triton", "torch"), DTYPES), ids=str)
def model(request):
    kernels, dtype = request.param
    return choose_decoder(tiny_model(0, dtype, torch.device("cuda")), kernels=kernels)


def run(model, pool_blocks):
    config = SchedulerConfig(slots=6, pool_blocks=pool_blocks, block_size=4)
    engine = Engine(config, LogitsRunner(model, config), with_audit=True)
    for n in range(6):
        engine.submit(f"r{n}", prompt(n, 5), 24)
    drain(engine)
    return engine


def test_logits_are_the_same_bits_in_every_pool(model):
    roomy = run(model, 48)
    for pool_blocks, forward_tokens in ((12, 268), (8, 256)):
        engine = run(model, pool_blocks)
        assert engine.forward_tokens == forward_tokens
        for key, want in roomy.runner.seen.items():
            assert torch.equal(engine.runner.seen[key], want), key
