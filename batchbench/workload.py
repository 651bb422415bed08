"""From a declared workload to concrete requests, the same on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple

from batchbench.errors import ScenarioError, UsageError
from batchbench.lazy_prompts import RandomPrompt
from batchbench.prompts import load_prompts
from batchbench.protocol import RequestSpec, Sampling, Tokenizer
from batchbench.scenario import MAX_PROMPT_TOKENS, Workload


def build_requests(workload: Workload, tokenizer: Tokenizer | None = None) -> tuple[RequestSpec, ...]:
    """Requests r0, r1, ... in submission order, with seeded random prompts or with texts.

    tokenizer: the engine's, which texts need (`adapters.engine_tokenizer`). Raises UsageError if they have none, and
    ScenarioError for prompts that cannot be read or are too short.
    """
    nought = (0,) * len(workload.request_lengths)
    arrivals, priorities = workload.arrival_iterations or nought, workload.priorities or nought
    prompts = _random_prompts(workload) if workload.prompts is None else _texts(workload, tokenizer)
    sampling = None
    if workload.temperature:
        sampling = Sampling(workload.temperature, workload.top_k, workload.top_p, workload.sampling_seed)
    requests = tuple(
        RequestSpec(f"r{number}", prompt, output_tokens, arrival, sampling, priority)
        for number, (prompt, (_, output_tokens), arrival, priority) in enumerate(
            zip(prompts, workload.request_lengths, arrivals, priorities, strict=True)
        )
    )
    total = sum(request.prompt_tokens for request in requests)
    if total > MAX_PROMPT_TOKENS:
        raise ScenarioError(f"the prompts hold {total} tokens together, more than {MAX_PROMPT_TOKENS}")
    return requests


def workload_hash(requests: tuple[RequestSpec, ...]) -> str:
    """SHA-256 of the requests themselves, so that two spellings of one workload have one name."""
    rows = [
        [
            r.request_id,
            list(r.prompt),
            r.output_tokens,
            r.arrival,
            *(astuple(r.sampling) if r.sampling else ()),
            *((["priority", r.priority],) if r.priority else ()),
            *((["after", r.after, r.history_tokens],) if r.after else ()),
        ]
        for r in requests
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _random_prompts(workload: Workload) -> Iterator[Sequence[int]]:
    for number, (tokens, _) in enumerate(workload.request_lengths):
        assert tokens is not None
        yield RandomPrompt(f"batchbench prompt {workload.seed} {number}", tokens)


def _texts(workload: Workload, tokenizer: Tokenizer | None) -> Iterator[Sequence[int]]:
    """Texts in their order, from the first again when they run out.

    Where a request says its prompt_tokens, shorter texts are passed over and longer ones cut: the number is exact.
    """
    assert workload.prompts is not None
    if tokenizer is None:
        raise UsageError(f"prompts = {workload.prompts!r} needs the engine's tokenizer, and there is none")
    encoded = [tuple(tokenizer.encode(text)) for text in load_prompts(workload.prompts)]
    long_enough: dict[int, list[tuple[int, ...]]] = {}
    for number, (tokens, _) in enumerate(workload.request_lengths):
        least = tokens or 1
        if least not in long_enough:
            long_enough[least] = [ids for ids in encoded if len(ids) >= least]
        if not long_enough[least]:
            longest = max(map(len, encoded))
            raise ScenarioError(f"no prompt of {workload.prompts!r} has {least} tokens; the longest has {longest}")
        ids = long_enough[least][number % len(long_enough[least])]
        yield ids[:tokens]
