"""Many iterations of a schedule at once: what each did in columns, what happened in the few in which something did."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.plan import Admission, Eviction, Prefill
from engine.request import Request
from engine.scheduler import Scheduler


class Happened(NamedTuple):
    """What happened in the iteration at that place of a stretch."""

    place: int
    finished: Sequence[str]
    preempted: Sequence[str] = ()
    prefills: Sequence[Prefill] = ()
    admissions: Sequence[Admission] = ()
    evictions: Sequence[Eviction] = ()
    began: Sequence[str] = ()
    paused: Sequence[str] = ()


@dataclass(slots=True)
class Stretch:
    """Iterations one after the other. Columns have a number for each; those of a state are as it was after it."""

    issued_tokens: list[int] = field(default_factory=list)  # rows
    collected_tokens: list[int] = field(default_factory=list)
    forward_tokens: list[int] = field(default_factory=list)  # positions
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    free_blocks: list[int] = field(default_factory=list)
    unused_tokens: list[int] = field(default_factory=list)
    events: list[Happened] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.issued_tokens)


@dataclass(slots=True)
class Until:
    """How long a stretch may go on: for `most` iterations, and while `left` is above 0.

    An iteration of so many rows and positions takes its cost from `left`, which is above 0 where there are rows.
    watched: requests that end the stretch with the iteration in which one of them finishes.
    """

    left: int
    cost: Callable[[int, int], int]
    most: int
    watched: Collection[str] = ()

    def goes_on(self, stretch: Stretch) -> bool:
        return self.left > 0 and len(stretch.issued_tokens) < self.most

    def spend(self, amount: int, finished: Sequence[str]) -> None:
        self.left -= amount
        if self.watched and any(request_id in self.watched for request_id in finished):
            self.left = 0


def decide_one(scheduler: Scheduler, stretch: Stretch, until: Until) -> None:
    """One iteration as the rules decide it."""
    draft = scheduler.decide()
    finished = _names(scheduler, scheduler.settle())
    if finished or draft.admitted or draft.evicted or draft.prefills or draft.began or draft.paused:
        preempted = [eviction.request_id for eviction in draft.evicted]
        stretch.events.append(
            Happened(
                len(stretch),
                finished,
                preempted,
                draft.prefills,
                draft.admitted,
                draft.evicted,
                draft.began,
                draft.paused,
            )
        )
    stretch.issued_tokens.append(draft.issued)
    stretch.collected_tokens.append(draft.kept)
    stretch.forward_tokens.append(draft.positions)
    stretch.running.append(len(scheduler.running))
    stretch.waiting.append(len(scheduler.waiting))
    stretch.free_blocks.append(len(scheduler.blocks))
    stretch.unused_tokens.append(scheduler.unused)
    until.spend(until.cost(draft.issued, draft.positions), finished)


def glide(scheduler: Scheduler, stretch: Stretch, until: Until) -> bool:
    """Iterations in which requests decode, grow and finish, as long as the rules have nothing else to decide.

    Returns whether there was one.
    """
    begin = len(stretch.issued_tokens)
    while until.goes_on(stretch) and scheduler.glides() and _decode(scheduler, stretch, until):
        pass
    return len(stretch.issued_tokens) > begin


def _decode(scheduler: Scheduler, stretch: Stretch, until: Until) -> bool:
    """Until somebody finishes, and whether somebody did."""
    rows, decoding, running = scheduler.decoding + len(scheduler.spent), scheduler.decoding, len(scheduler.running)
    cost, free = until.cost(rows, rows), stretch.free_blocks
    first = len(free)
    most = min(until.most - first, -(-until.left // cost))
    finished = scheduler.coast(most, free, stretch.unused_tokens)
    count = len(free) - first
    stretch.issued_tokens += [rows] * count
    stretch.collected_tokens += [decoding] * count
    stretch.forward_tokens += [rows] * count
    stretch.running += [running] * count
    stretch.waiting += [len(scheduler.waiting)] * count
    names = _names(scheduler, finished)
    if finished:
        stretch.running[-1] = len(scheduler.running)
        stretch.events.append(Happened(len(free) - 1, names))
    until.spend(count * cost, names)
    return bool(finished)


def _names(scheduler: Scheduler, finished: Sequence[Request]) -> list[str]:
    """Who finished, and is forgotten: there is no text to take."""
    for request in finished:
        del scheduler.requests[request.request_id]
    return [request.request_id for request in finished]
