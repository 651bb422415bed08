"""The engine's invariants as code: cheap enough to run after every iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from engine.block_pool import BlockCount, BlockPool
from engine.errors import AuditError
from engine.plan import RunnerState
from engine.request import Request, Status
from engine.scheduler import Scheduler


def audit(scheduler: Scheduler, runner: RunnerState | None = None) -> None:
    """Check the state between two iterations. Raises AuditError that names the first breach.

    runner: its block tables and K/V writes, if it keeps any.
    """
    holders, requests = [*scheduler.running, *scheduler.spent], scheduler.requests.values()
    _check_blocks(scheduler, holders)
    _check_contents(scheduler)
    slots = ((r, [] if r.slot is None else [r.slot]) for r in holders)
    _check_owned_once("slot", scheduler.slots.size, scheduler.slots.free, slots)
    swapped = ((r, r.host_blocks) for r in scheduler.waiting)
    _check_owned_once("swap block", scheduler.host.size, scheduler.host.free, swapped)
    _check_queues(scheduler)
    for request in requests:
        held = len(request.tokens) if scheduler.keeps_tokens else request.num_tokens
        if held != request.num_tokens or held <= max(request.frontier, request.num_computed):  # the newest is to do
            raise AuditError(
                f"request {request.request_id!r} lost text: {held} tokens, "
                f"but {max(request.frontier, request.num_computed)} positions of it were once computed"
            )
        if request.status is Status.RUNNING:
            _check_running(scheduler, request)
        elif request not in scheduler.spent:
            _check_idle(scheduler, request)
    _check_pace(scheduler, holders)
    if runner is not None:
        for request in holders:  # every table before any write: the table is the cause
            _check_table(runner, request)
        # A finished member of a static batch may have had its id taken by a running one: that is the one looked at.
        _check_writes(scheduler, runner, {r.request_id: r for r in (*scheduler.spent, *scheduler.running)})


def _check_blocks(scheduler: Scheduler, holders: Sequence[Request]) -> None:
    """Every block is free or owned, by as many as it counts: one, unless its content is shared."""
    pool = scheduler.blocks
    if isinstance(pool, BlockCount):
        held = sum(request.capacity for request in holders) // scheduler.config.block_size
        if held + pool.left != pool.size:
            raise AuditError(f"{held} blocks are held and {pool.left} free, of {pool.size}")
        return
    if not isinstance(pool, BlockPool):
        _check_owned_once("block", pool.size, pool.free, ((r, r.blocks) for r in holders))
        return
    owners = Counter(block for request in holders for block in request.blocks)
    free = Counter(pool.free)
    for block in range(pool.size):
        if pool.owners[block] != owners[block] or free[block] != (owners[block] == 0):
            raise AuditError(
                f"block {block} counts {pool.owners[block]} owners, has {owners[block]}, and is {free[block]} times "
                "free"
            )
    if strangers := (owners.keys() | free.keys()) - set(range(pool.size)):
        raise AuditError(f"block {min(strangers)} is not one of the pool's {pool.size}")


def _check_contents(scheduler: Scheduler) -> None:
    """Every known content is that of one block of the pool, and of a whole one; nothing is known of any other."""
    pool = scheduler.blocks
    if not isinstance(pool, BlockPool):
        return
    by_content, by_block = pool.contents
    for content, (serial, block) in by_content.items():
        if by_block.get(block) != content:
            raise AuditError(
                f"content {serial} should be in block {block}, which is known to hold {by_block.get(block)}"
            )
        if not 0 <= block < pool.size or len(content[1]) != scheduler.config.block_size:
            raise AuditError(f"content {serial} of {len(content[1])} tokens is in block {block}, which cannot be")
    if strangers := by_block.keys() - {block for _, block in by_content.values()}:
        raise AuditError(f"block {min(strangers)} is known to hold {by_block[min(strangers)]}, which cannot be found")


def _check_owned_once(kind: str, size: int, free: Sequence[int], owned: Iterable[tuple[Request, list[int]]]) -> None:
    """Every number is free or owned, exactly once."""
    owners: dict[int, list[str]] = {}
    for request, numbers in owned:
        for number in numbers:
            owners.setdefault(number, []).append(request.request_id)
    times_free = Counter(free)
    for number in sorted(owners.keys() | times_free.keys()):  # all of these first: a block held twice loses another
        holders = owners.get(number, []) + ["the free list"] * times_free[number]
        if len(holders) > 1:
            raise AuditError(f"{kind} {number} is held {len(holders)} times: by {', '.join(map(repr, holders))}")
    if lost := set(range(size)) - owners.keys() - times_free.keys():
        raise AuditError(f"{kind} {min(lost)} is lost: neither free nor owned")
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
    if scheduler.config.victim_name != "youngest" or scheduler.config.rules == "sglang":
        return  # others let the later pass the earlier, and SGLang's rules send victims to the tail
    for before, after in pairwise([*scheduler.running, *scheduler.waiting]):
        if before.arrival > after.arrival:
            raise AuditError(
                f"{before.status.value} {before.request_id!r} is ahead of {after.status.value} "
                f"{after.request_id!r}, which arrived before it"
            )


def _check_pace(scheduler: Scheduler, holders: Sequence[Request]) -> None:
    """Who decodes is counted, and awaited where it will grow and where it will end; room is counted too."""
    decoding = [request for request in scheduler.running if request.pace is scheduler.pace]
    if len(decoding) != scheduler.decoding:
        raise AuditError(f"{len(decoding)} requests decode, {scheduler.decoding} are counted")
    for request in decoding:
        grows = request.capacity < request.length_limit - 1
        if not scheduler.awaits(request, grows=grows):
            raise AuditError(f"request {request.request_id!r} decodes, but nobody awaits its growth or its end")
    unused = sum(request.capacity - request.num_computed for request in holders)
    if unused != scheduler.unused:
        raise AuditError(f"{unused} allocated positions are unused, {scheduler.unused} are counted")


def _check_running(scheduler: Scheduler, request: Request) -> None:
    """Between iterations the newest token is sampled but not fed; in mid-prefill, more is to compute."""
    config, name = scheduler.config, request.request_id
    computed, tokens = request.num_computed, request.num_tokens
    if not 0 < computed < tokens or (config.whole_prefills and computed != tokens - 1):
        raise AuditError(
            f"running request {name!r} has K/V of {computed} positions for {tokens} tokens, not all but one"
        )
    needed = config.blocks_for(max(computed, request.bought))
    if len(request.blocks) != needed and scheduler.keeps_tokens:
        raise AuditError(
            f"running request {name!r} holds {len(request.blocks)} blocks, {computed} positions need {needed}"
        )
    if request.capacity != needed * config.block_size:
        raise AuditError(f"running request {name!r} has capacity {request.capacity} in {needed} blocks")
    if not request.prompt_tokens + config.whole_prefills <= tokens < request.length_limit:
        raise AuditError(
            f"running request {name!r} has {tokens} tokens, should be between its prompt's "
            f"{request.prompt_tokens} and its limit of {request.length_limit}"
        )
    if config.prefix_cache and len(request.chain) != computed // config.block_size:
        raise AuditError(f"running request {name!r} knows {len(request.chain)} full blocks of {computed} positions")
    for index, block in enumerate(request.blocks[: len(request.chain)]):
        assert isinstance(scheduler.blocks, BlockPool)
        content = request.tokens[index * config.block_size : (index + 1) * config.block_size]
        if (known := scheduler.blocks.content(block)) not in (None, tuple(content)):
            raise AuditError(f"block {block} of {name!r} is known to hold {known}, but its text there is {content}")


def _check_idle(scheduler: Scheduler, request: Request) -> None:
    """A request that does not run holds nothing, but for what was swapped out."""
    if request.blocks or request.slot is not None or request.num_computed:
        raise AuditError(
            f"{request.status.value} request {request.request_id!r} holds blocks {request.blocks}, slot "
            f"{request.slot}, {request.num_computed} computed positions; it must hold nothing"
        )
    if len(request.host_blocks) != scheduler.config.blocks_for(request.swapped_tokens):
        raise AuditError(
            f"{request.status.value} request {request.request_id!r} has {request.swapped_tokens} positions swapped "
            f"out to {len(request.host_blocks)} blocks"
        )


def _check_table(runner: RunnerState, request: Request) -> None:
    assert request.slot is not None
    table = list(runner.tables[request.slot][: len(request.blocks)])
    if table != request.blocks:
        raise AuditError(
            f"the block table of slot {request.slot} is stale: {[int(block) for block in table]}, "
            f"but {request.request_id!r} owns {request.blocks}"
        )


def _check_writes(scheduler: Scheduler, runner: RunnerState, holders: Mapping[str, Request]) -> None:
    """The last forward wrote into its owners' cells; each computed position is written, nothing past the text is."""
    size, shares = scheduler.config.block_size, scheduler.config.prefix_cache
    for cell, (name, position, _) in runner.latest.items():
        if name in holders and cell != holders[name].blocks[position // size] * size + position % size:
            raise AuditError(f"K/V of {name!r} at position {position} was written to cell {cell}, not its own")
    if not runner.tracks_writes:
        return
    for name, request in holders.items():
        for position in range(request.capacity):
            cell = request.blocks[position // size] * size + position % size
            writer = runner.written.get(cell)
            if position >= request.num_computed:
                if writer is not None:
                    raise AuditError(
                        f"cell {cell} of {name!r}, beyond its {request.num_computed} computed positions, "
                        f"was written by {tuple(writer)}"
                    )
            elif writer is None or writer[1:] != (position, request.tokens[position]):
                raise AuditError(
                    f"K/V of {name!r} at position {position} (cell {cell}) was last written by "
                    f"{writer and tuple(writer)}"
                )
            elif writer.request_id != name and not shares:
                raise AuditError(
                    f"K/V of {name!r} at position {position} (cell {cell}) was last written by {tuple(writer)}"
                )
