"""Every mechanism under every victim rule: the roomy pool's text to the last bit, and clean books."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
import torch

from engine.audit import audit
from engine.config import SchedulerConfig
from engine.core import Engine
from engine.errors import ConfigError, NoProgress, RequestRefused
from engine.kv_store import KVStore
from engine.plan import NoRunner
from engine.policies import VICTIM_RULES
from engine.request import Status
from engine.rules import vllm_v1
from tests.helpers import (
    DTYPES,
    LogitsRunner,
    assert_whole,
    bare_engine,
    drain,
    prompt,
    real_engine,
    take_all,
    tiny,
)

SLOTS, BLOCK_SIZE = 4, 4
LENGTHS = [(5, 9), (17, 6), (3, 14), (9, 1), (12, 11), (6, 8), (21, 5)]
SHARED = prompt(99, 8)  # the first two blocks of every other prompt
MECHANISMS = {
    "recompute": {},
    "swap": {"reclaim": "swap", "swap_blocks": 40},
    "swap, a pool too small": {"reclaim": "swap", "swap_blocks": 3},
    "cheaper": {"reclaim": "cheaper", "swap_blocks": 40},
    "chunks": {"token_budget": 5},
    "chunks of one": {"token_budget": 1},
    "prefix cache": {"prefix_cache": True},
    "prefix cache, swap and chunks": {
        "prefix_cache": True,
        "token_budget": 7,
        "reclaim": "swap",
        "swap_blocks": 6,
    },
    "reserve output": {"admission": "reserve-output"},
    "reserve max": {"admission": "reserve-max", "max_tokens": 26},
    "static": {"batching": "static"},
    "static, prefix cache and swap": {
        "batching": "static",
        "prefix_cache": True,
        "reclaim": "swap",
        "swap_blocks": 20,
    },
    "vllm-v1": {"rules": "vllm-v1", "token_budget": 16},
    "vllm-v1, first chunk": {"rules": "vllm-v1", "token_budget": 6, "admission_gate": "first-chunk"},
    "vllm-v1, prefix cache": {"rules": "vllm-v1", "token_budget": 16, "prefix_cache": True},
    "sglang": {"rules": "sglang", "token_budget": 8},
    "sglang, prefix cache and swap": {"rules": "sglang", "prefix_cache": True, "reclaim": "swap", "swap_blocks": 9},
}


def prompt_of(number, tokens):
    return ((SHARED if number % 2 else []) + prompt(number, tokens))[:tokens]


def run(dtype, pool_blocks, lengths=LENGTHS, **choices):
    config = SchedulerConfig(SLOTS, pool_blocks, BLOCK_SIZE, **choices)
    prefers_swap = (lambda tokens: tokens % 2 == 0) if config.reclaim == "cheaper" else None
    engine = Engine(config, LogitsRunner(tiny(dtype), config), with_audit=True, prefers_swap=prefers_swap)
    for number, (tokens, output) in enumerate(lengths):
        engine.submit(f"r{number}", prompt_of(number, tokens), output, priority=number % 3)
    steps = drain(engine)
    assert_whole(engine.scheduler)
    return engine, steps, take_all(engine, [f"r{n}" for n in range(len(lengths))])


@pytest.fixture(scope="module")
def roomy():
    found = {dtype: run(dtype, 60) for dtype in DTYPES}
    assert not any(step.evicted for _, steps, _ in found.values() for step in steps)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("victim", VICTIM_RULES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_text_and_logits_are_those_of_the_roomy_pool(roomy, mechanism, victim, dtype):
    reference, _, want = roomy[dtype]
    for pool_blocks in (7, 9, 14):
        engine, _, got = run(dtype, pool_blocks, victim=victim, **MECHANISMS[mechanism])
        assert got == want  # token ids, and the logit gaps to the last bit
        assert all(torch.equal(engine.runner.seen[key], row) for key, row in reference.runner.seen.items())
        if "static" not in mechanism and "cache" not in mechanism:
            assert engine.forward_tokens - reference.forward_tokens == engine.rebuilt_tokens


@pytest.mark.parametrize(
    "mechanism",
    # A budget of one position serves one request at a time; SGLang's estimate keeps such short outputs apart.
    [name for name in MECHANISMS if not name.startswith(("reserve", "chunks of one", "sglang"))],
)
def test_the_small_pool_does_evict(mechanism):
    """Else the matrix above proves nothing of that mechanism."""
    _, steps, _ = run(torch.float32, 7, **MECHANISMS[mechanism])
    assert sum(len(step.evicted) for step in steps) >= 2


@pytest.mark.parametrize("victim", VICTIM_RULES)
@pytest.mark.parametrize("mechanism", ["reserve output", "reserve max"])
def test_a_reservation_evicts_nobody(mechanism, victim):
    for pool_blocks in (7, 9, 14):
        _, steps, _ = run(torch.float32, pool_blocks, victim=victim, **MECHANISMS[mechanism])
        assert not any(step.evicted for step in steps)


# ---- swap ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_come_back_equal_from_a_round_trip(dtype):
    model = tiny(dtype)
    store, host = (KVStore(model.config, blocks, 4, dtype, model.device) for blocks in (6, 3))
    draw = torch.Generator().manual_seed(0)
    for tensor in (store.keys, store.values):
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    before = [tensor.clone() for tensor in (store.keys, store.values)]
    store.copy_blocks([4, 0], host, [2, 1])
    for tensor, host_tensor in zip((store.keys, store.values), (host.keys, host.values), strict=True):
        assert torch.equal(host_tensor[:, :, 8:12], tensor[:, :, 16:20])
        assert torch.equal(host_tensor[:, :, 4:8], tensor[:, :, :4])
        assert not host_tensor[:, :, :4].any()
        tensor.zero_()
    host.copy_blocks([2, 1], store, [4, 0])
    for tensor, want in zip((store.keys, store.values), before, strict=True):
        assert torch.equal(tensor[:, :, 16:20], want[:, :, 16:20]) and torch.equal(tensor[:, :, :4], want[:, :, :4])
        assert not tensor[:, :, 4:16].any()


def test_swapping_recomputes_nothing_and_counts_what_it_moves():
    engine, steps, _ = run(torch.float32, 7, **MECHANISMS["swap"])
    evicted = [event for step in steps for event in step.evicted]
    moved = sum(event.cached_tokens for event in evicted)
    assert evicted and all(event.reclaim == "swap" and not event.swap_full for event in evicted)
    assert engine.recomputed_tokens == engine.rebuilt_tokens == 0
    assert sum(step.swapped_out_tokens for step in steps) == sum(step.swapped_in_tokens for step in steps) == moved > 0
    assert all((step.copy_s > 0) == bool(step.swapped_out_tokens or step.swapped_in_tokens) for step in steps)
    assert engine.prefill_rows == len(LENGTHS)


def test_a_full_swap_pool_falls_back_to_recompute_and_says_so():
    engine, steps, _ = run(torch.float32, 7, **MECHANISMS["swap, a pool too small"])
    evicted = [event for step in steps for event in step.evicted]
    fallen_back = [event for event in evicted if event.swap_full]
    assert fallen_back and all(event.reclaim == "recompute" for event in fallen_back)
    assert all((event.reclaim == "swap") != event.swap_full for event in evicted)
    assert engine.recomputed_tokens > 0


# ---- prefix cache ----------------------------------------------------------------------------


def test_a_victim_finds_the_blocks_that_nobody_overwrote():
    engine = real_engine(slots=2, pool_blocks=7, prefix_cache=True)
    engine.submit("old", prompt(0, 6), 12)
    engine.submit("young", prompt(1, 11), 8)
    steps = drain(engine)
    (resume,) = [a for step in steps for a in step.admitted if a.resumed]
    (event,) = [e for step in steps for e in step.evicted]
    rebuilt = sum(p.rebuilt_tokens for step in steps for p in step.prefills if p.resumed)
    assert event.request_id == resume.request_id == "young"
    assert resume.recovered_tokens > 0 and resume.recovered_tokens % 4 == 0
    assert resume.recovered_tokens + rebuilt == event.cached_tokens


def test_requests_with_a_common_beginning_share_its_full_blocks():
    engine = real_engine(slots=3, pool_blocks=20, prefix_cache=True)
    text = prompt(0, 13)
    engine.submit("a", text, 6)
    engine.step()
    engine.submit("b", text, 6)  # 12 of 13 positions: three full blocks, and the last is computed anyway
    engine.submit("c", text[:9] + prompt(1, 4), 6)
    step = engine.step()
    assert [(a.request_id, a.shared_tokens, a.recovered_tokens) for a in step.admitted] == [("b", 12, 0), ("c", 8, 0)]
    assert step.forward_tokens == 1 + 1 + 5
    held = {name: engine.scheduler.requests[name].blocks for name in "abc"}
    assert held["a"][:3] == held["b"][:3] and held["a"][:2] == held["c"][:2]
    assert [engine.scheduler.blocks.owners[block] for block in held["a"]] == [3, 3, 2, 1]
    drain(engine)
    assert engine.take("a").token_ids == engine.take("b").token_ids
    assert_whole(engine.scheduler)


def test_contents_whose_hashes_collide_are_not_shared():
    """Python's hash of an integer is its remainder modulo 2**61 - 1, so these two prompts hash alike."""
    collision = 2**61 - 1
    assert hash((0, (collision, 1))) == hash((0, (0, 1)))
    engine = bare_engine(slots=2, pool_blocks=10, block_size=2, prefix_cache=True)
    engine.submit("a", [0, 1, 5], 4)
    engine.step()
    engine.submit("b", [collision, 1, 5], 4)
    assert [a.shared_tokens for a in engine.step().admitted] == [0]


