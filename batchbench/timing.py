"""One run of a workload through one pool: what happened, and every metric derived from it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import Any

from batchbench.errors import OutcomeRefused
from batchbench.protocol import EngineDescription, IterationOutcome, Point, RequestSpec, Text

_OF_VICTIMS = ("victim", "reclaim", "swap_blocks")
REPETITION_WINDOW = 64  # tokens before a token in which its repetition counts
REPETITION_TEXT = 32  # tokens that a text must have for its repetition to say anything
DEGENERATE_REPETITION = 0.75  # above: fewer than 16 distinct tokens of 64


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """An outcome, where it lies on the iteration clock, and the seconds spent inside the engine."""

    iteration: int
    outcome: IterationOutcome
    step_s: float


@dataclass(frozen=True)
class ContinuousTiming:
    """Raw record of a run, and the metrics as pure functions of it (docs/metrics.md).

    Latencies in iterations are deterministic. Latencies in seconds count the time inside the
    engine only: what the harness does between two iterations is nobody's latency.
    Raises OutcomeRefused if the iterations contradict each other.
    """

    engine: EngineDescription
    requests: tuple[RequestSpec, ...]
    iterations: tuple[IterationRecord, ...]
    texts: Mapping[str, Text]
    wall_s: float  # first submission to last token, the harness's own work included
    choices: tuple[tuple[str, Any], ...] = ()  # what the point of a sweep changed of the engine

    def __post_init__(self) -> None:
        check = SequenceCheck(self.requests)
        for record in self.iterations:
            check.add(record.iteration, record.outcome)

    # ---- counts -------------------------------------------------------------------------

    @property
    def pool_blocks(self) -> int:
        return self.engine.pool_blocks

    @property
    def point(self) -> Point:
        return Point(self.pool_blocks, self.choices)

    @cached_property
    def issued_tokens(self) -> int:
        """Rows forwarded."""
        return sum(r.outcome.issued_tokens for r in self.iterations)

    @cached_property
    def collected_tokens(self) -> int:
        """Tokens that requests kept."""
        return sum(r.outcome.collected_tokens for r in self.iterations)

    @cached_property
    def forward_tokens(self) -> int:
        """Positions computed, padding left out; an iteration that does not report it counts one per row."""
        return sum(r.outcome.positions for r in self.iterations)

    @cached_property
    def recomputed_tokens(self) -> int | None:
        """Positions of resumed rows: the whole context that a resumed request was forwarded with."""
        return self._recompute_counter("recomputed_tokens")

    @cached_property
    def rebuilt_tokens(self) -> int | None:
        """Positions whose K/V had been computed before."""
        return self._recompute_counter("rebuilt_tokens")

    @cached_property
    def padded_tokens(self) -> int | None:
        """Batch rows that carried no position."""
        return total(r.outcome.padded_tokens for r in self.iterations)

    @cached_property
    def prefill_rows(self) -> int | None:
        """Rows that computed a prompt or a resumed context."""
        return total(r.outcome.prefill_rows for r in self.iterations)

    @cached_property
    def recovered_tokens(self) -> int | None:
        """Positions that resumes found in the prefix cache instead of computing them again."""
        return total(r.outcome.recovered_tokens for r in self.iterations)

    @cached_property
    def shared_tokens(self) -> int | None:
        """Positions that requests found in the prefix cache because others had computed them."""
        return total(r.outcome.shared_tokens for r in self.iterations)

    @cached_property
    def swapped_tokens(self) -> int | None:
        """Positions whose K/V was copied to the swap pool."""
        return total(r.outcome.swapped_out_tokens for r in self.iterations)

    @cached_property
    def swapped_bytes(self) -> int | None:
        """Bytes copied to the swap pool and back, in whole blocks."""
        moved = 0
        for outcome in (r.outcome for r in self.iterations):
            if outcome.evictions is None or outcome.admissions is None or self.engine.kv_bytes_per_token is None:
                return None
            tokens = [e.cached_tokens for e in outcome.evictions if e.reclaim == "swap"]
            tokens += [a.swapped_tokens for a in outcome.admissions]
            if None in tokens:
                return None
            moved += sum(-(-count // self.engine.block_size) for count in tokens if count)
        return moved * self.engine.block_size * (self.engine.kv_bytes_per_token or 0)

    @property
    def copy_s(self) -> float | None:
        """Seconds inside the engine that the swap pool's copies took."""
        seconds = [r.outcome.copy_s for r in self.iterations]
        return None if None in seconds else math.fsum(s for s in seconds if s is not None)

    @cached_property
    def preempted_at(self) -> dict[str, tuple[int, ...]]:
        """Request id -> the iterations it was evicted in. Only requests that were."""
        at: dict[str, list[int]] = {}
        for record in self.iterations:
            for request_id in record.outcome.preempted or ():
                at.setdefault(request_id, []).append(record.iteration)
        return {request_id: tuple(iterations) for request_id, iterations in at.items()}

    @cached_property
    def preemptions(self) -> int | None:
        """Evictions, or None where the engine does not report them."""
        return total(None if r.outcome.preempted is None else len(r.outcome.preempted) for r in self.iterations)

    @cached_property
    def requests_preempted(self) -> int | None:
        """Requests evicted at least once."""
        return None if self.preemptions is None else len(self.preempted_at)

    @cached_property
    def thrashes(self) -> int | None:
        """Evictions of a request that had not yet filled the block that its last admission bought."""
        if not self.preemptions:
            return self.preemptions
        return total(
            None if r.outcome.evictions is None else total(e.thrash for e in r.outcome.evictions)
            for r in self.iterations
            if r.outcome.preempted
        )

    # ---- ratios -------------------------------------------------------------------------

    @property
    def waste_fraction(self) -> float:
        """1 - collected_tokens / issued_tokens; 0.0 for a run that issued nothing."""
        return 1.0 - self.collected_tokens / self.issued_tokens if self.issued_tokens else 0.0

    @property
    def occupancy(self) -> float:
        """issued_tokens / (slots x iterations that forwarded a row); not a number if none did."""
        busy = sum(r.outcome.issued_tokens > 0 for r in self.iterations)
        return self.issued_tokens / (self.engine.slots * busy) if busy else math.nan

    @property
    def utilization(self) -> float:
        """collected_tokens / (slots x iterations that forwarded a row): occupancy, less rows that gave no token."""
        return self.occupancy * (1.0 - self.waste_fraction)

    @property
    def recompute_fraction(self) -> float:
        """recomputed_tokens / forward_tokens; not a number where the engine does not report it."""
        return _ratio(self.recomputed_tokens, self.forward_tokens)

    @property
    def recompute_tax(self) -> float:
        """rebuilt_tokens / forward_tokens; not a number where the engine does not report it."""
        return _ratio(self.rebuilt_tokens, self.forward_tokens)

    @property
    def preemptions_per_request(self) -> float:
        """Evictions per request submitted; not a number where the engine does not report them."""
        return math.nan if self.preemptions is None else self.preemptions / len(self.requests)

    @property
    def recomputed_tokens_per_preemption(self) -> float:
        """Mean context that an eviction made the engine compute again; not a number if nobody was evicted."""
        if self.recomputed_tokens is None or not self.preemptions:
            return math.nan
        return self.recomputed_tokens / self.preemptions

    # ---- latency ------------------------------------------------------------------------

    @cached_property
    def finished_at(self) -> dict[str, int]:
        """Request id -> the iteration of its last token."""
        return {rid: r.iteration for r in self.iterations for rid in r.outcome.finished}

    @cached_property
    def latencies(self) -> dict[str, int]:
        """Finished request id -> iterations from its arrival to its last token, both included."""
        arrived = {request.request_id: request.arrival for request in self.requests}
        return {rid: at - arrived[rid] + 1 for rid, at in self.finished_at.items()}

    @cached_property
    def latencies_s(self) -> dict[str, float]:
        """Finished request id -> seconds inside the engine over the same iterations."""
        before = dict(
            zip(
                (r.iteration for r in self.iterations),
                accumulate((r.step_s for r in self.iterations), initial=0.0),
                strict=False,  # `before` has one more: the end
            )
        )
        step_s = {r.iteration: r.step_s for r in self.iterations}
        arrived = {request.request_id: request.arrival for request in self.requests}
        return {rid: before[at] + step_s[at] - before[arrived[rid]] for rid, at in self.finished_at.items()}

    @property
    def preempted_latencies(self) -> tuple[int, ...]:
        """Latencies, in iterations, of the finished requests that were evicted at least once."""
        return tuple(v for rid, v in self.latencies.items() if rid in self.preempted_at)

    @property
    def straight_through_latencies(self) -> tuple[int, ...]:
        """Latencies, in iterations, of the finished requests that were never evicted."""
        return tuple(v for rid, v in self.latencies.items() if rid not in self.preempted_at)

    @property
    def preempted_latencies_s(self) -> tuple[float, ...]:
        """As preempted_latencies, in measured seconds."""
        return tuple(v for rid, v in self.latencies_s.items() if rid in self.preempted_at)

    @property
    def straight_through_latencies_s(self) -> tuple[float, ...]:
        """As straight_through_latencies, in measured seconds."""
        return tuple(v for rid, v in self.latencies_s.items() if rid not in self.preempted_at)

    @property
    def preemption_latency_penalty(self) -> float:
        """Mean latency of the evicted over mean latency of the never evicted, in iterations.

        Contaminated: the victims are the youngest, which in a burst would have finished last anyway
        (the ratio overstates), and in a small pool the others wait longer too (it understates).
        `paired_latency_penalty` compares like with like.
        Nobody evicted: 1.0. Everybody evicted: not a number, since there is no control group. Nor
        where the engine does not report evictions.
        """
        return self._penalty(self.preempted_latencies, self.straight_through_latencies)

    @property
    def preemption_latency_penalty_s(self) -> float:
        """As preemption_latency_penalty, in measured seconds."""
        return self._penalty(self.preempted_latencies_s, self.straight_through_latencies_s)

    def paired_latency_ratios(self, reference: ContinuousTiming) -> dict[str, float]:
        """Request id -> its latency here over its latency in `reference`, in iterations."""
        return {rid: latency / reference.latencies[rid] for rid, latency in self.latencies.items()}

    def paired_latency_penalty(self, reference: ContinuousTiming) -> float:
        """Mean over the requests evicted here of the same request's latency here over that in `reference`.

        Nobody evicted here: 1.0. Evictions not reported: not a number.
        """
        if not self.preemptions:
            return math.nan if self.preemptions is None else 1.0
        ratios = self.paired_latency_ratios(reference)
        return mean([ratio for rid, ratio in ratios.items() if rid in self.preempted_at])

    # ---- text and time ------------------------------------------------------------------

    @property
    def engine_s(self) -> float:
        """Seconds spent inside the engine's iterations."""
        return math.fsum(r.step_s for r in self.iterations)

    @cached_property
    def text_digest(self) -> str | None:
        """SHA-256 over every request's id and token ids, in submission order; None if the engine computes no text."""
        if not self.engine.computes_text:
            return None
        lines = (f"{r.request_id}:{','.join(map(str, self.texts[r.request_id].token_ids))}\n" for r in self.requests)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @cached_property
    def text_repetition(self) -> float | None:
        """Median `repetition` over the texts of at least 32 tokens; None if there are none.

        Above DEGENERATE_REPETITION the texts run in circles, and two that are equal prove little: a loop survives
        much that would change other text.
        """
        if not self.engine.computes_text:
            return None
        long = [ids for text in self.texts.values() if len(ids := text.token_ids) >= REPETITION_TEXT]
        return median(map(repetition, long)) if long else None

    def _recompute_counter(self, name: str) -> int | None:
        """Sum a counter. Before the first eviction nothing can have been recomputed, reported or not."""
        counted, evicted = 0, False
        for record in self.iterations:
            evicted = evicted or record.outcome.preempted is None or bool(record.outcome.preempted)
            value = getattr(record.outcome, name)
            if value is None and evicted:
                return None
            counted += value or 0
        return counted

    def _penalty(self, victims: Sequence[float], control: Sequence[float]) -> float:
        if self.preemptions is None:
            return math.nan
        return mean(victims) / mean(control) if victims else 1.0


