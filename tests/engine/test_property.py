"""Random workloads through random pools: texts, books and blocks all come out right."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import RECLAIMS, SchedulerConfig
from engine.core import Engine
from engine.policies import VICTIM_RULES
from tests.helpers import DTYPES, LogitsRunner, assert_whole, prompt, take_all, tiny

REQUESTS = st.lists(
    # prompt, output, arrival; past 32 positions a request's keys span two chunks of attention
    st.tuples(st.integers(1, 14) | st.integers(25, 40), st.integers(1, 14), st.integers(0, 12)),
    min_size=1,
    max_size=7,
)


def run(model, requests, slots, pool_blocks, block_size, watermark_blocks, aborts=(), **choices):
    """Submit at arrivals, abort (iteration, number) pairs, drain with the audit on; return the engine and its texts."""
    config = SchedulerConfig(slots, pool_blocks, block_size, watermark_blocks, **choices)
    engine = Engine(config, LogitsRunner(model, config), with_audit=True, prefers_swap=lambda tokens: tokens % 3 > 0)
    aborted = set()
    pending = sorted(enumerate(requests), key=lambda item: item[1][2])
    iteration = 0
    while pending or engine.has_work:
        while pending and (pending[0][1][2] <= iteration or not engine.has_work):
            number, (prompt_tokens, output_tokens, _) = pending.pop(0)
            engine.submit(f"r{number}", prompt(number, prompt_tokens), output_tokens, priority=number % 3)
        for at, number in aborts:
            if at == iteration and f"r{number}" in engine.scheduler.requests:
                engine.abort(f"r{number}")
                aborted.add(f"r{number}")
        if engine.has_work:
            engine.step()
        iteration += 1
        assert iteration < 5000
    assert_whole(engine.scheduler)
    return engine, take_all(engine, [f"r{n}" for n in range(len(requests)) if f"r{n}" not in aborted])


@settings(max_examples=80, deadline=None)
@given(
    kernels=st.sampled_from(["auto", "torch"]),
    dtype=st.sampled_from(DTYPES),
    requests=REQUESTS,
    slots=st.integers(1, 5),
    block_size=st.integers(1, 9),
    watermark_blocks=st.integers(0, 8),
    squeeze=st.floats(0, 1),
)
def test_any_workload_through_any_pool(kernels, dtype, requests, slots, block_size, watermark_blocks, squeeze):
    needed = [-(-(p + o - 1) // block_size) for p, o, _ in requests]
    smallest, roomy = max(needed), sum(needed) + watermark_blocks
    tight = round(smallest + squeeze**2 * (roomy - smallest))
    model = tiny(dtype, kernels)
    reference, want = run(model, requests, slots, roomy, block_size, watermark_blocks)
    engine, got = run(model, requests, slots, tight, block_size, watermark_blocks)

    assert reference.rebuilt_tokens == reference.recomputed_tokens == 0
    for number, (_, output_tokens, _) in enumerate(requests):
        assert len(got[f"r{number}"].token_ids) == output_tokens
    assert got == want  # token ids, and the logit gaps to the last bit
    assert engine.forward_tokens - reference.forward_tokens == engine.rebuilt_tokens
    assert engine.recomputed_tokens - engine.rebuilt_tokens == engine.prefill_rows - len(requests)
    assert engine.issued_tokens == engine.collected_tokens == sum(o for _, o, _ in requests)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    requests=REQUESTS,
    slots=st.integers(1, 5),
    block_size=st.integers(1, 9),
    watermark_blocks=st.integers(0, 8),
    squeeze=st.floats(0, 1),
    rules=st.sampled_from(
        [
            {},
            {"batching": "static"},
            {"admission": "reserve-output"},
            {"admission": "reserve-max", "max_tokens": 53},
            {"rules": "vllm-v1"},
            {"rules": "vllm-v1", "admission_gate": "first-chunk"},
            {"rules": "sglang"},
        ]
    ),
    victim=st.none() | st.sampled_from(list(VICTIM_RULES)),
    token_budget=st.none() | st.integers(1, 60),
    reclaim=st.sampled_from(RECLAIMS),
    swap_blocks=st.integers(1, 30),
    prefix_cache=st.booleans(),
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=3),
)
def test_any_workload_under_any_choice(
    dtype, requests, slots, block_size, watermark_blocks, squeeze, rules, reclaim, swap_blocks, aborts, **choices
):
    """Whoever is not aborted has the text of the roomy pool, to the last bit of its logit gaps."""
    needed = [-(-max(p + o + 1, rules.get("max_tokens", 0)) // block_size) for p, o, _ in requests]
    smallest, roomy = max(needed), sum(needed) + watermark_blocks
    tight = round(smallest + squeeze**2 * (roomy - smallest))
    if rules.get("rules") == "sglang" and choices["token_budget"]:
        choices["token_budget"] = -(-choices["token_budget"] // block_size) * block_size
    if reclaim != "recompute":
        choices |= {"reclaim": reclaim, "swap_blocks": swap_blocks}
    model = tiny(dtype)
    _, want = run(model, requests, slots, roomy, block_size, watermark_blocks)
    _, got = run(model, requests, slots, tight, block_size, watermark_blocks, aborts, **rules, **choices)
    assert got == {name: want[name] for name in got}
