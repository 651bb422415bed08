"""The engine's invariants as code: cheap enough to run after every iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.errors import AuditError
from engine.request import Request, Status
from engine.runner import TorchRunner
from engine.scheduler import Scheduler


def audit(scheduler: Scheduler, runner: object) -> None:
    """Check the state between two iterations. Raises AuditError that names the first breach."""
    running = scheduler.running
    _check_owned_once("block", scheduler.blocks.size, scheduler.blocks.free, ((r, r.blocks) for r in running))
    _check_owned_once(
        "slot",
        scheduler.slots.size,
        scheduler.slots.free,
        ((r, [] if r.slot is None else [r.slot]) for r in running),
    )
    _check_waiting(scheduler)
    for request in running:
        _check_running(scheduler, request)
    for request in scheduler.requests.values():
        queued = request in (scheduler.waiting if request.status is Status.WAITING else running)
        if len(request.tokens) <= request.frontier:  # the newest token is never computed while it is the newest
            raise AuditError(
                f"request {request.request_id!r} lost text: {len(request.tokens)} tokens, "
                f"but {request.frontier} positions of it were once computed"
            )
        if not queued and request.status is not Status.FINISHED:
            raise AuditError(f"request {request.request_id!r} is {request.status.value} but in no queue")
    if isinstance(runner, TorchRunner):
        for request in running:  # every table before any write: the table is the cause
            _check_tables(runner, request)
        for request in running:
            _check_writes(runner, request)


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


def _check_waiting(scheduler: Scheduler) -> None:
    previous = -1
    for request in scheduler.waiting:
        if request.blocks or request.slot is not None or request.num_computed:
            raise AuditError(
                f"waiting request {request.request_id!r} holds blocks {request.blocks}, slot {request.slot}, "
                f"{request.num_computed} computed positions; it must hold nothing"
            )
        if request.arrival < previous:
            raise AuditError(f"the waiting queue is out of arrival order at {request.request_id!r}")
        previous = request.arrival
    if scheduler.running and scheduler.waiting and scheduler.config.victim == "youngest":
        last, first = scheduler.running[-1], scheduler.waiting[0]
        if last.arrival > first.arrival:
            raise AuditError(f"{last.request_id!r} runs ahead of {first.request_id!r}, which arrived before it")


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


def _check_tables(runner: TorchRunner, request: Request) -> None:
    assert request.slot is not None
    table = runner.tables[request.slot, : len(request.blocks)].tolist()
    if table != request.blocks:
        raise AuditError(
            f"the block table of slot {request.slot} is stale: {table}, "
            f"but {request.request_id!r} owns {request.blocks}"
        )


def _check_writes(runner: TorchRunner, request: Request) -> None:
    """K/V of each position was written by this request, and nothing past its text was."""
    if runner.written is None:
        return
    for position in range(request.capacity):
        cell = request.blocks[position // runner.block_size] * runner.block_size + position % runner.block_size
        writer = runner.written.get(cell)
        if position < request.num_computed and writer != (request.request_id, position):
            raise AuditError(
                f"K/V of {request.request_id!r} at position {position} (cell {cell}) was last written by {writer}"
            )
        if position >= request.num_computed and writer == (request.request_id, position):
            raise AuditError(
                f"K/V of {request.request_id!r} was written at position {position}, "
                f"beyond its {request.num_computed} computed positions"
            )
