"""One request's state, as the scheduler keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.sampling import GREEDY, Sampling


class Status(Enum):
    WAITING = "waiting"  # never admitted, or evicted and not yet back
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Request:
    """A request from submission until its tokens are taken.

    One counter serves prefill, decode and resume alike: `num_computed` (positions whose K/V is
    in the pool) catches up with `len(tokens)` (prompt and generated).
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    length_limit: int  # tokens, prompt included, at which the request is finished
    arrival: int  # submission order
    sampling: Sampling = GREEDY
    status: Status = Status.WAITING
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0  # positions that `blocks` hold; kept beside it because every iteration reads it
    num_computed: int = 0
    frontier: int = 0  # most positions ever computed, before any eviction
    admitted_capacity: int = 0  # positions that the blocks of the last admission hold
    evictions: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]
