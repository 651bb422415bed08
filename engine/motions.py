"""What a schedule is made of: growing, evicting, admitting, decoding, releasing. Rules decide, these move the books."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.block_pool import BlockCount, BlockPool, FreeList
from engine.config import SchedulerConfig
from engine.plan import Admission, Copy, Eviction, Prefill, TableUpdate
from engine.policies import victim_rule
from engine.request import ABORTED, FINISHED, NONE, RUNNING, STILL, WAITING, Pace, Request, Status

PrefersSwap = Callable[[int], bool]
"""Whether swapping out and back costs less than recomputing, for a victim of that many computed positions."""


@dataclass(slots=True)
class Draft:
    """What the iteration under way has decided so far.

    Who decodes has a row, unless `decodes` is false; `rows` are the others: prompts, resumed contexts, and spent
    members of a static batch.
    """

    decodes: bool = True
    rows: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    evicted: list[Eviction] = field(default_factory=list)
    # Summed up when it is decided, for the plan.
    issued: int = 0
    positions: int = 0
    kept: int = 0
    prefills: list[Prefill] = field(default_factory=list)
    began: Sequence[str] = ()
    paused: Sequence[str] = ()

    def add(self, request: Request, positions: int) -> None:
        """Compute that many more positions of it."""
        self.rows.append(request)
        self.starts.append(request.num_computed)
        self.stops.append(request.num_computed + positions)


@dataclass(slots=True)
class Found:
    """What of a waiting request's K/V is there: `tokens` positions, in shared blocks or in the swap pool."""

    tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)


NOTHING = Found()


