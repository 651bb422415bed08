"""Whose schedule: rule sets that decide which rows an iteration computes. Each fits on a screen.

A rule set is called once per iteration. It adds rows to `motions.draft`, moving the books as it goes.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.config import SchedulerConfig
from engine.motions import Motions
from engine.request import Request, Status
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
        m.draft.starts.append(request.num_computed - 1)
        m.draft.stops.append(request.num_computed)


def _run(m: Motions) -> int:
    """Grow and forward the running. Returns what is left of the budget."""
    budget, draft, whole = m.config.budget, m.draft, m.config.whole_prefills
    # Without chunks whoever runs has its prompt behind it; to look at each again would cost as much as the plan.
    decoding = m.running[:] if whole else [r for r in m.running if len(r.tokens) - r.num_computed == 1][:budget]
    for request in [request for request in decoding if len(request.tokens) > request.capacity]:
        if request.status is Status.RUNNING:  # not evicted by one before it
            m.make_room(request, len(request.tokens))
    if draft.evicted:
        decoding = [request for request in decoding if request.status is Status.RUNNING]
    draft.rows = decoding
    draft.starts = [request.num_computed for request in decoding]
    draft.stops = [len(request.tokens) for request in decoding]
    draft.decodes = len(decoding) if whole else 0
    budget -= len(decoding)
    if len(decoding) < len(m.running) and budget:
        for request in m.running:
            if request.missing > 1 and budget:
                positions = min(request.missing, budget)
                draft.add(request, positions)
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
        if request.arrival < m.running[-2 if len(m.running) > 1 else -1].arrival:
            m.running.sort(key=lambda r: r.arrival)  # oldest first, whoever was evicted
        positions = min(request.missing, budget)
        m.draft.add(request, positions)
        budget -= positions


def _bought(config: SchedulerConfig, request: Request) -> int:
    """Positions whose blocks an admission buys."""
    if config.admission == "incremental":
        return len(request.tokens)
    return request.length_limit - 1 if config.admission == "reserve-output" else config.max_tokens or 0


def vllm_v1(m: Motions) -> None:
    """vLLM's v1 scheduler under FCFS (vllm/v1/core/sched/scheduler.py, 0.11), without speculation or remote K/V.

    Running requests in admission order, each taking what the budget leaves, block by block; who cannot grow evicts
    from the end of the list, itself at last, and then the loop ends. Nothing is admitted in an iteration that
    evicted. The gate is what must fit before a request is admitted: its whole context, or its first chunk.
    """
    budget, index = m.config.budget, 0
    while index < len(m.running) and budget:
        request = m.running[index]
        positions = min(request.missing, budget)
        if not m.make_room(request, request.num_computed + positions):
            break
        m.draft.add(request, positions)
        budget -= positions
        index += 1
    while m.waiting and budget and not m.draft.evicted:
        request = m.waiting[0]
        found = m.find(request)
        positions = min(len(request.tokens) - found.tokens, budget)
        first_chunk = found.tokens + positions
        if not m.fits(found, len(request.tokens) if m.config.admission_gate == "full-prompt" else first_chunk):
            break
        m.admit(request, found, first_chunk)
        m.draft.add(request, positions)
        budget -= positions


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