def test_equal_blocks_after_unequal_ones_are_not_shared():
    engine = bare_engine(slots=2, pool_blocks=10, block_size=2, prefix_cache=True)
    engine.submit("a", [1, 2, 7, 7, 9], 4)
    engine.step()
    engine.submit("b", [3, 4, 7, 7, 9], 4)
    assert [a.shared_tokens for a in engine.step().admitted] == [0]


def test_what_was_freed_longest_ago_is_overwritten_first():
    engine = bare_engine(slots=1, pool_blocks=6, block_size=2, prefix_cache=True)
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        engine.submit(name, [token] * 4, 1)
        drain(engine)
        engine.take(name)
    engine.submit("d", [4] * 4, 1)  # takes the two blocks of "a"
    drain(engine)
    for name, token, found in (("b", 2, 2), ("a", 1, 0)):
        engine.submit(f"{name} again", [token] * 4, 1)
        assert [a.shared_tokens for step in drain(engine) for a in step.admitted] == [found]


# ---- chunks, priorities, reservation, static batching ------------------------------------------


def test_a_budget_is_spent_on_decodes_first_and_cuts_prompts():
    engine = bare_engine(slots=3, pool_blocks=20, token_budget=5)
    engine.submit("a", [1] * 4, 9)
    engine.submit("b", [1] * 9, 3)
    steps = [engine.step() for _ in range(4)]
    assert [step.forward_tokens for step in steps] == [5, 5, 5, 2]
    assert [[(p.request_id, p.positions) for p in step.prefills] for step in steps] == [
        [("a", 4), ("b", 1)], [("b", 4)], [("b", 4)], []]  # fmt: skip
    assert [step.collected_tokens for step in steps] == [1, 1, 2, 2]
    assert [step.issued_tokens for step in steps] == [2, 2, 2, 2]


