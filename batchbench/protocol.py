"""The seam: all that the harness knows of an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol

from batchbench.errors import OutcomeRefused

Choices = tuple[tuple[str, Any], ...]
"""What a point of a sweep changes of the engine: fields of EngineSettings and their values."""

WorkloadClock = Literal["iterations", "virtual", "wall"]
"""What arrivals are counted in: iterations, modelled seconds, or real ones."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: logits over `temperature` (above 0), of the `top_k` best (0: all), of the fewest of these
    whose probabilities reach `top_p`. The randomness may depend on seed, request and position, and on nothing else.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request of a workload: `output_tokens` tokens are generated, end-of-text ignored.

    arrival: on the workload's clock, in iterations or nanoseconds: since its start or, with `after`, since the last
    token of the request of that id. history_tokens: positions of what that request was told and said, which the run
    puts before `prompt`.
    """

    request_id: str
    prompt: Sequence[int]  # token ids; its length is cheap, the ids may be made when they are read
    output_tokens: int
    arrival: int = 0
    sampling: Sampling | None = None  # None: greedy
    priority: int = 0  # of the victim rule `priority`: the highest number gives way first
    after: str | None = None
    history_tokens: int = 0
    line: int | None = None  # of the trace that recorded it

    @property
    def prompt_tokens(self) -> int:
        """Positions of the whole prompt, the history included."""
        return self.history_tokens + len(self.prompt)


class Admission(NamedTuple):
    """A request that got a slot and blocks. Null: the engine does not report it."""

    request_id: str
    slot: int | None = None
    resumed: bool | None = None
    recovered_tokens: int | None = None  # positions of a resume that were found in the prefix cache
    shared_tokens: int | None = None  # positions found there that others had computed
    swapped_tokens: int | None = None  # positions copied back from the swap pool


class Prefill(NamedTuple):
    """A row that computed part of a prompt or of a resumed context."""

    request_id: str
    positions: int
    rebuilt_tokens: int  # of these, whose K/V had been computed before
    resumed: bool  # the context of a request whose K/V an eviction dropped


class Eviction(NamedTuple):
    """A running request that lost its blocks. Sizes are as it left. Null: not reported."""

    request_id: str
    slot: int | None = None
    cached_tokens: int | None = None  # positions whose K/V was dropped or swapped
    generated_tokens: int | None = None
    freed_blocks: int | None = None
    thrash: bool | None = None  # had not yet filled the block that its last admission bought
    reclaim: Literal["recompute", "swap"] | None = None  # what became of its K/V
    swap_full: bool | None = None  # it should have been swapped, but the swap pool had no room


_COUNTS = (
    "issued_tokens",
    "collected_tokens",
    "forward_tokens",
    "recomputed_tokens",
    "rebuilt_tokens",
    "padded_tokens",
    "prefill_rows",
    "recovered_tokens",
    "shared_tokens",
    "swapped_out_tokens",
    "swapped_in_tokens",
    "running",
    "waiting",
    "free_blocks",
    "unused_tokens",
    "copy_s",  # last: the only one that is no whole number
)
_WHOLE = frozenset((int, type(None)))


@dataclass(slots=True)  # not frozen, which would take several times as long to build
class IterationOutcome:
    """What one iteration did. Counters are exact; None means the engine cannot report it.

    issued_tokens: rows forwarded. collected_tokens: tokens that requests kept.
    preempted: ids of the requests evicted, in order. forward_tokens: positions the forward
    computed, padding left out; unreported, it is charged as one position per row, which is right
    for an iteration that only decodes. recomputed_tokens: positions of resumed rows.
    rebuilt_tokens: positions whose K/V had been computed before. began and paused: whose tokens begin to come with
    this iteration, and whose stop to come though they run; so the iterations of every token are known.
    Raises OutcomeRefused if the numbers contradict each other.
    """

    issued_tokens: int
    collected_tokens: int
    finished: tuple[str, ...] = ()
    preempted: tuple[str, ...] | None = ()
    forward_tokens: int | None = None
    recomputed_tokens: int | None = None
    rebuilt_tokens: int | None = None
    padded_tokens: int | None = None
    prefill_rows: int | None = None
    recovered_tokens: int | None = None  # positions that resumes found in the prefix cache
    shared_tokens: int | None = None  # positions found there that others had computed
    swapped_out_tokens: int | None = None  # positions copied to the swap pool
    swapped_in_tokens: int | None = None  # and back
    copy_s: float | None = None  # seconds inside the engine that these copies took
    prefills: tuple[Prefill, ...] | None = None
    admissions: tuple[Admission, ...] | None = None
    evictions: tuple[Eviction, ...] | None = None  # details of `preempted`, in the same order
    running: int | None = None  # requests, after the iteration
    waiting: int | None = None
    free_blocks: int | None = None
    began: tuple[str, ...] | None = None  # requests that got a token, and none in the iteration before
    paused: tuple[str, ...] | None = None  # that run and got none, but got one in the iteration before
    unused_tokens: int | None = None  # positions that running requests' blocks have room for and do not hold yet

    def __post_init__(self) -> None:
        if contradiction := self._contradiction():
            raise OutcomeRefused(contradiction)

    def _contradiction(self) -> str | None:
        """What is wrong, or None; built once per iteration, so a message is formatted only when it is needed."""
        counts = _counts(self)
        if not _WHOLE.issuperset(map(type, counts[:-1])) and (broken := _no_count(counts[:-1])):
            return broken
        if min(filter(None, counts), default=0) < 0:
            return next(f"{name} is {value}" for name, value in zip(_COUNTS, counts, strict=True) if (value or 0) < 0)
        rows, positions, evicted = self.issued_tokens, self.positions, self.preempted or ()
        if self.collected_tokens > rows:
            return f"{self.collected_tokens} tokens collected from {rows} rows"
        if positions < rows:
            return f"{rows} rows forwarded, but only {positions} positions"
        if (again := max(self.recomputed_tokens or 0, self.rebuilt_tokens or 0)) > positions:
            what = "recomputed" if again == self.recomputed_tokens else "rebuilt"
            why = " (one a row, for forward_tokens is not reported)" if self.forward_tokens is None else ""
            return f"{again} positions {what} of {positions} forwarded{why}"
        if self.recomputed_tokens is not None and (self.rebuilt_tokens or 0) > self.recomputed_tokens:
            return f"{self.rebuilt_tokens} positions rebuilt, of {self.recomputed_tokens} recomputed"
        if (self.prefill_rows or 0) > rows:
            return f"{self.prefill_rows} rows prefilled of {rows} forwarded"
        if len(self.finished) > self.collected_tokens:
            return f"{len(self.finished)} requests finished on {self.collected_tokens} tokens collected"
        if len(set(evicted)) < len(evicted):
            return f"a request is evicted twice in one iteration: {evicted}"
        if self.evictions is not None:
            ledger = tuple(event.request_id for event in self.evictions)
            if ledger != self.preempted:
                return f"the ledger evicts {ledger}, not {self.preempted}"
        return None

    @property
    def positions(self) -> int:
        """forward_tokens, or one position per row where the engine does not report it."""
        return self.issued_tokens if self.forward_tokens is None else self.forward_tokens


_counts = attrgetter(*_COUNTS)


def _no_count(counts: Sequence[Any]) -> str | None:
    """The first that is no whole number, in words."""
    for name, value in zip(_COUNTS, counts, strict=False):
        if value is not None and not _is_whole(value):
            return f"{name} is {value!r:.40}, which is no whole number"
    return None


def _is_whole(value: Any) -> bool:
    """Of Python or of a library's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def not_counts(values: Sequence[Any]) -> str | None:
    """The first that is no whole number from 0, in words."""
    if _WHOLE.issuperset(map(type, values)) and None not in values and min(values, default=0) >= 0:
        return None
    return next((f"{value!r:.40}" for value in values if not _is_whole(value) or value < 0), None)


