"""The engine's invariants as code: cheap enough to run after every iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from engine.errors import AuditError
from engine.plan import RunnerState
from engine.request import Request, Status
from engine.scheduler import Scheduler


def audit(scheduler: Scheduler, runner: RunnerState | None = None) -> None:
    """Check the state between two iterations. Raises AuditError that names the first breach.

    runner: its block tables and K/V writes, if it keeps any.
    """
    running, requests = scheduler.running, scheduler.requests.values()
    blocks = ((r, r.blocks) for r in running)
    _check_owned_once("block", scheduler.blocks.size, scheduler.blocks.free, blocks)
    slots = ((r, [] if r.slot is None else [r.slot]) for r in running)
    _check_owned_once("slot", scheduler.slots.size, scheduler.slots.free, slots)
    _check_queues(scheduler)
    for request in requests:
        if len(request.tokens) <= request.frontier:  # the newest token is never computed while it is the newest
            raise AuditError(
                f"request {request.request_id!r} lost text: {len(request.tokens)} tokens, "
                f"but {request.frontier} positions of it were once computed"
            )
        if request.status is Status.RUNNING:
            _check_running(scheduler, request)
        elif request.blocks or request.slot is not None or request.num_computed:
            raise AuditError(
                f"{request.status.value} request {request.request_id!r} holds blocks {request.blocks}, slot "
                f"{request.slot}, {request.num_computed} computed positions; it must hold nothing"
            )
    if runner is not None:
        for request in running:  # every table before any write: the table is the cause
            _check_table(runner, request)
        _check_writes(scheduler, runner)


def _check_owned_once(kind: str, size: int, free: Sequence[int], owned: Iterable[tuple[Request, list[int]]]) -> None:
    """Every number is free or owned, exactly once."""
    owners: dict[int, list[str]] = {}
    for request, numbers in owned:
        for number in numbers:
            owners.setdefault(number, []).append(request.request_id)
    times_free = Counter(free)
    for number in range(size):
        holders = owners.get(number, []) + ["the free list"] * times_free[number]
        if not holders:
            raise AuditError(f"{kind} {number} is lost: neither free nor owned")
        if len(holders) > 1:
            raise AuditError(f"{kind} {number} is held {len(holders)} times: by {', '.join(map(repr, holders))}")
    strangers = (owners.keys() | times_free.keys()) - set(range(size))
    if strangers:
        raise AuditError(f"{kind} {min(strangers)} is not one of the pool's {size}")


def _check_queues(scheduler: Scheduler) -> None:
    """Each live request is in the queue of its status, once, and both queues are in arrival order."""
    for status, queue in ((Status.RUNNING, scheduler.running), (Status.WAITING, scheduler.waiting)):
        belong = {r.request_id for r in scheduler.requests.values() if r.status is status}
        queued = Counter(r.request_id for r in queue)
        if misplaced := sorted(belong ^ queued.keys()):
            where = "in no queue" if misplaced[0] in belong else f"in the {status.value} queue"
            known = scheduler.requests.get(misplaced[0])
            state = known.status.value if known else "unknown"
            raise AuditError(f"request {misplaced[0]!r} is {state} but {where}")
        if twice := [name for name, times in queued.items() if times > 1]:
            raise AuditError(f"request {twice[0]!r} is {queued[twice[0]]} times in the {status.value} queue")
    if scheduler.config.victim != "youngest":
        return
    for before, after in pairwise([*scheduler.running, *scheduler.waiting]):
        if before.arrival > after.arrival:
            raise AuditError(
                f"{before.status.value} {before.request_id!r} is ahead of {after.status.value} "
                f"{after.request_id!r}, which arrived before it"
            )


def _check_running(scheduler: Scheduler, request: Request) -> None:
    """Between iterations the newest token is sampled but not fed: one position is still to compute."""
    name, computed, tokens = request.request_id, request.num_computed, len(request.tokens)
    if computed != tokens - 1:
        raise AuditError(
            f"running request {name!r} has K/V of {computed} positions for {tokens} tokens, not all but one"
        )
    needed = scheduler.config.blocks_for(computed)
    if len(request.blocks) != needed:
        raise AuditError(
            f"running request {name!r} holds {len(request.blocks)} blocks, {computed} positions need {needed}"
        )
    if request.capacity != needed * scheduler.config.block_size:
        raise AuditError(f"running request {name!r} has capacity {request.capacity} in {needed} blocks")
    if not request.prompt_tokens < tokens < request.length_limit:
        raise AuditError(
            f"running request {name!r} has {tokens} tokens, should be between its prompt's "
            f"{request.prompt_tokens} and its limit of {request.length_limit}"
        )


def _check_table(runner: RunnerState, request: Request) -> None:
    assert request.slot is not None
    table = list(runner.tables[request.slot][: len(request.blocks)])
    if table != request.blocks:
        raise AuditError(
            f"the block table of slot {request.slot} is stale: {[int(block) for block in table]}, "
            f"but {request.request_id!r} owns {request.blocks}"
        )


def _check_writes(scheduler: Scheduler, runner: RunnerState) -> None:
    """The last forward wrote into its owners' cells; each computed position is written, nothing past the text is."""
    size = scheduler.config.block_size
    running = {request.request_id: request for request in scheduler.running}
    for cell, (name, position) in runner.latest.items():
        if name in running and cell != running[name].blocks[position // size] * size + position % size:
            raise AuditError(f"K/V of {name!r} at position {position} was written to cell {cell}, not its own")
    if not runner.tracks_writes:
        return
    for name, request in running.items():
        for position in range(request.capacity):
            cell = request.blocks[position // size] * size + position % size
            writer = runner.written.get(cell)
            if position < request.num_computed and writer != (name, position):
                raise AuditError(f"K/V of {name!r} at position {position} (cell {cell}) was last written by {writer}")
            if position >= request.num_computed and writer is not None:
                raise AuditError(
                    f"cell {cell} of {name!r}, beyond its {request.num_computed} computed positions, "
                    f"was written by {writer}"
                )