def test_a_request_evicted_in_mid_prefill_computes_again_only_what_it_had():
    engine = real_engine(slots=2, pool_blocks=8, token_budget=5)
    engine.submit("old", prompt(0, 4), 20)
    engine.submit("long", prompt(1, 21), 2)
    steps = drain(engine)
    (event,) = [e for step in steps for e in step.evicted]
    assert event.request_id == "long" and event.generated_tokens == 0 and 0 < event.cached_tokens < 21
    assert engine.rebuilt_tokens == event.cached_tokens


def test_the_highest_priority_number_gives_way():
    engine = bare_engine(slots=3, pool_blocks=4, block_size=2, victim="priority")
    for name, priority in (("a", 0), ("b", 2), ("c", 1)):
        engine.submit(name, [1], 6, priority=priority)
    evicted = [e.request_id for step in drain(engine) for e in step.evicted]
    assert evicted[0] == "b"


def test_rules_differ_in_whom_they_evict():
    first = {}
    for victim in VICTIM_RULES:
        engine = bare_engine(slots=4, pool_blocks=10, victim=victim)
        for number, (tokens, output) in enumerate([(11, 6), (7, 3), (2, 3), (12, 20)]):
            engine.submit(f"r{number}", [1] * tokens, output, priority=number == 2)
        first[victim] = next(e.request_id for step in drain(engine) for e in step.evicted)
    assert first == {
        "youngest": "r3", "oldest": "r0", "fewest-cached": "r2", "most-cached": "r3",
        "most-blocks-per-remaining-token": "r1", "priority": "r2", "fewest-output": "r3",
    }  # fmt: skip


