"""The verdict of a result: whether texts were compared, what is promised, whether counters come out again."""

from __future__ import annotations

from typing import Any

from batchbench.report.document import Statement
from batchbench.results import Result
from batchbench.schema import MAY_DIFFER
from batchbench.sheets import escaped
from batchbench.timing import DEGENERATE_REPETITION, REPETITION_WINDOW
from batchbench.units import show_count

Pool = dict[str, Any]


def verdict(result: Result) -> tuple[Statement, ...]:
    """What is to be known before any figure is believed, the texts first."""
    pools = result.rows("pools")
    found = (_texts(pools), _numerics(pools), _degenerate(result), _counters(pools), _bill(pools))
    return tuple(statement for statement in found if statement is not None)


def _texts(pools: list[Pool]) -> Statement:
    first, requests = pools[0], show_count(pools[0]["requests"], "request")
    tokens = f"{first['collected_tokens']:,} tokens"
    digests = {pool["text_digest"] for pool in pools}
    if None in digests:
        return Statement(
            "caution",
            "No text was computed.",
            "These are the counters of a schedule without a model. They say what a pool costs; that eviction leaves "
            "texts alone is not shown here.",
        )
    if len(digests) > 1:
        return Statement(
            "bad",
            f"The texts differ: {len(digests)} different ones at {len(pools)} points.",
            "What the points took cannot be compared. A sweep refuses to write such a result, so it was not one that "
            "wrote this.",
        )
    if len(pools) == 1:
        return Statement(
            "caution",
            "The texts were compared with nothing.",
            f"There is one point, so that no other could differ from it. {tokens} of {requests}, {_digest(first)}.",
        )
    return Statement(
        "good",
        f"Identical texts at all {len(pools)} points.",
        f"Every one of the {tokens} of {requests} is the same at each point, token id by token id; {_digest(first)}.",
    )


def _digest(pool: Pool) -> str:
    return f"SHA-256 over the token ids: {escaped(pool['text_digest'])}"


def _numerics(pools: list[Pool]) -> Statement | None:
    if any(pool["numerics"] == "fast" for pool in pools):
        return Statement(
            "caution",
            "Numerics is fast.",
            "A request's bits may depend on what runs beside it. That texts agree is what happened here, not what is "
            "promised.",
        )
    return None


def _degenerate(result: Result) -> Statement | None:
    share = result.run.get("text_repetition")
    if not isinstance(share, float) or share <= DEGENERATE_REPETITION:
        return None
    return Statement(
        "caution",
        "The texts run in circles, so their identity proves little.",
        f"In the median text {share:.0%} of the tokens occur among the {REPETITION_WINDOW} before them "
        f"(limit {DEGENERATE_REPETITION:.0%}).",
    )


def _counters(pools: list[Pool]) -> Statement:
    if any(pool["counters"] == MAY_DIFFER for pool in pools):
        return Statement(
            "caution",
            "Counters may differ between runs.",
            "Requests arrived in real time, so who met whom depends on the machine's speed. What is counted here is "
            "of the first repetition.",
        )
    return Statement("good", "Counters are exact.", "Another run of the same scenario counts the same.")


def _bill(pools: list[Pool]) -> Statement | None:
    known = [pool for pool in pools if pool["recompute_fraction"] is not None and pool["preemptions"] is not None]
    if not known:
        return None
    worst = max(known, key=lambda pool: pool["recompute_fraction"])
    where = f"{worst['pool_blocks']} blocks" + (f", {escaped(worst['choices'])}" if worst["choices"] else "")
    if not any(pool["preemptions"] for pool in known):
        return Statement("plain", "Nobody was evicted at any point.", "Every pool was large enough for this workload.")
    if not worst["recompute_fraction"]:
        return Statement("plain", "Evictions recomputed nothing.", "What they cost is told below.")
    return Statement(
        "plain",
        f"Up to {worst['recompute_fraction']:.1%} of the positions went into requests that resumed.",
        f"At {where}: {worst['recomputed_tokens']:,} of {worst['forward_tokens']:,} positions, after "
        f"{show_count(worst['preemptions'], 'eviction')} of {show_count(worst['requests_preempted'], 'request')}.",
    )
