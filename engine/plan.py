"""What one iteration will do, decided by the scheduler and executed by a runner: no tensor in sight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that got a slot and blocks in this iteration."""

    request_id: str
    slot: int
    positions: int  # computed in this iteration
    rebuilt: int  # of these, whose K/V had existed before
    resumed: bool


@dataclass(frozen=True, slots=True)
class Eviction:
    """A running request that lost its blocks in this iteration. Sizes are as it left."""

    request_id: str
    slot: int
    cached_tokens: int  # positions whose K/V was dropped
    generated_tokens: int
    freed_blocks: int
    thrash: bool  # had not yet filled the block that its last admission bought


class TableUpdate(NamedTuple):
    """Blocks that a slot's block table gains, from index `first` on."""

    slot: int
    first: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward, in parallel columns: row i computes positions starts[i]..stops[i]-1 of slots[i]."""

    request_ids: Sequence[str]
    slots: Sequence[int]
    starts: Sequence[int]
    stops: Sequence[int]
    token_ids: Sequence[int]  # rows concatenated
    samplings: Sequence[Sampling]
    table_updates: Sequence[TableUpdate]  # to apply before the forward
    admitted: Sequence[Admission]
    evicted: Sequence[Eviction]

    @property
    def positions(self) -> int:
        """Positions that the forward computes, padding left out."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RunnerState:
    """What a runner keeps between iterations, for the audit.

    tables: block ids per slot. written: cell -> (request id, position) last written there since
    its block got its owner. latest: the same of the last forward alone. Both are empty if the
    runner was not asked to track writes.
    """

    tables: Sequence[Sequence[int]]
    written: Mapping[int, tuple[str, int]]
    latest: Mapping[int, tuple[str, int]]
    tracks_writes: bool
