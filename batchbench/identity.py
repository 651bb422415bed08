"""The proof that two runs produced the same text, token id by token id, or the same counts, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchbench.errors import CountsDiffer, TextsDiffer
from batchbench.recorder import SUMMED
from batchbench.timing import ContinuousTiming

_SHOWN = 8  # tokens of each continuation in the message


def require_repeated(reference: ContinuousTiming, other: ContinuousTiming, run: str) -> None:
    """Raise TextsDiffer, or CountsDiffer, unless two runs of one point wrote and counted the same.

    In real time only the texts must agree. run: which one `other` is, for the message.
    """
    require_same_texts(reference, other, run)
    if reference.clock == "wall":
        return
    for (name, want), (_, got) in zip(_counts(reference), _counts(other), strict=True):
        if want != got:
            raise CountsDiffer(
                f"counts differ, so there are no timings: {name} is {_said(got)} in {other.point.name}, {run}, and was "
                f"{_said(want)} in the first; with clock = {other.clock!r} every run must count the same"
            )


def _said(count: Any) -> str:
    return "unreported" if count is None else str(count)


def _counts(timing: ContinuousTiming) -> Iterator[tuple[str, Any]]:
    """Every counter of a run that no clock moves: sums first, then request by request."""
    record = timing.record
    for name in ("issued_tokens", "collected_tokens", "forward_tokens"):
        yield name, getattr(timing, name)
    yield "iterations", timing.busy_iterations
    for name in SUMMED:
        yield name, record.total(name)
    yield "peak_used_blocks", timing.peak_used_blocks
    yield "the sum of free_blocks", None if "free_blocks" in record.unsaid else record.free_sum
    yield "the sum of unused_tokens", None if "unused_tokens" in record.unsaid else record.unused_sum
    for request in timing.requests:
        yield f"preempted_at of {request.request_id!r}", timing.preempted_at.get(request.request_id, ())
        yield f"latency of {request.request_id!r}", timing.latencies[request.request_id]


def require_same_texts(reference: ContinuousTiming, other: ContinuousTiming, run: str = "") -> None:
    """Raise TextsDiffer at the first request, in submission order, whose token ids differ.

    run: which one `other` is, for the message, if both are of one point.
    """
    for request in reference.requests if reference.engine.computes_text else ():
        want = reference.texts[request.request_id].token_ids
        got = other.texts[request.request_id].token_ids
        if want != got:
            # Both have the request's length (the driver checked), so some token differs.
            at = next(i for i, pair in enumerate(zip(want, got, strict=True)) if pair[0] != pair[1])
            raise TextsDiffer(_describe(reference, other, request.request_id, at, run))


def _describe(reference: ContinuousTiming, other: ContinuousTiming, request_id: str, at: int, run: str) -> str:
    sides = "; ".join(
        f"{timing.point.name}{f', {which},' if which else ''} continues {_continuation(timing, request_id, at)} "
        f"(best two logits {_gap(timing, request_id, at)} apart, {_evictions(timing, request_id, at)})"
        for timing, which in ((reference, "first" if run else ""), (other, run))
    )
    promise = ""
    if reference.engine.numerics == "fast":
        promise = "; numerics is fast, under which texts may differ between pools; under exact they would not"
    return f"texts differ, so there are no timings: request {request_id!r}, generated token {at}: {sides}{promise}"


def _continuation(timing: ContinuousTiming, request_id: str, at: int) -> str:
    ids = timing.texts[request_id].token_ids[at:]
    more = f", ... {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"[{', '.join(map(str, ids[:_SHOWN]))}{more}]"


def _gap(timing: ContinuousTiming, request_id: str, at: int) -> str:
    gaps = timing.texts[request_id].logit_gaps
    return "an unreported distance" if gaps is None else f"{gaps[at]:.3g}"


def _evictions(timing: ContinuousTiming, request_id: str, at: int) -> str:
    """Whether the request was evicted before that token; its iterations where the engine says no more."""
    iterations = timing.preempted_at.get(request_id, ())
    if timing.preemptions is None:
        return "evictions unreported"
    if not iterations:
        return "never evicted"
    events, place = timing.record.evictions, timing.record.index[request_id]
    generated = [n for one, n in zip(events.request, events.number, strict=True) if one == place and n >= 0]
    if len(generated) < len(iterations):
        return f"evicted in iterations {', '.join(map(str, iterations))}"
    before, later = [n for n in generated if n <= at], [n for n in generated if n > at]
    parts = [
        f"evicted before it, at {', '.join(map(str, before))} generated tokens" if before else "not evicted before it"
    ]
    if later:
        parts.append(f"evicted later, at {', '.join(map(str, later))}")
    return ", ".join(parts)