def reference_timing(timings: Sequence[ContinuousTiming], of: ContinuousTiming) -> ContinuousTiming | None:
    """The largest pool that is known to have evicted nobody, or None if there is none as large as that of `of`.

    Its other choices are those of `of`, but for those that matter only to the evicted.
    """

    def choices(timing: ContinuousTiming) -> dict[str, Any]:
        return {name: value for name, value in timing.choices if name not in _OF_VICTIMS}

    roomy = [timing for timing in timings if timing.preemptions == 0 and choices(timing) == choices(of)]
    largest = max(roomy, key=lambda timing: timing.pool_blocks, default=None)
    return largest if largest is not None and largest.pool_blocks >= of.pool_blocks else None


class SequenceCheck:
    """Refuses, with OutcomeRefused, an iteration that cannot follow those before it."""

    def __init__(self, requests: Iterable[RequestSpec]) -> None:
        self._arrival = {request.request_id: request.arrival for request in requests}
        self._finished: set[str] = set()
        self._running: set[str] | None = set()  # None once an iteration does not report admissions

    def add(self, iteration: int, outcome: IterationOutcome) -> None:
        """Evictions come first in an iteration, then admissions, then last tokens."""

        def refuse(request_id: str, why: str) -> OutcomeRefused:
            return OutcomeRefused(f"iteration {iteration}: {request_id!r} {why}")

        evicted, admissions = outcome.preempted or (), outcome.admissions
        self._running = None if admissions is None else self._running
        admitted = tuple(admission.request_id for admission in admissions or ())
        for request_id in (*evicted, *admitted, *outcome.finished):
            if request_id not in self._arrival:
                raise refuse(request_id, "was never submitted")
            if iteration < self._arrival[request_id]:
                raise refuse(request_id, f"is ahead of its arrival in iteration {self._arrival[request_id]}")
        for request_id in evicted:
            if request_id in self._finished:
                raise refuse(request_id, "is evicted after it finished")
            if self._running is not None and request_id not in self._running:
                raise refuse(request_id, "is evicted, but was not running")
        if self._running is not None:
            self._running.difference_update(evicted)
        for request_id in admitted:
            if self._running is not None and request_id in self._running:
                raise refuse(request_id, "is admitted, but was running")
            if self._running is not None:
                self._running.add(request_id)
        for request_id in outcome.finished:
            if request_id in self._finished:
                raise refuse(request_id, "finishes twice")
            if self._running is not None and request_id not in self._running:
                raise refuse(request_id, "finishes, but was not running")
            self._finished.add(request_id)
        if self._running is not None:
            self._running.difference_update(outcome.finished)


def repetition(token_ids: Sequence[int]) -> float:
    """Share of a text's tokens that occur among the 64 before them (rep/l of Welleck et al., 2020, with l = 64).

    Of a text of up to 64 tokens: 1 - distinct / length. Independent of length beyond that, unlike distinct / length,
    which falls for any text as it grows.
    """
    seen_at: dict[int, int] = {}
    repeated = 0
    for place, token in enumerate(token_ids):
        repeated += token in seen_at and place - seen_at[token] <= REPETITION_WINDOW
        seen_at[token] = place
    return repeated / len(token_ids)


def total(values: Iterable[int | None]) -> int | None:
    """Sum, or None if any is unreported."""
    listed = list(values)
    return None if None in listed else sum(v for v in listed if v is not None)


def _ratio(part: int | None, whole: int) -> float:
    if part is None:
        return math.nan
    return part / whole if whole else 0.0


def mean(values: Collection[float]) -> float:
    """Not a number for no values."""
    return math.fsum(values) / len(values) if values else math.nan
