"""What one iteration will do, decided by the scheduler, and what a runner makes of it: no tensor in sight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from engine.sampling import Sampling


class Admission(NamedTuple):
    """A request that got a slot and blocks in this iteration, and what of its K/V was there already."""

    request_id: str
    slot: int
    resumed: bool
    recovered_tokens: int = 0  # positions below its frontier, found in the prefix cache
    shared_tokens: int = 0  # positions beyond its frontier, found there: another request's work
    swapped_tokens: int = 0  # positions copied back from the swap pool


class Prefill(NamedTuple):
    """A row that computed part of a prompt or of a resumed context."""

    request_id: str
    positions: int
    rebuilt_tokens: int  # of these, whose K/V had been computed before
    resumed: bool


class Eviction(NamedTuple):
    """A running request that lost its blocks in this iteration. Sizes are as it left."""

    request_id: str
    slot: int
    cached_tokens: int  # positions whose K/V was dropped or swapped
    generated_tokens: int
    freed_blocks: int
    thrash: bool  # had not yet filled the block that its last admission bought
    reclaim: Literal["recompute", "swap"] = "recompute"  # what became of its K/V
    swap_full: bool = False  # it should have, but there was no room


class TableUpdate(NamedTuple):
    """Blocks that a slot's block table gains, from index `first` on."""

    slot: int
    first: int
    blocks: Sequence[int]
    shared: bool = False  # they hold K/V already


class Copy(NamedTuple):
    """Whole blocks between the pool and the swap pool."""

    out: bool  # to the swap pool
    blocks: Sequence[int]
    host_blocks: Sequence[int]


class Plan(NamedTuple):
    """One forward, in parallel columns: row i computes positions starts[i]..stops[i]-1 of slots[i].

    A schedule without tokens leaves the columns empty, and says how much they would hold.
    """

    issued: int  # rows
    positions: int  # that the forward computes, padding left out
    kept: int  # rows whose sampled token is their request's next one
    copies: Sequence[Copy]  # to make before the forward, in this order
    table_updates: Sequence[TableUpdate]  # to apply before the forward
    prefills: Sequence[Prefill]
    admitted: Sequence[Admission]
    evicted: Sequence[Eviction]
    began: Sequence[str]  # who gets a token in this iteration and got none in the last
    paused: Sequence[str]  # who runs and got one in the last, but gets none in this
    request_ids: Sequence[str] = ()
    slots: Sequence[int] = ()
    starts: Sequence[int] = ()
    stops: Sequence[int] = ()
    token_ids: Sequence[int] = ()  # rows concatenated
    samplings: Sequence[Sampling] = ()
    keeps: Sequence[bool] = ()  # whether the row's sampled token is kept


class Write(NamedTuple):
    """What was written to a cell of the K/V store."""

    request_id: str
    position: int
    token_id: int


@dataclass(frozen=True, slots=True)
class RunnerState:
    """What a runner keeps between iterations, for the audit.

    tables: block ids per slot. written: by cell, the last write since its block got its owner, whose content it may
    have shared. latest: the writes of the last forward alone. Both are empty if the runner was not asked to track
    writes.
    """

    tables: Sequence[Sequence[int]]
    written: Mapping[int, Write]
    latest: Mapping[int, Write]
    tracks_writes: bool


@dataclass(frozen=True, slots=True)
class RunOutput:
    token_ids: list[int]  # one per row of the plan
    logit_gaps: list[float]  # lead of the best token over the second best in each row, in logits
    padded_tokens: int  # batch rows that carried no position
    copy_s: float = 0.0  # seconds that copies to and from the swap pool took


class Runner(Protocol):
    """Executes plans; the scheduler never sees what is behind it."""

    reads_tokens: bool  # false: it computes nothing, and plans need no rows

    def check(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Raise RequestRefused if the model could not run this request."""
        ...

    def execute(self, plan: Plan) -> RunOutput:
        """Compute the plan's positions and sample one token per row."""
        ...

    def state(self) -> RunnerState | None:
        """What the audit may look at."""
        ...


class NoRunner:
    """Computes nothing, and what is left is the schedule. Every row samples token 0; where tokens would be drawn, one
    that no other request has, since drawn texts part.

    reads_tokens: have plans with rows all the same.
    """

    def __init__(self, *, reads_tokens: bool = False) -> None:
        self.reads_tokens = reads_tokens
        self._own: dict[str, int] = {}  # request id -> the token that stands for all that are drawn for it

    def check(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        pass

    def execute(self, plan: Plan) -> RunOutput:
        tokens = [0] * len(plan.slots)
        for row, (request_id, how) in enumerate(zip(plan.request_ids, plan.samplings, strict=True)):
            if how.temperature:
                tokens[row] = self._own.setdefault(request_id, -1 - len(self._own))
        return RunOutput(tokens, [0.0] * len(tokens), 0)

    def state(self) -> None:
        return None
