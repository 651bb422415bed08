"""Does anything leak, or change a text, over thousands of requests? Every mechanism in turn, under constant eviction.

Run with `make soak`. Each mechanism serves the same requests on the model `tiny`; the texts of a roomy pool are the
reference. The work is in two halves, each served to its last request. At half-time and at the end nobody runs, so what
is still allocated is kept for good. One line per mechanism, after it; exit code 1 on any breach.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.audit import audit
from engine.batch import Decoder
from engine.config import SchedulerConfig
from engine.core import Engine, Output
from engine.decoders import choose_decoder
from engine.errors import AuditError, EngineError
from engine.runner import ModelRunner
from engine.weights import tiny_model

REQUESTS, SLOTS, BLOCK_SIZE = 2000, 16, 8
LONGEST_PROMPT, LONGEST_OUTPUT = 72, 60
POOL_BLOCKS = 64  # half of what 16 average requests want at their end
SAMPLE_EVERY, AUDIT_EVERY = 16, 64  # iterations
MOST_RSS_GROWTH = 2**19  # bytes: allocators ask for pages, 16 KiB at most were seen; 300 bytes per iteration show
MOST_OBJECTS = 250  # blocks of Python's allocator: up to 85 were seen; one object kept per request is REQUESTS / 2

TIGHT_SWAP = {"reclaim": "swap", "swap_blocks": 12}  # some victims are swapped, the others recomputed
MECHANISMS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"reclaim": "swap", "swap_blocks": 96},
    "swap, a pool too small": TIGHT_SWAP,
    "prefix cache": {"prefix_cache": True},
    "chunks": {"token_budget": 24},
    "static": {"batching": "static"},
    "reserve output": {"admission": "reserve-output"},
    "vllm-v1": {"rules": "vllm-v1", "token_budget": 64},
    "vllm-v1, first chunk": {"rules": "vllm-v1", "token_budget": 24, "admission_gate": "first-chunk"},
    "sglang": {"rules": "sglang", "token_budget": 64},
    "prefix cache, swap and chunks": {"prefix_cache": True, "token_budget": 24, **TIGHT_SWAP},
    "vllm-v1, prefix cache and swap": {"rules": "vllm-v1", "token_budget": 64, "prefix_cache": True, **TIGHT_SWAP},
    "sglang, prefix cache and swap": {"rules": "sglang", "token_budget": 64, "prefix_cache": True, **TIGHT_SWAP},
}
EVICTS_NOBODY = ("reserve output",)


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the soak."""

    name: str
    prompt: list[int]
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What one mechanism did, and its breaches in words."""

    evictions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    recovered_tokens: int = 0
    seconds: float = 0.0
    rss_growth_bytes: int | None = None  # of the second half beyond the first; None where it cannot be read
    breaches: tuple[str, ...] = ()


def draw_jobs(count: int, seed: int = 0) -> list[Job]:
    """Ragged lengths; every third prompt begins with one of four common texts of three blocks."""
    draw = random.Random(seed)
    common = [[draw.randrange(256) for _ in range(3 * BLOCK_SIZE)] for _ in range(4)]
    jobs = []
    for number in range(count):
        prompt = [draw.randrange(256) for _ in range(draw.randint(1, LONGEST_PROMPT - 3 * BLOCK_SIZE))]
        if number % 3 == 0:
            prompt = draw.choice(common) + prompt
        jobs.append(Job(f"r{number}", prompt, draw.randint(1, LONGEST_OUTPUT)))
    return jobs


def build(decoder: Decoder, pool_blocks: int, **choices: Any) -> Engine:
    config = SchedulerConfig(SLOTS, pool_blocks, BLOCK_SIZE, **choices)
    return Engine(config, ModelRunner(decoder, config))


def roomy_texts(decoder: Decoder, jobs: Sequence[Job]) -> dict[str, Output]:
    """Every request's tokens and logit gaps from a pool in which nobody is evicted."""
    engine = build(decoder, SLOTS * -(-(LONGEST_PROMPT + LONGEST_OUTPUT) // BLOCK_SIZE))
    texts: dict[str, Output] = {}
    for job in jobs:
        engine.submit(job.name, job.prompt, job.output_tokens)
    while engine.has_work:
        step = engine.step()
        if step.evicted:
            raise RuntimeError(f"the roomy pool evicted {step.evicted[0].request_id!r}: it is no reference")
        texts.update((name, engine.take(name)) for name in step.finished)
    return texts


def soak(engine: Engine, jobs: Sequence[Job], want: Mapping[str, Output], *, evicts: bool | None = True) -> Outcome:
    """Serve `jobs` in two halves, taking texts as they finish. Returns the figures and every breach.

    evicts: whether there must be evictions, or must be none; None for either.
    """
    outcome, half = Outcome(), len(jobs) // 2
    breaches: list[str] = []
    began = time.perf_counter()
    peaks: list[int | None] = []
    kept = []
    for part in (jobs[:half], jobs[half:]):
        try:
            rss, wrong = _serve(engine, part, want, outcome)
        except EngineError as error:  # the audit's, or of an engine that can go no further
            outcome.breaches = (*breaches, str(error))
            return outcome
        if wrong:
            breaches.append(f"{len(wrong)} texts differ, the first of {wrong[0]!r}")
        breaches += leftovers(engine)
        gc.collect()
        peaks.append(rss)
        kept.append(sys.getallocatedblocks())
    outcome.seconds = time.perf_counter() - began
    if peaks[0] is not None and peaks[1] is not None:
        outcome.rss_growth_bytes = peaks[1] - peaks[0]
        if outcome.rss_growth_bytes > MOST_RSS_GROWTH:
            breaches.append(f"memory grew by {outcome.rss_growth_bytes / 2**20:.1f} MiB in the second half")
    if (grown := kept[1] - kept[0]) > MOST_OBJECTS:  # the known contents of the pool are there at half-time too
        breaches.append(f"{grown} Python objects more at the end than at half-time")
    if evicts not in (None, bool(outcome.evictions)):
        breaches.append(
            f"{outcome.evictions} evictions: {'proves nothing' if evicts else 'a reservation evicts nobody'}"
        )
    outcome.breaches = tuple(breaches)
    return outcome


def _serve(
    engine: Engine, jobs: Sequence[Job], want: Mapping[str, Output], outcome: Outcome
) -> tuple[int | None, list[str]]:
    """Serve to the last request. Returns the highest memory in use that was sampled, and whose text differs.

    Bursts of 1 to 24 arrive whenever fewer than SLOTS wait: the queue stays busy at every mechanism's own speed.
    """
    draw, submitted, iteration = random.Random(len(jobs)), 0, 0
    samples, wrong = [], []
    while submitted < len(jobs) or engine.has_work:
        if len(engine.scheduler.waiting) < SLOTS and submitted < len(jobs):
            for job in jobs[submitted : submitted + draw.randint(1, 24)]:
                engine.submit(job.name, job.prompt, job.output_tokens)
                submitted += 1
        step = engine.step()
        wrong += [name for name in step.finished if engine.take(name) != want[name]]
        outcome.evictions += len(step.evicted)
        outcome.recomputed_tokens += step.recomputed_tokens
        outcome.swapped_tokens += step.swapped_out_tokens
        outcome.recovered_tokens += step.recovered_tokens
        if iteration % SAMPLE_EVERY == 0:
            samples.append(rss_bytes())
        if iteration % AUDIT_EVERY == 0:
            audit(engine.scheduler, engine.runner.state())
        iteration += 1
    known = [sample for sample in samples if sample is not None]
    return max(known, default=None), wrong


def leftovers(engine: Engine) -> list[str]:
    """What a drained engine has not given back: requests, and (by the audit) blocks, slots, contents, swap blocks."""
    scheduler, found = engine.scheduler, []
    for name in ("requests", "waiting", "running", "spent"):
        if left := len(getattr(scheduler, name)):
            found.append(f"{left} requests are left in `{name}`")
    try:
        audit(scheduler, engine.runner.state())
    except AuditError as error:
        found.append(str(error))
    return found


def rss_bytes() -> int | None:
    """Resident memory of this process; None where the system does not say."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def line(name: str, outcome: Outcome) -> str:
    grown = outcome.rss_growth_bytes
    rss = "   not read" if grown is None else f"{grown / 2**20:+7.2f} MiB"
    verdict = "; ".join(outcome.breaches) or "whole"
    return (
        f"{name:31}{outcome.evictions:>8}{outcome.recomputed_tokens:>12}{outcome.swapped_tokens:>9}"
        f"{outcome.recovered_tokens:>10}{outcome.seconds:>8.1f} s{rss:>13}  {verdict}"
    )


def main() -> int:
    torch.set_num_threads(1)
    decoder = choose_decoder(tiny_model(0, torch.float32, torch.device("cpu")))
    jobs = draw_jobs(REQUESTS)
    want = roomy_texts(decoder, jobs)
    print(
        f"{REQUESTS} requests, {SLOTS} slots, {POOL_BLOCKS} blocks of {BLOCK_SIZE}; `grown`: memory of the second half"
    )
    print(f"{'':31}{'evicted':>8}{'recomputed':>12}{'swapped':>9}{'recovered':>10}{'time':>10}{'grown':>13}")
    clean = True
    for name, choices in MECHANISMS.items():
        outcome = soak(build(decoder, POOL_BLOCKS, **choices), jobs, want, evicts=name not in EVICTS_NOBODY)
        print(line(name, outcome), flush=True)
        clean = clean and not outcome.breaches
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
