"""One run of a workload through one pool: what happened, and every metric derived from it."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from statistics import median
from typing import Any

from batchbench.clocks import NS
from batchbench.protocol import Choices, EngineDescription, Point, RequestSpec, Text, WorkloadClock
from batchbench.recorder import Recorder

_OF_VICTIMS = ("victim", "reclaim", "swap_blocks")
REPETITION_WINDOW = 64  # tokens before a token in which its repetition counts
REPETITION_TEXT = 32  # tokens that a text must have for its repetition to say anything
DEGENERATE_REPETITION = 0.75  # above: fewer than 16 distinct tokens of 64


@dataclass(frozen=True)
class ContinuousTiming:
    """What a run left behind, and the metrics as pure functions of it (docs/metrics.md).

    Latencies in iterations are deterministic. Latencies in seconds are None for a schedule on the clock of iterations,
    which takes no time worth telling. On that clock seconds count the time inside the engine only: what the harness
    does between two iterations is nobody's latency.
    """

    engine: EngineDescription
    requests: tuple[RequestSpec, ...]
    record: Recorder
    texts: Mapping[str, Text]  # empty if the engine computes none
    wall_s: float  # first submission to last token, the harness's own work included
    choices: Choices = ()  # what the point of a sweep changed of the engine
    clock: WorkloadClock = "iterations"
    repetitions: tuple[Mapping[str, Any], ...] = ()  # what each measured, this one first; empty: never repeated

    # ---- counts -------------------------------------------------------------------------

    @property
    def pool_blocks(self) -> int:
        return self.engine.pool_blocks

    @property
    def point(self) -> Point:
        return Point(self.pool_blocks, self.choices)

    @property
    def issued_tokens(self) -> int:
        """Rows forwarded."""
        return self.record.issued

    @property
    def collected_tokens(self) -> int:
        """Tokens that requests kept."""
        return self.record.collected

    @property
    def forward_tokens(self) -> int:
        """Positions computed, padding left out; an iteration that does not report it counts one per row."""
        return self.record.positions

    @property
    def busy_iterations(self) -> int:
        """Iterations that forwarded a row."""
        return self.record.busy

    @property
    def recomputed_tokens(self) -> int | None:
        """Positions of resumed rows: the whole context that a resumed request was forwarded with."""
        return self.record.total("recomputed_tokens")

    @property
    def rebuilt_tokens(self) -> int | None:
        """Positions whose K/V had been computed before."""
        return self.record.total("rebuilt_tokens")

    @property
    def padded_tokens(self) -> int | None:
        """Batch rows that carried no position."""
        return self.record.total("padded_tokens")

    @property
    def prefill_rows(self) -> int | None:
        """Rows that computed a prompt or a resumed context."""
        return self.record.total("prefill_rows")

    @property
    def recovered_tokens(self) -> int | None:
        """Positions that resumes found in the prefix cache instead of computing them again."""
        return self.record.total("recovered_tokens")

    @property
    def shared_tokens(self) -> int | None:
        """Positions that requests found in the prefix cache because others had computed them."""
        return self.record.total("shared_tokens")

    @property
    def swapped_tokens(self) -> int | None:
        """Positions whose K/V was copied to the swap pool."""
        return self.record.total("swapped_out_tokens")

    @property
    def swapped_bytes(self) -> int | None:
        """Bytes copied to the swap pool and back, in whole blocks."""
        blocks, per_token = self.record.total("swapped_blocks"), self.engine.kv_bytes_per_token
        return None if blocks is None or per_token is None else blocks * self.engine.block_size * per_token

    @property
    def copy_s(self) -> float | None:
        """Seconds inside the engine that the swap pool's copies took."""
        return None if self.record.copy_s is None else math.fsum(self.record.copy_s)

    @cached_property
    def preempted_at(self) -> dict[str, tuple[int, ...]]:
        """Request id -> the iterations it was evicted in. Only requests that were."""
        at: dict[int, list[int]] = {}
        for place, iteration in zip(self.record.evictions.request, self.record.evictions.iteration, strict=True):
            at.setdefault(place, []).append(iteration)
        return {self.requests[place].request_id: tuple(iterations) for place, iterations in at.items()}

    @property
    def preemptions(self) -> int | None:
        """Evictions, or None where the engine does not report them."""
        return self.record.total("preemptions")

    @property
    def requests_preempted(self) -> int | None:
        """Requests evicted at least once."""
        return None if self.preemptions is None else len(self.preempted_at)

    @property
    def thrashes(self) -> int | None:
        """Evictions of a request that had not yet filled the block that its last admission bought."""
        return self.record.total("thrashes")

    # ---- the pool -----------------------------------------------------------------------

    @property
    def mean_used_blocks(self) -> float:
        """Blocks in use after an iteration, on average; not a number where the engine does not report it."""
        record = self.record
        if "free_blocks" in record.unsaid or not record.free_samples:
            return math.nan
        return self.pool_blocks - record.free_sum / record.free_samples

    @property
    def peak_used_blocks(self) -> int | None:
        """Most blocks in use after an iteration."""
        least = self.record.least_free
        return None if "free_blocks" in self.record.unsaid or least is None else self.pool_blocks - least

    @property
    def fragmentation(self) -> float:
        """Share of the positions of blocks in use that held nothing, over all iterations; not a number if unreported.

        Of requests that run: what waits for reuse in a prefix cache is not in use.
        """
        record = self.record
        used = self.pool_blocks * record.free_samples - record.free_sum
        if "free_blocks" in record.unsaid or "unused_tokens" in record.unsaid or not used:
            return math.nan
        return record.unused_sum / (used * self.engine.block_size)

    # ---- ratios -------------------------------------------------------------------------

    @property
    def waste_fraction(self) -> float:
        """1 - collected_tokens / issued_tokens; 0.0 for a run that issued nothing."""
        return 1.0 - self.collected_tokens / self.issued_tokens if self.issued_tokens else 0.0

    @property
    def occupancy(self) -> float:
        """issued_tokens / (slots x iterations that forwarded a row); not a number if none did."""
        busy = self.busy_iterations
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
    def latencies(self) -> dict[str, int]:
        """Request id -> iterations from its arrival to its last token, both included."""
        record = self.record
        times = zip(self.requests, record.arrived, record.finished, strict=True)
        return {r.request_id: end - start + 1 for r, start, end in times}

    @cached_property
    def latencies_s(self) -> dict[str, float]:
        """Request id -> seconds from its arrival to its last token; empty if no time was taken."""
        if not self.timed:
            return {}
        end_ns = self.end_ns_of(self.record.finished)
        times = zip(self.requests, self.record.arrival_ns, end_ns, strict=True)
        return {r.request_id: (end - start) / NS for r, start, end in times}

    @property
    def timed(self) -> bool:
        """Whether iterations have times."""
        return bool(self.record.end_ns)

    def end_ns_of(self, iterations: Sequence[int]) -> list[int]:
        """When these iterations ended, on the run's time."""
        return [self.record.end_ns[bisect_left(self.record.iterations, iteration)] for iteration in iterations]

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
        """As preempted_latencies, in seconds."""
        return tuple(v for rid, v in self.latencies_s.items() if rid in self.preempted_at)

    @property
    def straight_through_latencies_s(self) -> tuple[float, ...]:
        """As straight_through_latencies, in seconds."""
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
        """As preemption_latency_penalty, in seconds; not a number if no time was taken."""
        if not self.timed:
            return math.nan
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
    def engine_s(self) -> float | None:
        """Seconds that the iterations took, as the clock has it; None if no time was taken."""
        record = self.record
        return sum(map(sub, record.end_ns, record.start_ns)) / NS if self.timed else None

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


def _ratio(part: int | None, whole: int) -> float:
    if part is None:
        return math.nan
    return part / whole if whole else 0.0


def mean(values: Collection[float]) -> float:
    """Not a number for no values."""
    return math.fsum(values) / len(values) if values else math.nan