def test_sglang_retracts_the_fewest_output_tokens_to_the_tail():
    engine = bare_engine(slots=16, pool_blocks=400, rules="sglang")
    for number in range(20):
        engine.submit(f"r{number}", [1] * (8 + number), 100 + number % 4)
    steps = []
    while engine.has_work:
        output = {r.request_id: r.num_tokens - r.prompt_tokens for r in engine.scheduler.running}
        step = engine.step()
        for event in step.evicted:
            assert event.generated_tokens == min(output.values())
            del output[event.request_id]
        if step.evicted:
            assert engine.scheduler.waiting[-1].request_id == step.evicted[-1].request_id
        assert not step.prefills or not step.evicted  # prompts and decodes never share an iteration
        steps.append(step)
    evicted = [(event.request_id, event.generated_tokens) for step in steps for event in step.evicted]
    assert evicted == [("r15", 84), ("r14", 91), ("r13", 99)]
    assert_whole(engine.scheduler)


def last_of(candidates):
    return candidates[-1]


def a_stranger(candidates):
    return object()


def a_raiser(candidates):
    raise RuntimeError("no idea")


def a_quitter(candidates):
    raise SystemExit(7)


def of_nothing():
    pass


def test_a_users_own_rule_is_named_by_its_module():
    bare_engine(1, 4, victim=f"{__name__}:last_of")
    for name, why in (
        ("no.such.module:rule", "ModuleNotFoundError: No module named"),
        (".relative:rule", "TypeError"),
        (f"{__name__}:nothing", "has no attribute"),
        (f"{__name__}:SLOTS", "is not a function"),
        ("nearest", r"unknown victim rule 'nearest'; known: youngest, .*package.module:function"),
    ):
        with pytest.raises(ConfigError, match=why):
            bare_engine(1, 4, victim=name)
    for rule, why in (
        ("a_stranger", "which is none of its candidates"),
        ("a_raiser", "RuntimeError: no idea"),
        ("a_quitter", "SystemExit: 7"),
        ("of_nothing", "TypeError: .*positional argument"),
    ):
        engine = bare_engine(slots=2, pool_blocks=4, block_size=2, victim=f"{__name__}:{rule}")
        engine.submit("a", [1], 6)
        engine.submit("b", [1], 6)
        with pytest.raises(ConfigError, match=f"victim rule '{__name__}:{rule}'.*{why}"):
            drain(engine)


def test_a_schedule_that_thrashes_is_stopped_and_named():
    """No victim rule can do this; a rule set with a fault could."""
    engine = bare_engine(slots=2, pool_blocks=4, block_size=1, rules="vllm-v1", token_budget=2)

    def faulty(motions):
        if motions.running:
            motions.evict(motions.running[0])
        else:
            vllm_v1(motions)

    engine.scheduler._decide = faulty
    engine.submit("a", [1] * 4, 1)
    with pytest.raises(NoProgress, match=r"got a token in \d+ iterations under rules 'vllm-v1', victim 'youngest'"):
        drain(engine)


def test_no_victim_rule_starves_the_vllm_schedule():
    """Tight pools and budgets that interleave prompts, where a token could be longest in coming."""
    for victim, pool, budget, gate, tokens, output in product(
        VICTIM_RULES, (5, 6, 8), (1, 2, 3, 5), ("first-chunk", "full-prompt"), (3, 4), (1, 2)
    ):
        engine = bare_engine(
            3, pool, 1, victim=victim, rules="vllm-v1", token_budget=budget, admission_gate=gate
        )  # fmt: skip
        for number in range(4):
            engine.submit(f"r{number}", [1] * tokens, output, priority=number % 2)
        drain(engine)


def test_static_batching_runs_a_group_to_its_last_member():
    """The lesson's example: two slots, outputs of 2, 1 and 2 tokens."""
    used = {}
    for batching in ("static", "continuous"):
        engine = bare_engine(slots=2, pool_blocks=20, batching=batching)
        for name, output in (("A", 2), ("B", 1), ("C", 2)):
            engine.submit(name, [1], output)
        steps = drain(engine)
        used[batching] = engine.collected_tokens, 2 * len(steps)
        if batching == "static":
            assert [step.issued_tokens for step in steps] == [2, 2, 1, 1]
            assert [step.collected_tokens for step in steps] == [2, 1, 1, 1]
    assert used == {"static": (5, 8), "continuous": (5, 6)}


