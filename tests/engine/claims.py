"""The promise, claim by claim, for any decoder: one request's logits against the same request alone."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import lay_out
from engine.config import SchedulerConfig
from engine.core import Engine
from engine.kv_store import KVStore
from tests.helpers import LogitsRunner, drain

BLOCK = 8


def engine_of(model, slots, pool_blocks, block_size=BLOCK):
    config = SchedulerConfig(slots, pool_blocks, block_size)
    return Engine(config, LogitsRunner(model, config))


def seen_of(engine, name="it"):
    return {stop: logits for (request_id, stop), logits in engine.runner.seen.items() if request_id == name}


def alone(model, prompt, output):
    """Logits by length of the text they follow, and the text."""
    engine = engine_of(model, 1, -(-(len(prompt) + output) // BLOCK))
    engine.submit("it", prompt, output)
    drain(engine)
    return seen_of(engine), engine.take("it").token_ids


def assert_same_bits(got, want, how):
    assert got and got.keys() <= want.keys()
    for stop, logits in got.items():
        assert torch.equal(logits, want[stop]), f"{how}: logits after {stop} tokens differ"


def assert_same_in_batches(model, prompts, output, want, sizes=(2, 3, 5, 8, 16, 31, 32)):
    """The first prompt's request among 1 to 31 others, which have other lengths and finish at other times."""
    for size in sizes:
        engine = engine_of(model, size, 2000)
        for n in range(size):
            others = prompts[1 + n % (len(prompts) - 1)]
            if n == size // 2:
                engine.submit("it", prompts[0], output)
            else:
                engine.submit(f"o{n}", others[: 1 + (7 * n) % len(others)], 1 + n % output)
        drain(engine)
        assert_same_bits(seen_of(engine), want, f"in a batch of {size}")


def assert_same_in_every_slot(model, prompts, output, want, slots=4):
    for slot in range(slots):
        engine = engine_of(model, slots, 500)
        for n in range(slot):
            engine.submit(f"o{n}", prompts[1], output)
        engine.submit("it", prompts[0], output)
        engine.step()
        assert engine.scheduler.requests["it"].slot == slot
        drain(engine)
        assert_same_bits(seen_of(engine), want, f"in slot {slot}")


def assert_same_in_chunks(model, text, want, sizes=(1, 7, 32, 40)):
    """The text forwarded in pieces of each size; its logits at the end of every piece that `want` knows."""
    blocks = -(-len(text) // BLOCK)
    table = np.arange(blocks, dtype=np.int32)[::-1].copy()  # not in the order of the pool
    for size in sizes:
        store = KVStore(model.config, blocks, BLOCK, model.dtype, model.device)
        got = {}
        for start in range(0, len(text), size):
            stop = min(start + size, len(text))
            batch = lay_out(text[start:stop], [start], [stop], table[None], BLOCK, slots=2)
            logits = model.forward(batch, store)[0].clone()
            if stop in want:
                got[stop] = logits
        assert_same_bits(got, want, f"in pieces of {size}")


def assert_same_resumed_everywhere(model, prompt, output, want):
    """Evicted before every step: each token's logits come from one prefill of the whole text so far."""
    engine = engine_of(model, 1, -(-(len(prompt) + output) // BLOCK))
    engine.submit("it", prompt, output)
    for _ in range(output - 1):
        engine.step()
        scheduler = engine.scheduler
        scheduler.evict(scheduler.requests["it"])
    engine.step()
    assert engine.rebuilt_tokens == sum(len(prompt) + n for n in range(output - 1))
    got = seen_of(engine)
    assert len(got) == output
    assert_same_bits(got, want, "resumed")


def assert_same_through_pools(model, prompts, output, shares=(0.7, 0.5, 0.3)):
    """All prompts through a roomy pool and smaller ones: every request's logits, to the last bit."""

    def run(pool_blocks):
        engine = engine_of(model, len(prompts), pool_blocks)
        for n, tokens in enumerate(prompts):
            engine.submit(f"r{n}", tokens, output)
        drain(engine)
        return engine

    each = [-(-(len(tokens) + output) // BLOCK) for tokens in prompts]
    roomy = run(sum(each))
    for share in shares:
        engine = run(max(round(share * sum(each)), max(each)))
        assert engine.runner.seen.keys() == roomy.runner.seen.keys()
        for key, logits in roomy.runner.seen.items():
            assert torch.equal(engine.runner.seen[key], logits), f"pool at {share}: {key}"
    assert engine.recomputed_tokens > 0


def assert_keeps_its_bits(model, prompts, output, long_output):
    """Every claim. long_output: tokens of the text that is resumed at every position."""
    want, text = alone(model, prompts[0], output)
    assert_same_in_batches(model, prompts, output, want)
    assert_same_in_every_slot(model, prompts, output, want)
    assert_same_in_chunks(model, prompts[0] + text[:-1], want)
    assert_same_through_pools(model, prompts[:6], output)
    long_want, _ = alone(model, prompts[0], long_output)
    assert_same_resumed_everywhere(model, prompts[0], long_output, long_want)
