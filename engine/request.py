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

    One counter serves prefill, decode, chunk and resume alike: `num_computed` (positions whose K/V is
    in the pool) catches up with `len(tokens)` (prompt and generated).
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    length_limit: int  # tokens, prompt included, at which the request is finished
    arrival: int  # submission order
    sampling: Sampling = GREEDY
    priority: int = 0  # of victims, the highest number goes first
    status: Status = Status.WAITING
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0  # positions that `blocks` hold; kept beside it because every iteration reads it
    num_computed: int = 0
    frontier: int = 0  # most positions ever computed
    context: int = 0  # tokens at the last admission: below it, positions are of a prompt or of a resumed context
    recomputes: bool = False  # and whether of a context whose K/V an eviction dropped
    bought: int = 0  # positions that the blocks of the last admission hold
    host_blocks: list[int] = field(default_factory=list)  # of the swap pool, while it is swapped out
    swapped_tokens: int = 0  # positions whose K/V is in them
    chain: list[int] = field(default_factory=list)  # serials of its full blocks, by content (prefix cache)
    evictions: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def missing(self) -> int:
        """Positions still to compute."""
        return len(self.tokens) - self.num_computed