class IterationEvents(NamedTuple):
    """What happened in one iteration of a batch, as an IterationOutcome says it. place: of the iteration, from 0."""

    place: int
    finished: Sequence[str]
    preempted: Sequence[str] = ()
    prefills: Sequence[Prefill] = ()
    admissions: Sequence[Admission] = ()
    evictions: Sequence[Eviction] = ()
    began: Sequence[str] = ()
    paused: Sequence[str] = ()


@dataclass(slots=True)
class IterationBatch:
    """Iterations one after the other, said at once: columns with a number for each, and events of those that have any.

    All that is not said of an iteration is 0, or follows from its events.
    """

    issued_tokens: Sequence[int]
    collected_tokens: Sequence[int]
    forward_tokens: Sequence[int]
    running: Sequence[int]  # after the iteration, as the next three
    waiting: Sequence[int]
    free_blocks: Sequence[int]
    unused_tokens: Sequence[int]
    events: Sequence[IterationEvents]

    def __len__(self) -> int:
        """Iterations."""
        return len(self.issued_tokens)


@dataclass(frozen=True, slots=True)
class Until:
    """How long a batch may go on: iterations of so many rows and positions cost so much, and the last one brings the
    sum to `left` or beyond.

    most: iterations at most. watched: requests that end it with the iteration in which one of them finishes.
    """

    left: int
    cost: Callable[[int, int], int]
    most: int
    watched: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """What a request generated. logit_gaps: at each token, the lead of the best over the second best, or None."""

    token_ids: tuple[int, ...]
    logit_gaps: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """An engine as it was built, for the record. Sizes in blocks, positions and bytes.

    model_hash: digest of the model's files, whatever they are called; None: the engine cannot say.
    reports: the fields of IterationOutcome that it never leaves None.
    weight_bytes: all weights. iteration_weight_bytes: those that every iteration reads whole.
    computes_text: false for a schedule without a model, whose token ids are all 0 and go into no table.
    numerics: `exact` if a request's bits do not depend on its company, `fast` if nothing is promised.
    numerics_detail: what computes them, in the engine's words.
    """

    engine: str
    model: str
    dtype: str
    device: str
    slots: int
    block_size: int
    pool_blocks: int
    model_hash: str | None = None
    kv_bytes_per_token: int | None = None
    weight_bytes: int | None = None
    iteration_weight_bytes: int | None = None
    watermark_blocks: int | None = None
    rules: str | None = None  # whose schedule
    victim: str | None = None
    admission: str | None = None  # what an admission buys
    admission_gate: str | None = None  # what must fit before a request is admitted
    token_budget: int | None = None  # positions per iteration; None: no limit, or not reported
    reclaim: str | None = None  # what becomes of a victim's K/V
    swap_blocks: int | None = None
    prefix_cache: bool | None = None
    batching: str | None = None
    computes_text: bool = True
    numerics: Literal["exact", "fast"] | None = None
    numerics_detail: str | None = None
    threads: int | None = None
    reports: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def pool_bytes(self) -> int | None:
        if self.kv_bytes_per_token is None:
            return None
        return self.pool_blocks * self.block_size * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a sweep: a pool, and what else of the engine differs from the scenario's, as (name, value)."""

    pool_blocks: int
    choices: Choices = ()

    @property
    def label(self) -> str:
        """The choices in words; empty if only the pool varies."""
        said = {True: "on", False: "off"}
        return ", ".join(f"{name} {said[value] if type(value) is bool else value}" for name, value in self.choices)

    @property
    def name(self) -> str:
        return f"pool {self.pool_blocks}" + (f", {self.label}" if self.choices else "")


