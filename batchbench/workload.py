"""From a declared workload to concrete requests, the same on every machine."""

from __future__ import annotations

import hashlib
import json
import random

from batchbench.protocol import RequestSpec
from batchbench.scenario import Workload


def build_requests(workload: Workload) -> tuple[RequestSpec, ...]:
    """Requests r0, r1, ... in submission order, with seeded random prompts."""
    arrivals = workload.arrival_iterations or (0,) * len(workload.request_lengths)
    return tuple(
        RequestSpec(f"r{number}", _prompt(workload.seed, number, prompt_tokens), output_tokens, arrival)
        for number, ((prompt_tokens, output_tokens), arrival) in enumerate(
            zip(workload.request_lengths, arrivals, strict=True)
        )
    )


def workload_hash(requests: tuple[RequestSpec, ...]) -> str:
    """SHA-256 of the requests themselves, so that two spellings of one workload have one name."""
    rows = [[r.request_id, list(r.prompt), r.output_tokens, r.arrival_iteration] for r in requests]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _prompt(seed: int, number: int, tokens: int) -> tuple[int, ...]:
    """Byte values, which are valid ids in the embedded model's vocabulary."""
    return tuple(random.Random(f"batchbench prompt {seed} {number}").randbytes(tokens))
