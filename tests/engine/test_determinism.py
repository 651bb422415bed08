"""The same bits in every company: logits compared with torch.equal, never with a tolerance."""

from __future__ import annotations

import pytest
import torch

from engine.config import SchedulerConfig
from engine.core import Engine
from engine.decoders import choose_decoder
from engine.weights import tiny_model
from tests.helpers import CPU, DTYPES, KERNELS, LogitsRunner, drain, needs_compiler, prompt, real_engine

PROMPT, OUTPUT = prompt(0, 9), 40


def logits_of(engine, request_id="it"):
    drain(engine)
    return {stop: row for (rid, stop), row in engine.runner.seen.items() if rid == request_id}


def alone(dtype, kernels):
    engine = real_engine(slots=1, pool_blocks=64, dtype=dtype, kernels=kernels)
    engine.submit("it", PROMPT, OUTPUT)
    return logits_of(engine)


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for stop in want:
        assert torch.equal(got[stop], want[stop]), f"logits after {stop} tokens differ"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", [1, 2, 3, 6, 7, 8, 31, 32, 40])
def test_among_others_of_other_lengths(kernels, dtype, others):
    engine = real_engine(slots=others + 1, pool_blocks=2000, dtype=dtype, kernels=kernels)
    for n in range(others):
        engine.submit(f"o{n}", prompt(n + 1, 1 + 7 * n % 50), 1 + n % 45)
        if n == others // 2:
            engine.submit("it", PROMPT, OUTPUT)
    assert_same_bits(logits_of(engine), alone(dtype, kernels))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_every_slot(kernels, dtype):
    want = alone(dtype, kernels)
    for slot in range(6):
        engine = real_engine(slots=6, pool_blocks=200, dtype=dtype, kernels=kernels)
        for n in range(slot):
            engine.submit(f"o{n}", prompt(n + 1, 4), 60)
        engine.submit("it", PROMPT, OUTPUT)
        engine.step()
        assert engine.scheduler.requests["it"].slot == slot
        assert_same_bits(logits_of(engine), want)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 16, 31, 64])
def test_with_every_block_size_and_scattered_blocks(kernels, dtype, block_size):
    engine = real_engine(slots=4, pool_blocks=400, block_size=block_size, dtype=dtype, kernels=kernels)
    for n in range(3):  # leave early, in an order that shuffles the free list
        engine.submit(f"o{n}", prompt(n + 1, 20), 3 + n)
    engine.step()
    engine.submit("it", PROMPT, OUTPUT)
    assert_same_bits(logits_of(engine), alone(dtype, kernels))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_resumed_by_recompute_at_every_position(kernels, dtype):
    """Evict at each length in turn: the K/V of one resumed prefill gives the bits of decoding one by one."""
    want = alone(dtype, kernels)
    for generated in range(1, OUTPUT):
        engine = real_engine(slots=2, pool_blocks=100, dtype=dtype, kernels=kernels)
        engine.submit("it", PROMPT, OUTPUT)
        for _ in range(generated):
            engine.step()
        scheduler = engine.scheduler
        scheduler.evict(scheduler.requests["it"])
        assert_same_bits(logits_of(engine), want)
        assert engine.rebuilt_tokens == len(PROMPT) + generated - 1


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_resumed_kv_equals_decoded_kv(kernels, dtype):
    def cached(evict_after):
        engine = real_engine(slots=1, pool_blocks=30, dtype=dtype, kernels=kernels)
        engine.submit("it", PROMPT, OUTPUT)
        for n in range(OUTPUT - 1):
            if n in evict_after:
                engine.scheduler.evict(engine.scheduler.requests["it"])
            engine.step()
        request, store = engine.scheduler.requests["it"], engine.runner.store
        cells = torch.tensor([request.blocks[p // 4] * 4 + p % 4 for p in range(request.num_computed)])
        return store.keys[:, :, cells], store.values[:, :, cells]

    for got, want in zip(cached({13, 29}), cached(set()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_through_shrinking_pools(kernels, dtype, threads):
    torch.set_num_threads(threads)

    def run(pool_blocks):
        engine = real_engine(slots=6, pool_blocks=pool_blocks, dtype=dtype, kernels=kernels)
        for n in range(6):
            engine.submit(f"r{n}", prompt(n, 5), 24)
        drain(engine)
        return engine

    roomy = run(48)
    for pool_blocks in (32, 16, 12, 8):
        engine = run(pool_blocks)
        assert engine.recomputed_tokens > 0
        assert engine.runner.seen.keys() == roomy.runner.seen.keys()
        for key, want in roomy.runner.seen.items():
            assert torch.equal(engine.runner.seen[key], want), key


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_bits_do_not_depend_on_the_thread_count(dtype):
    def run(threads):
        config = SchedulerConfig(6, 20, 4)
        model = choose_decoder(tiny_model(0, dtype, CPU), kernels="native", threads=threads)
        engine = Engine(config, LogitsRunner(model, config))
        for n in range(6):
            engine.submit(f"r{n}", prompt(n, 5 + 9 * n), 24)
        drain(engine)
        return engine.runner.seen

    want = run(1)
    for threads in (2, 3, 5):
        assert_same_bits(run(threads), want)
