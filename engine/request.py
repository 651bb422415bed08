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


# By these names, since a member of an enumeration takes Python 3.11 four times as long to find.
WAITING, RUNNING, FINISHED, ABORTED = Status


class Pace:
    """How many tokens each of the requests that keep it has got since it began."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


STILL = Pace()  # of the others: it never moves
NONE: list[int] = []  # shared by all that have none, since very many may wait; never changed in place


def _none() -> list[int]:
    return NONE


@dataclass(slots=True, eq=False)
class Request:
    """A request from submission until its tokens are taken.

    One counter serves prefill, decode, chunk and resume alike: `num_computed` (positions whose K/V is in the pool)
    catches up with `num_tokens` (prompt and generated). Who decodes gets a token in every iteration, so its numbers
    are read off the pace of all who decode, and nobody touches it in between.
    """

    request_id: str
    prompt_tokens: int
    length_limit: int  # tokens, prompt included, at which the request is finished
    arrival: int  # submission order
    settled: int  # num_tokens, less the pace's
    tokens: list[int] = field(default_factory=_none)  # prompt and generated; empty where nobody reads them
    sampling: Sampling = GREEDY
    priority: int = 0  # of victims, the highest number goes first
    status: Status = Status.WAITING
    pace: Pace = STILL
    place: int = 0  # running requests are in this order
    slot: int | None = None
    blocks: list[int] = field(default_factory=_none)
    capacity: int = 0  # positions that `blocks` hold; kept beside it because every iteration reads it
    computed: int = 0  # num_computed, while it does not decode
    frontier: int = 0  # most positions ever computed
    context: int = 0  # tokens at the last admission: below it, positions are of a prompt or of a resumed context
    recomputes: bool = False  # and whether of a context whose K/V an eviction dropped
    bought: int = 0  # positions that the blocks of the last admission hold
    host_blocks: list[int] = field(default_factory=_none)  # of the swap pool, while it is swapped out
    swapped_tokens: int = 0  # positions whose K/V is in them
    chain: list[int] = field(default_factory=_none)  # serials of its full blocks, by content (prefix cache)
    evictions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated, the one about to be fed included."""
        return self.settled + self.pace.now

    @property
    def num_computed(self) -> int:
        """Positions whose K/V is in the pool."""
        return self.computed if self.pace is STILL else self.settled + self.pace.now - 1

    @property
    def missing(self) -> int:
        """Positions still to compute."""
        return self.num_tokens - self.num_computed

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]
