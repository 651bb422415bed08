"""The schedule: who runs in this iteration, who grows, who gives way. The only copy of the policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.block_pool import FreeList
from engine.config import SchedulerConfig
from engine.errors import EngineError, RequestRefused
from engine.plan import Admission, Eviction, Plan, TableUpdate
from engine.policies import victim_rule
from engine.request import Request, Status
from engine.sampling import GREEDY, Sampling


class Scheduler:
    """Continuous batching over a paged pool, preemption by recompute.

    `waiting` and `running` together are in arrival order: admission takes from the head of the
    one to the tail of the other, and an eviction goes back the same way.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = FreeList(config.pool_blocks)
        self.slots = FreeList(config.slots)
        self.requests: dict[str, Request] = {}  # every request whose tokens were not taken yet
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._victim = victim_rule(config.victim)
        self._submitted = 0

    def submit(self, request_id: str, prompt: Sequence[int], output_tokens: int, sampling: Sampling = GREEDY) -> None:
        """Queue a request. Raises RequestRefused, by name, if it could not run in an empty pool."""
        if request_id in self.requests:
            raise RequestRefused(f"request {request_id!r}: the id is in use")
        if not prompt or output_tokens < 1:
            raise RequestRefused(
                f"request {request_id!r}: needs at least one prompt token and one output token, "
                f"has {len(prompt)} and {output_tokens}"
            )
        # The last token is sampled but never fed, so its position needs no K/V.
        needed = self.config.blocks_for(len(prompt) + output_tokens - 1)
        if needed > self.config.pool_blocks:
            raise RequestRefused(
                f"request {request_id!r}: {len(prompt)} prompt + {output_tokens} output tokens need "
                f"{needed} blocks of {self.config.block_size}, the pool has {self.config.pool_blocks}; "
                f"the smallest pool that holds it is {needed} blocks"
            )
        limit = len(prompt) + output_tokens
        request = Request(request_id, list(prompt), len(prompt), limit, self._submitted, sampling)
        self._submitted += 1
        self.requests[request_id] = request
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Decide one iteration: grow the running, admit the waiting, lay out the forward."""
        updates: list[TableUpdate] = []
        evicted = self._grow(updates)
        decoding = len(self.running)
        admitted = self._admit(updates)
        rows = self.running
        token_ids = [row.tokens[-1] for row in rows[:decoding]]
        for row in rows[decoding:]:
            token_ids.extend(row.tokens)
        return Plan(
            request_ids=[row.request_id for row in rows],
            slots=[row.slot for row in rows],  # type: ignore[misc]  # a running request has a slot
            starts=[row.num_computed for row in rows],
            stops=[len(row.tokens) for row in rows],
            token_ids=token_ids,
            samplings=[row.sampling for row in rows],
            table_updates=updates,
            admitted=admitted,
            evicted=evicted,
        )

    def apply(self, plan: Plan, sampled: Sequence[int]) -> list[str]:
        """Move the state past `plan`: one sampled token per row. Returns who finished."""
        finished = []
        for row, stop, token in zip(self.running, plan.stops, sampled, strict=True):
            row.num_computed = stop
            row.tokens.append(token)
            if stop + 1 == row.length_limit:
                finished.append(row)
        for row in finished:
            self.running.remove(row)
            self._release(row, Status.FINISHED)
        return [row.request_id for row in finished]

    def abort(self, request_id: str) -> None:
        """Drop a waiting, running or preempted request between iterations; its blocks return at once."""
        request = self._known(request_id)
        if request.status is Status.WAITING:
            self.waiting.remove(request)
            request.status = Status.ABORTED
        elif request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request, Status.ABORTED)
        del self.requests[request_id]

    def take(self, request_id: str) -> list[int]:
        """Hand over a finished request's generated tokens and forget it."""
        request = self._known(request_id)
        if request.status is not Status.FINISHED:
            raise EngineError(f"request {request_id!r} is {request.status.value}, not finished")
        del self.requests[request_id]
        return request.generated

    def _grow(self, updates: list[TableUpdate]) -> list[Eviction]:
        """Give each running request, oldest first, the blocks of its tokens; evict when short."""
        evicted = []
        for row in [row for row in self.running if len(row.tokens) > row.capacity]:
            missing = self.config.blocks_for(len(row.tokens) - row.capacity)
            while row.status is Status.RUNNING and missing > len(self.blocks):
                ungrown = self.running[self.running.index(row) + 1 :]
                evicted.append(self._evict(self._victim(ungrown) if ungrown else row))
            if row.status is Status.RUNNING:
                self._allocate(row, missing, updates)
        return evicted

    def _evict(self, victim: Request) -> Eviction:
        """Take a running request's blocks; its tokens stay and it waits at the head of the queue."""
        assert victim.slot is not None
        event = Eviction(
            request_id=victim.request_id,
            slot=victim.slot,
            cached_tokens=victim.num_computed,
            generated_tokens=len(victim.tokens) - victim.prompt_tokens,
            freed_blocks=len(victim.blocks),
            thrash=victim.num_computed < victim.admitted_capacity,
        )
        self.running.remove(victim)
        self._release(victim, Status.WAITING)
        victim.evictions += 1
        self.waiting.appendleft(victim)
        return event

    def _admit(self, updates: list[TableUpdate]) -> list[Admission]:
        """Admit from the head while a slot is free and its blocks fit; stop at the first that does not."""
        admitted = []
        while self.waiting and len(self.slots):
            request = self.waiting[0]
            needed = self.config.blocks_for(len(request.tokens))
            if needed > len(self.blocks) - (self.config.watermark_blocks if self.running else 0):
                break
            self.waiting.popleft()
            self.running.append(request)
            request.status = Status.RUNNING
            (request.slot,) = self.slots.take(1)
            self._allocate(request, needed, updates)
            request.admitted_capacity = request.capacity
            positions = len(request.tokens)
            rebuilt = min(request.frontier, positions)
            admitted.append(Admission(request.request_id, request.slot, positions, rebuilt, request.evictions > 0))
        return admitted

    def _allocate(self, request: Request, count: int, updates: list[TableUpdate]) -> None:
        assert request.slot is not None
        new = self.blocks.take(count)
        updates.append(TableUpdate(request.slot, len(request.blocks), new))
        request.blocks.extend(new)
        request.capacity += count * self.config.block_size

    def _release(self, request: Request, status: Status) -> None:
        """Return a request's blocks and slot; it has left `running` already."""
        assert request.slot is not None
        self.blocks.give_back(request.blocks)
        self.slots.give_back([request.slot])
        request.frontier = request.num_computed  # never less than before: a resume computes everything again
        request.blocks, request.capacity, request.num_computed = [], 0, 0
        request.slot, request.status = None, status

    def _known(self, request_id: str) -> Request:
        try:
            return self.requests[request_id]
        except KeyError:
            raise EngineError(f"unknown request {request_id!r}: never submitted, aborted, or taken") from None
