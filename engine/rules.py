"""Whose schedule: rule sets that decide which rows an iteration computes. Each fits on a screen.

A rule set is called once per iteration. It adds rows to `motions.draft`, moving the books as it goes.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.config import SchedulerConfig
from engine.motions import Motions
from engine.request import RUNNING, STILL, Request
from engine.sglang import SGLang

RuleSet = Callable[[Motions], None]


def batchbench(m: Motions) -> None:
    """Grow, then admit, then forward: decodes first, prompts in chunks of what the budget leaves."""
    _admit(m, _run(m))


def static(m: Motions) -> None:
    """A group runs to its last member; only then is the next one admitted. Finished members are forwarded on."""
    left = _run(m)
    if not m.running:
        m.release_spent()
        _admit(m, left)
    for request in m.spent:  # its last position again: the same K/V, and a token that nobody keeps
        m.draft.rows.append(request)
        m.draft.starts.append(request.computed - 1)
        m.draft.stops.append(request.computed)


def _run(m: Motions) -> int:
    """Grow and forward the running. Returns what is left of the budget."""
    budget = m.budget
    if m.decoding > budget:
        m.hold([r for r in m.running if r.pace is not STILL][budget:])
    budget -= m.decoding
    if not m.grow_all():
        for request in m.growers():
            if request.status is RUNNING:  # not evicted by one before it
                m.make_room(request, request.num_tokens)
    if len(m.running) > m.decoding and budget:
        for request in m.running:
            if request.pace is STILL and budget:
                positions = min(request.missing, budget)
                m.draft.add(request, positions)
                budget -= positions
    return budget


def _admit(m: Motions, budget: int) -> None:
    """From the head while a slot is free and its blocks fit; stop at the first that does not."""
    while m.waiting and budget:
        request = m.waiting[0]
        found, positions = m.find(request), _bought(m.config, request)
        if not m.fits(found, positions):
            break
        m.admit(request, found, positions)
        request.place = request.arrival  # oldest first, whoever was evicted
        if request.arrival < m.running[-2 if len(m.running) > 1 else -1].arrival:
            m.running.sort(key=lambda r: r.arrival)
        positions = min(request.missing, budget)
        m.draft.add(request, positions)
        budget -= positions


def _bought(config: SchedulerConfig, request: Request) -> int:
    """Positions whose blocks an admission buys."""
    if config.admission == "incremental":
        return request.num_tokens
    return request.length_limit - 1 if config.admission == "reserve-output" else config.max_tokens or 0


def vllm_v1(m: Motions) -> None:
    """vLLM's v1 scheduler under FCFS (vllm/v1/core/sched/scheduler.py, 0.11), without speculation or remote K/V.

    Running requests in admission order, each taking what the budget leaves, block by block; who cannot grow evicts
    from the end of the list, itself at last, and then the loop ends. Nothing is admitted in an iteration that
    evicted. The gate is what must fit before a request is admitted: its whole context, or its first chunk.
    """
    budget, extra = m.budget, 0  # positions beyond one for each row
    simple = len(m.running) == m.decoding <= budget and m.grow_all()
    for request in () if simple else _undecided(m):
        if request.status is not RUNNING:
            continue
        place = m.running.index(request)
        positions = min(request.missing, budget - extra - place)
        if positions <= 0:
            break
        if not m.make_room(request, request.num_computed + positions):
            m.hold(m.running[place:])
            break
        if request.pace is STILL:
            m.draft.add(request, positions)
            extra += positions - 1
    if len(m.running) > budget - extra:
        m.hold(m.running[max(0, budget - extra) :])
    budget -= m.decoding + sum(m.draft.stops) - sum(m.draft.starts)
    while m.waiting and budget and not m.draft.evicted:
        request = m.waiting[0]
        found = m.find(request)
        positions = min(request.num_tokens - found.tokens, budget)
        if not m.fits(found, _gate(m.config, request, found.tokens + positions)):
            break
        m.admit(request, found, found.tokens + positions)
        m.draft.add(request, positions)
        budget -= positions


def _undecided(m: Motions) -> list[Request]:
    """Those that need more than the next position of a block they have, in running order."""
    growers = m.growers()
    if len(m.running) == m.decoding:
        return growers
    return sorted([*growers, *(r for r in m.running if r.pace is STILL)], key=lambda r: r.place)


def _gate(config: SchedulerConfig, request: Request, first_chunk: int) -> int:
    """Positions whose blocks must be free for an admission."""
    return request.num_tokens if config.admission_gate == "full-prompt" else first_chunk


def steady(m: Motions) -> bool:
    """Whether the queue's head must wait until somebody finishes or is evicted: growth alone makes no room for it."""
    config = m.config
    if config.rules == "sglang" or m.decoding > m.budget:
        return False  # SGLang's estimates move with every decode
    if not m.waiting or config.batching == "static":
        return True
    request = m.waiting[0]
    found = m.find(request)
    if config.rules == "batchbench":
        return not m.fits(found, _bought(config, request))
    left = min(request.num_tokens - found.tokens, m.budget - m.decoding)
    return not m.fits(found, _gate(config, request, found.tokens + left))


def rule_set(config: SchedulerConfig) -> RuleSet:
    """The rules that a configuration names; new ones, since some keep a state."""
    if config.batching == "static":
        return static
    sets: dict[str, RuleSet] = {"batchbench": batchbench, "vllm-v1": vllm_v1, "sglang": SGLang()}
    return sets[config.rules]


def smallest_pool(config: SchedulerConfig, prompt_tokens: int, output_tokens: int) -> int:
    """Blocks of the smallest pool in which a request of these lengths can run alone."""
    if config.rules == "sglang":  # its whole length must be less than what is free
        return config.blocks_for(prompt_tokens + output_tokens + 1)
    return config.blocks_for(config.max_tokens or prompt_tokens + output_tokens - 1)  # the last token is never fed