class Motions:
    """The pools, the queues, and the moves between them.

    `decoding`: how many of the running keep the pace; the others compute prompts. `held`: who lost its turn to decode
    in this iteration. `spent`: finished members of a static batch, which keep slot and blocks until it ends.
    `unused`: positions that running requests' blocks have room for and do not hold yet. `keeps_tokens`: whether there
    are texts, which a prefix cache compares, and block tables to keep; without, blocks are only counted.
    """

    def __init__(
        self, config: SchedulerConfig, prefers_swap: PrefersSwap | None = None, *, keeps_tokens: bool = True
    ) -> None:
        self.config, self.keeps_tokens = config, keeps_tokens or config.prefix_cache
        self.blocks: BlockPool | FreeList | BlockCount
        if self.keeps_tokens:
            self.blocks = BlockPool(config.pool_blocks) if config.prefix_cache else FreeList(config.pool_blocks)
        else:
            self.blocks = BlockCount(config.pool_blocks)
        self.host = FreeList(config.swap_blocks)
        self.slots = FreeList(config.slots)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.held: list[Request] = []
        self.spent: list[Request] = []
        self.budget = config.budget
        self.pace, self.decoding, self.unused = Pace(), 0, 0
        # Who outgrows its blocks, and who gets its last token, at which tick of the pace.
        self._grow_at: defaultdict[int, list[Request]] = defaultdict(list)
        self._end_at: defaultdict[int, list[Request]] = defaultdict(list)
        self._places = 0
        self.draft = Draft()
        self.pick = victim_rule(config.victim_name)
        self._prefers_swap: PrefersSwap = prefers_swap or (lambda tokens: True)

    # ---- decoding ------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """All of it but its newest token is computed: from now on it decodes."""
        request.settled -= self.pace.now
        request.pace = self.pace
        self.decoding += 1
        self._end_at[request.length_limit - request.settled].append(request)
        if request.capacity < request.length_limit - 1:  # the last token is never fed
            self._grow_at[request.capacity + 1 - request.settled].append(request)

    def leave(self, request: Request) -> None:
        """It decodes no more."""
        if request.pace is not STILL:
            request.computed = request.num_computed
            request.settled, request.pace = request.num_tokens, STILL
            self.decoding -= 1

    def hold(self, requests: Sequence[Request]) -> None:
        """Those of them that decode lose their turn in this iteration."""
        for request in requests:
            if request.pace is not STILL:
                self.leave(request)
                self.held.append(request)

    def growers(self) -> list[Request]:
        """Who has outgrown its blocks, in running order. Each must grow, give way, or be held."""
        return _in_order([request for request in self._grow_at.pop(self.pace.now, ()) if self._outgrown(request)])

    def ending(self) -> list[Request]:
        """Who got its last token with the last tick, in running order."""
        now = self.pace.now
        return _in_order(
            [r for r in self._end_at.pop(now) if r.settled + now == r.length_limit and r.pace is not STILL]
        )

    def awaits(self, request: Request, *, grows: bool) -> bool:
        """Whether both calendars know of one that decodes; for the audit."""
        ends = self._end_at.get(request.length_limit - request.settled, ())
        return request in ends and (
            not grows or request in self._grow_at.get(request.capacity + 1 - request.settled, ())
        )

    # ---- blocks --------------------------------------------------------------------------

    def grow_all(self) -> bool:
        """Give everybody the block that it needs; False, and nothing is done, if there are too few."""
        now, blocks = self.pace.now, self.blocks
        due = self._grow_at.get(now)
        if due is None:
            return True
        if not isinstance(blocks, BlockCount) or len(due) > blocks.left:
            growers = self.growers()
            if len(growers) > len(blocks):
                self._grow_at[now] = growers
                return False
            for request in growers:
                self._allocate(request, 1)
            return True
        del self._grow_at[now]
        taken, size = 0, self.config.block_size
        later = self._grow_at[now + size]  # as _allocate does, without a call for each
        for request in due:
            if request.settled + now > request.capacity and request.pace is not STILL:
                taken += 1
                capacity = request.capacity = request.capacity + size
                if capacity < request.length_limit - 1:
                    later.append(request)
        blocks.left -= taken
        self.unused += taken * size
        return True

    def _outgrown(self, request: Request) -> bool:
        return request.pace is not STILL and request.num_tokens > request.capacity

    def make_room(self, request: Request, stop: int) -> bool:
        """Give a running request the blocks of `stop` positions; evict from it on while short. False: it gave way."""
        missing = self.config.blocks_for(stop) - request.capacity // self.config.block_size
        while missing > len(self.blocks):
            victim = self.pick(self.running[self.running.index(request) :])
            self.evict(victim)
            if victim is request:
                return False
        if missing > 0:
            self._allocate(request, missing)
        return True

    def evict(self, victim: Request, *, to_head: bool = True) -> None:
        """Take a running request's slot and blocks; its tokens stay, its K/V is dropped or swapped, it waits again."""
        assert victim.slot is not None
        wants = self.config.reclaim == "swap" or (
            self.config.reclaim == "cheaper" and self._prefers_swap(victim.num_computed)
        )
        used = self.config.blocks_for(victim.num_computed)
        swaps = wants and 0 < used <= len(self.host)
        event = Eviction(
            request_id=victim.request_id,
            slot=victim.slot,
            cached_tokens=victim.num_computed,
            generated_tokens=victim.num_tokens - victim.prompt_tokens,
            freed_blocks=victim.capacity // self.config.block_size,
            thrash=victim.num_computed < victim.bought,
            reclaim="swap" if swaps else "recompute",
            swap_full=wants and used > len(self.host),
        )
        self.draft.evicted.append(event)
        if swaps:
            victim.host_blocks, victim.swapped_tokens = self.host.take(used), victim.num_computed
            self.draft.copies.append(Copy(True, victim.blocks[:used], victim.host_blocks))
        self.running.remove(victim)
        self.leave(victim)
        self.release(victim, WAITING)
        victim.evictions += 1
        if to_head:
            self.waiting.appendleft(victim)
        else:
            self.waiting.append(victim)

    def find(self, request: Request) -> Found:
        """What a waiting request would find. The last token is always left to compute: its logits are needed."""
        if request.host_blocks:
            return Found(request.swapped_tokens)
        if not self.config.prefix_cache:
            return NOTHING
        assert isinstance(self.blocks, BlockPool)
        size = self.config.block_size
        blocks, chain = self.blocks.find(request.tokens, size, request.num_tokens - 1)
        return Found(len(blocks) * size, blocks, chain)

    def fits(self, found: Found, positions: int) -> bool:
        """Whether a waiting request that found so much could get the blocks of `positions` now."""
        config = self.config
        free = len(self.blocks) - (config.watermark_blocks if self.running else 0)
        if found.blocks:
            free -= self.revived(found) - len(found.blocks)
        return positions <= free * config.block_size and len(self.slots) > 0

    def revived(self, found: Found) -> int:
        """Blocks of what was found that count as free until it is taken."""
        return sum(map(self.blocks.is_free, found.blocks)) if isinstance(self.blocks, BlockPool) else 0

    def admit(self, request: Request, found: Found, positions: int) -> None:
        """Give a waiting request a slot and the blocks of `positions`, those that it found among them."""
        self.waiting.remove(request)  # mostly the head, found at once
        self._places += 1
        request.place = self._places
        self.running.append(request)
        request.status = RUNNING
        (request.slot,) = self.slots.take(1)
        request.computed, request.blocks = found.tokens, []
        if found.blocks:
            assert isinstance(self.blocks, BlockPool)
            self.blocks.share(found.blocks)
            self._hand_over(request, found.blocks, shared=True)
        if missing := self.config.blocks_for(positions) - request.capacity // self.config.block_size:
            self._allocate(request, missing)
        if swapped := request.swapped_tokens:
            used = len(request.host_blocks)
            self.draft.copies.append(Copy(False, request.blocks[:used], request.host_blocks))
            self._drop_swapped(request)
        self.unused -= found.tokens
        request.chain, request.bought = found.chain, request.capacity
        request.context, request.recomputes = request.num_tokens, request.evictions > 0 and not swapped
        if swapped and swapped == request.context - 1:
            request.context = swapped  # nothing of it is left to compute: it decodes on
        recovered = 0 if swapped else min(found.tokens, request.frontier)
        shared = 0 if swapped else found.tokens - recovered
        self.draft.admitted.append(
            Admission(request.request_id, request.slot, request.evictions > 0, recovered, shared, swapped)
        )

    def release(self, request: Request, status: Status) -> None:
        """Return a request's blocks and slot; it has left its list, and decodes no more."""
        assert request.slot is not None
        if isinstance(self.blocks, BlockCount):
            self.blocks.add(request.capacity // self.config.block_size)
        else:
            self.blocks.give_back(request.blocks)
        self.slots.give_back([request.slot])
        self.unused -= request.capacity - request.computed
        request.frontier = max(request.frontier, request.computed)
        request.blocks, request.capacity, request.computed, request.chain = NONE, 0, 0, NONE
        request.slot, request.status = None, status

    def drop(self, request: Request) -> None:
        """An aborted request's blocks, of whichever pool, and its place."""
        if request.status is RUNNING:
            self.running.remove(request)
            self.leave(request)
            self.release(request, ABORTED)
        elif request.status is WAITING:
            self.waiting.remove(request)
            self._drop_swapped(request)
            request.status = ABORTED

    def release_spent(self) -> None:
        """A static batch has ended."""
        for request in self.spent:
            self.release(request, FINISHED)
        self.spent.clear()

    def learn(self, request: Request) -> None:
        """Make the full blocks of what a running request has computed findable."""
        assert isinstance(self.blocks, BlockPool)
        size, chain = self.config.block_size, request.chain
        for index in range(len(chain), request.num_computed // size):
            content = request.tokens[index * size : (index + 1) * size]
            chain.append(self.blocks.learn(request.blocks[index], chain[-1] if chain else 0, content))

    def _drop_swapped(self, request: Request) -> None:
        self.host.give_back(request.host_blocks)
        request.host_blocks, request.swapped_tokens = NONE, 0

    def _allocate(self, request: Request, count: int) -> None:
        if isinstance(self.blocks, BlockCount):
            self.blocks.take(count)
            self._widen(request, count)
        else:
            self._hand_over(request, self.blocks.take(count), shared=False)
        if request.pace is not STILL and request.capacity < request.length_limit - 1:
            self._grow_at[request.capacity + 1 - request.settled].append(request)

    def _hand_over(self, request: Request, blocks: list[int], *, shared: bool) -> None:
        assert request.slot is not None
        self.draft.table_updates.append(TableUpdate(request.slot, len(request.blocks), blocks, shared))
        request.blocks += blocks
        self._widen(request, len(blocks))

    def _widen(self, request: Request, blocks: int) -> None:
        request.capacity += blocks * self.config.block_size
        self.unused += blocks * self.config.block_size


def _in_order(requests: list[Request]) -> list[Request]:
    """Each once: a calendar may know of a request twice, if it lost its turn and came back."""
    if len(requests) > 1:
        return sorted(dict.fromkeys(requests), key=lambda request: request.place)
    return requests