def test_reserve_max_refuses_what_it_could_not_hold():
    engine = bare_engine(slots=2, pool_blocks=5, admission="reserve-max", max_tokens=20)
    with pytest.raises(RequestRefused, match="feed 21 positions, max_tokens reserves 20"):
        engine.submit("r", [1] * 20, 2)
    engine.submit("r", [1] * 20, 1)
    drain(engine)
    with pytest.raises(RequestRefused, match="smallest pool that holds it is 5 blocks"):
        bare_engine(slots=2, pool_blocks=4, admission="reserve-max", max_tokens=20).submit("r", [1], 1)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"rules": "orca"}, "rules is 'orca'; known: batchbench, vllm-v1, sglang"),
        ({"reclaim": "swap"}, "reclaim = 'swap' with swap_blocks = 0: swapping needs a host pool"),
        ({"swap_blocks": 3}, "swap_blocks = 3 would do nothing"),
        ({"token_budget": 0}, "token_budget is 0, must be at least 1"),
        ({"admission": "reserve-max"}, "need each other"),
        ({"max_tokens": 5}, "need each other"),
        ({"rules": "vllm-v1", "batching": "static"}, "batching = 'static' is of rules = 'batchbench'"),
        ({"rules": "sglang", "token_budget": 6}, "must be a multiple of block_size"),
        ({"admission_gate": "first-chunk"}, "is of rules = 'vllm-v1', not of 'batchbench'"),
        ({"swap_blocks": -1}, "swap_blocks is -1, must not be negative"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(choices, message):
    with pytest.raises(ConfigError, match=message):
        bare_engine(1, 4, **choices)


# ---- aborts ----------------------------------------------------------------------------------

ALWAYS = {"waiting", "running", "finished"}
REACHED = {
    "recompute": {"preempted", "resumed"},
    "swap": {"swapped", "resumed"},
    "swap, a pool too small": {"swapped", "preempted", "resumed"},
    "cheaper": {"swapped", "preempted", "resumed"},
    "chunks": {"mid-prefill", "preempted", "resumed"},
    "chunks of one": {"mid-prefill"},
    "prefix cache": {"preempted", "resumed"},
    "prefix cache, swap and chunks": {"mid-prefill", "swapped", "resumed"},
    "reserve output": set(),
    "reserve max": set(),
    "static": {"spent", "preempted", "resumed"},
    "static, prefix cache and swap": {"spent", "swapped", "resumed"},
    "vllm-v1": {"mid-prefill", "preempted", "resumed"},
    "vllm-v1, first chunk": {"mid-prefill", "preempted", "resumed"},
    "vllm-v1, prefix cache": {"mid-prefill", "preempted", "resumed"},
    "sglang": {"mid-prefill"},
    "sglang, prefix cache and swap": set(),
}
"""States that a request can be found in between two iterations of the workload below, beside those of ALWAYS."""


def submitted(mechanism):
    """The workload, in a pool that is too small for it."""
    config = SchedulerConfig(SLOTS, 7, BLOCK_SIZE, **MECHANISMS[mechanism])
    engine = Engine(config, NoRunner(), with_audit=True, prefers_swap=lambda tokens: tokens > 8)
    for number, (tokens, output) in enumerate(LENGTHS):
        engine.submit(f"r{number}", prompt_of(number, tokens), output)
    return engine


def state_of(engine, request):
    if request.status is Status.WAITING:
        return "swapped" if request.host_blocks else "preempted" if request.evictions else "waiting"
    if request.status is Status.RUNNING:
        if request.num_computed < request.context:
            return "mid-prefill"
        return "resumed" if request.evictions else "running"
    return "spent" if request in engine.scheduler.spent else request.status.value


def moments(mechanism):
    """By state: every (iterations, request id) after which a request is in it."""
    engine, found = submitted(mechanism), defaultdict(list)
    for iterations in range(10_000):
        for name, request in engine.scheduler.requests.items():
            found[state_of(engine, request)].append((iterations, name))
        if not engine.has_work:
            return found
        engine.step()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_an_abort_in_every_state_returns_every_block(mechanism):
    """The first, a middle and the last moment of each state that the mechanism knows."""
    found = moments(mechanism)
    assert set(found) == ALWAYS | REACHED[mechanism]
    ids = {f"r{number}" for number in range(len(LENGTHS))}
    for state, times in found.items():
        for iterations, aborted in {times[0], times[len(times) // 2], times[-1]}:
            engine = submitted(mechanism)
            for _ in range(iterations):
                engine.step()
            assert state_of(engine, engine.scheduler.requests[aborted]) == state
            engine.abort(aborted)
            audit(engine.scheduler)  # its blocks and swap blocks are back at once, if nobody shares them
            drain(engine)
            assert_whole(engine.scheduler)
            outputs = take_all(engine, sorted(ids - {aborted}))
            assert {name: len(output.token_ids) for name, output in outputs.items()} == {
                f"r{n}": output for n, (_, output) in enumerate(LENGTHS) if f"r{n}" != aborted
            }