class BenchEngine(Protocol):
    """An engine with one pool, from construction to close. All ids are the harness's."""

    def describe(self) -> EngineDescription: ...

    def check(self, request: RequestSpec) -> None:
        """Raise RequestRefused if the request could not run in this pool, even alone. A history is as good as known."""
        ...

    def submit(self, request: RequestSpec) -> None:
        """Queue a request, its history part of its prompt by now. Raises RequestRefused."""
        ...

    def step(self) -> IterationOutcome:
        """Run one iteration and say what it did."""
        ...

    def advance(self, until: Until) -> IterationBatch | None:
        """Run at least one iteration, and more at once. None, and nothing is run, if each takes a forward: then `step`.

        Who finishes is done with: there is no text to take.
        """
        ...

    @property
    def has_work(self) -> bool: ...

    def take(self, request_id: str) -> Text:
        """Hand over a finished request's text, once."""
        ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """An engine's text: its model's own token ids."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a prompt, with those that the model wants around every text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; what is no text becomes U+FFFD."""
        ...


class EngineFactory(Protocol):
    """Builds an engine whose KV pool has that many blocks."""

    def __call__(self, pool_blocks: int, /, **choices: Any) -> BenchEngine:
        """choices: fields of EngineSettings that differ from the scenario's. Raises UsageError."""
        ...


Clock = Callable[[], float]
"""Seconds on a clock that never goes back, such as `time.perf_counter`."""
