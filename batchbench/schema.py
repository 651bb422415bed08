"""Every table's columns: name, type, unit and meaning. docs/metrics.md is generated from here."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 3

COUNT, INDEX, RATIO = pa.int64(), pa.int64(), pa.float64()
_NAME = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True, slots=True)
class Column:
    """`nullable`: when the value is null, in words; empty for a column that never is."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    null_when: str = ""


_UNREPORTED = "the engine does not report it"
_NO_TEXT = "the engine computes no text"
_EVICTIONS = "the engine does not report evictions"
_RECOMPUTE = "the engine does not report it, unless it is known that nobody was evicted: then it is 0"
_POINT = Column("point", INDEX, "", "place of the point in the sweep, from 0")
_POOL = Column("pool_blocks", COUNT, "blocks", "size of the KV pool")
_CHOICES = Column("choices", _NAME, "", "what else the point changes of the engine; empty if only the pool varies")
_NUMERICS = Column(
    "numerics",
    _NAME,
    "",
    "`exact`: a request's bits do not depend on its company; `fast`: nothing is promised",
    "the engine does not say",
)
_CLOCK = Column(
    "clock", _NAME, "", "what seconds are: `iterations` (inside the engine), `virtual` (modelled) or `wall`"
)
MAY_DIFFER = "may differ between runs"
REPEATED_COUNTERS = ("preemptions", "recomputed_tokens", "rebuilt_tokens", "forward_tokens", "iterations")
POINT_COLUMNS = (_POINT, _POOL, _CHOICES, _NUMERICS)  # lead every table
_UNTIMED = "a schedule on the clock of iterations takes no time"
ONE_TOKEN = "it has one token"  # the only reason for which single requests lack a value that others have
_NOT_TOLD = "the engine does not tell whose tokens come"
_NO_REFERENCE = "there is no reference pool: none as large as this one is known to have evicted nobody"
_NO_SLO = "the scenario has no [slo], or its times are not known"
_REQUEST = Column("request_id", pa.string(), "", "request, in submission order r0, r1, ...")
_ITERATION = Column("iteration", INDEX, "iteration", "place on the iteration clock, from 0")
_SLOT = Column("slot", INDEX, "slot", "row of the forward that the request had", _UNREPORTED)

POOLS = (
    *POINT_COLUMNS,
    Column("pool_bytes", COUNT, "bytes", "size of the KV pool", _UNREPORTED),
    Column("slots", COUNT, "rows", "rows that a forward can have"),
    Column("block_size", COUNT, "positions", "positions in a block"),
    Column("watermark_blocks", COUNT, "blocks", "blocks that admission leaves free while others run", _UNREPORTED),
    Column("rules", _NAME, "", "whose schedule", _UNREPORTED),
    Column("victim", _NAME, "", "who gives way when the pool is short", _UNREPORTED),
    Column("admission", _NAME, "", "positions whose blocks an admission buys", _UNREPORTED),
    Column("admission_gate", _NAME, "", "what must fit before a request is admitted", _UNREPORTED),
    Column(
        "token_budget", COUNT, "positions", "most positions of an iteration", "there is no limit, or " + _UNREPORTED
    ),
    Column("reclaim", _NAME, "", "what becomes of a victim's K/V", _UNREPORTED),
    Column("swap_blocks", COUNT, "blocks", "size of the swap pool", _UNREPORTED),
    Column("prefix_cache", pa.bool_(), "", "whether blocks of equal content are shared", _UNREPORTED),
    Column("batching", _NAME, "", "`continuous` or `static`", _UNREPORTED),
    _CLOCK,
    Column(
        "counters",
        _NAME,
        "",
        f"`exact`: another run counts the same. Under the clock `wall`, `{MAY_DIFFER}`: then what is counted, here and "
        "in other tables, is the first repetition's",
    ),
    Column("repetitions", COUNT, "runs", "runs that were measured; seconds here are the first one's"),
    Column("requests", COUNT, "requests", "requests submitted"),
    Column("iterations", COUNT, "iterations", "iterations that forwarded a row"),
    Column(
        "floor_iterations",
        COUNT,
        "iterations",
        "no schedule can need fewer: longest output, rows over slots, and, unless blocks are shared, block-iterations "
        "over the pool",
    ),
    Column("occupancy", RATIO, "1", "issued_tokens / (slots x iterations)"),
    Column("utilization", RATIO, "1", "collected_tokens / (slots x iterations)"),
    Column("issued_tokens", COUNT, "rows", "rows forwarded"),
    Column("collected_tokens", COUNT, "tokens", "tokens that requests kept"),
    Column("waste_fraction", RATIO, "1", "1 - collected_tokens / issued_tokens"),
    Column(
        "forward_tokens",
        COUNT,
        "positions",
        "positions that the forwards computed, padding left out; unreported, one per row",
    ),
    Column("padded_tokens", COUNT, "positions", "batch rows that carried no position", _UNREPORTED),
    Column("prefill_rows", COUNT, "rows", "rows that computed a prompt or a resumed context", _UNREPORTED),
    Column(
        "recomputed_tokens",
        COUNT,
        "positions",
        "positions of resumed rows: the whole context of a resumed request, its newest token included",
        _RECOMPUTE,
    ),
    Column("rebuilt_tokens", COUNT, "positions", "positions whose K/V had been computed before", _RECOMPUTE),
    Column("recompute_fraction", RATIO, "1", "recomputed_tokens / forward_tokens", _RECOMPUTE),
    Column("recompute_tax", RATIO, "1", "rebuilt_tokens / forward_tokens", _RECOMPUTE),
    Column("recovered_tokens", COUNT, "positions", "positions that resumes found in the prefix cache", _UNREPORTED),
    Column("shared_tokens", COUNT, "positions", "positions found there that other requests had computed", _UNREPORTED),
    Column("swapped_tokens", COUNT, "positions", "positions whose K/V was copied to the swap pool", _UNREPORTED),
    Column("swapped_bytes", COUNT, "bytes", "copied to the swap pool and back, in whole blocks", _UNREPORTED),
    Column("copy_s", pa.float64(), "s", "time inside the engine that these copies took", _UNREPORTED),
    Column("preemptions", COUNT, "evictions", "evictions of running requests", _EVICTIONS),
    Column("preemptions_per_request", RATIO, "evictions/request", "preemptions / requests", _EVICTIONS),
    Column("requests_preempted", COUNT, "requests", "requests evicted at least once", _EVICTIONS),
    Column(
        "thrashes",
        COUNT,
        "evictions",
        "evictions of a request that had not yet filled the block its last admission bought",
        _RECOMPUTE,
    ),
    Column(
        "recomputed_tokens_per_preemption",
        RATIO,
        "positions/eviction",
        "recomputed_tokens / preemptions",
        "nobody was evicted, or the engine does not report it",
    ),
    Column("mean_latency_iterations", RATIO, "iterations", "mean latency of all requests"),
    Column("max_latency_iterations", COUNT, "iterations", "longest latency of any request"),
    Column(
        "preempted_latency_iterations",
        RATIO,
        "iterations",
        "mean latency of the requests evicted at least once",
        "nobody was evicted, or " + _EVICTIONS,
    ),
    Column(
        "straight_through_latency_iterations",
        RATIO,
        "iterations",
        "mean latency of the requests never evicted",
        "everybody was evicted, or " + _EVICTIONS,
    ),
    Column(
        "preemption_latency_penalty",
        RATIO,
        "1",
        "preempted over straight-through latency, in iterations; 1 if nobody was evicted. Contaminated: "
        "the victims are the youngest, and the others wait longer in a small pool too",
        "everybody was evicted, so that there is no control group, or " + _EVICTIONS,
    ),
    Column(
        "preemption_latency_penalty_s",
        RATIO,
        "1",
        "the same in seconds",
        f"everybody was evicted, so that there is no control group, {_UNTIMED}, or {_EVICTIONS}",
    ),
    Column(
        "paired_latency_penalty",
        RATIO,
        "1",
        "mean over the requests evicted here of their latency here over their own latency in the "
        "reference pool, in iterations; 1 if nobody was evicted",
        _NO_REFERENCE,
    ),
    Column(
        "reference_pool_blocks",
        COUNT,
        "blocks",
        "the reference pool: the largest that evicted nobody, of the same choices but for those of victims alone",
        _NO_REFERENCE,
    ),
    Column(
        "worst_paired_latency_ratio",
        RATIO,
        "1",
        "the same of the request that lost most: the largest ratio of any request",
        _NO_REFERENCE,
    ),
    *(
        Column(
            f"victims_{part}_iterations",
            RATIO,
            "iterations",
            f"mean over the requests evicted here of what {what} adds to their latency in the reference pool",
            f"nobody was evicted, {_NO_REFERENCE}, or {_NOT_TOLD}",
        )
        for part, what in (
            ("extra", "everything"),
            ("queued", "waiting longer for the first admission"),
            ("returning", "waiting to return after evictions"),
            ("rebuilding", "computing contexts again without a new token"),
            ("decoding", "decoding slower"),
        )
    ),
    Column("share_preempted", RATIO, "1", "requests_preempted / requests", _EVICTIONS),
    Column(
        "preemptions_per_victim",
        RATIO,
        "evictions/request",
        "preemptions / requests_preempted",
        "nobody was evicted, or " + _EVICTIONS,
    ),
    Column("most_preemptions", COUNT, "evictions", "evictions of the request that was evicted most", _EVICTIONS),
    Column("mean_used_blocks", RATIO, "blocks", "in use after an iteration, on average", _UNREPORTED),
    Column("peak_used_blocks", COUNT, "blocks", "most in use after an iteration", _UNREPORTED),
    Column(
        "fragmentation",
        RATIO,
        "1",
        "share of the positions of blocks in use that held nothing, over all iterations",
        "nothing was in use, or " + _UNREPORTED,
    ),
    Column("collected_per_iteration", RATIO, "tokens/iteration", "collected_tokens / iterations"),
    Column("forward_per_iteration", RATIO, "positions/iteration", "forward_tokens / iterations"),
    Column("duration_s", pa.float64(), "s", "from the first arrival to the last token, as the clock has it", _UNTIMED),
    Column("collected_per_s", RATIO, "tokens/s", "collected_tokens / duration_s", _UNTIMED),
    Column("forward_per_s", RATIO, "positions/s", "forward_tokens / duration_s", _UNTIMED),
    Column("goodput_requests", COUNT, "requests", "requests that kept every objective of [slo]", _NO_SLO),
    Column("goodput_fraction", RATIO, "1", "goodput_requests / requests", _NO_SLO),
    Column("goodput_per_s", RATIO, "requests/s", "goodput_requests / duration_s", _NO_SLO),
    Column("engine_s", pa.float64(), "s", "time of the iterations, as the clock has it", _UNTIMED),
    Column("wall_s", pa.float64(), "s", "time from first submission to last token, harness included"),
    Column("text_digest", pa.string(), "", "SHA-256 over all requests' token ids; equal at every point", _NO_TEXT),
)

REQUESTS = (
    *POINT_COLUMNS,
    _REQUEST,
    Column("prompt_tokens", COUNT, "tokens", "length of the prompt"),
    Column("output_tokens", COUNT, "tokens", "tokens generated"),
    Column("arrival_iteration", INDEX, "iteration", "iteration in which it arrived"),
    Column("finished_iteration", INDEX, "iteration", "iteration of its last token"),
    Column("arrival_s", pa.float64(), "s", "when it arrived, since the run began", _UNTIMED),
    Column("latency_iterations", COUNT, "iterations", "arrival to last token, both iterations included"),
    Column("latency_s", pa.float64(), "s", "time from its arrival to the end of its last token's iteration", _UNTIMED),
    Column(
        "ttft_iterations",
        COUNT,
        "iterations",
        "arrival to first token, both included; evictions do not restart it",
        _NOT_TOLD,
    ),
    Column(
        "ttft_s", pa.float64(), "s", "time from its arrival to the end of that iteration", f"{_NOT_TOLD}, or {_UNTIMED}"
    ),
    Column(
        "tpot_iterations",
        RATIO,
        "iterations/token",
        "first to last token, over output_tokens - 1",
        f"{ONE_TOKEN}, or {_NOT_TOLD}",
    ),
    Column("tpot_s", pa.float64(), "s/token", "the same in seconds", f"{ONE_TOKEN}, {_NOT_TOLD}, or {_UNTIMED}"),
    Column("queued_iterations", COUNT, "iterations", "from arrival to first admission", _UNREPORTED),
    Column("returning_iterations", COUNT, "iterations", "from evictions to resumes, waiting", _UNREPORTED),
    Column(
        "rebuilding_iterations",
        COUNT,
        "iterations",
        "after resumes, until the one that brings a new token",
        _UNREPORTED,
    ),
    Column(
        "decoding_iterations",
        COUNT,
        "iterations",
        "the rest of the latency: its prompt, and one for each token",
        _UNREPORTED,
    ),
    Column(
        "queued_s",
        pa.float64(),
        "s",
        "from its arrival to the iteration of its first admission",
        f"{_UNTIMED}, or {_UNREPORTED}",
    ),
    Column("returning_s", pa.float64(), "s", "from evictions to resumes, waiting", f"{_UNTIMED}, or {_UNREPORTED}"),
    Column(
        "rebuilding_s",
        pa.float64(),
        "s",
        "after resumes, the iteration that brings a new token included",
        f"{_UNTIMED}, or {_UNREPORTED}",
    ),
    Column("decoding_s", pa.float64(), "s", "the rest of the latency", f"{_UNTIMED}, or {_UNREPORTED}"),
    Column("meets_slo", pa.bool_(), "", "whether it kept every objective of [slo]", _NO_SLO),
    Column("preemptions", COUNT, "evictions", "times it was evicted", _EVICTIONS),
    Column("recomputed_tokens", COUNT, "positions", "positions of its resumed rows", _UNREPORTED),
    Column("rebuilt_tokens", COUNT, "positions", "of these, whose K/V had been computed before", _UNREPORTED),
    Column("recovered_tokens", COUNT, "positions", "found by its resumes in the prefix cache", _UNREPORTED),
    Column("swapped_tokens", COUNT, "positions", "copied back to it from the swap pool", _UNREPORTED),
    Column(
        "paired_latency_ratio",
        RATIO,
        "1",
        "its latency here over its latency in the reference pool, in iterations",
        _NO_REFERENCE,
    ),
)

ITERATIONS = (
    *POINT_COLUMNS,
    _ITERATION,
    Column("issued_tokens", COUNT, "rows", "rows forwarded"),
    Column("collected_tokens", COUNT, "tokens", "tokens that requests kept"),
    Column("forward_tokens", COUNT, "positions", "positions computed, padding left out", _UNREPORTED),
    Column("padded_tokens", COUNT, "positions", "batch rows that carried no position", _UNREPORTED),
    Column("prefill_rows", COUNT, "rows", "rows that computed a prompt or a resumed context", _UNREPORTED),
    Column("recomputed_tokens", COUNT, "positions", "positions of resumed rows", _UNREPORTED),
    Column("rebuilt_tokens", COUNT, "positions", "positions whose K/V had been computed before", _UNREPORTED),
    Column("swapped_out_tokens", COUNT, "positions", "copied to the swap pool before the forward", _UNREPORTED),
    Column("swapped_in_tokens", COUNT, "positions", "and back", _UNREPORTED),
    Column("preemptions", COUNT, "evictions", "evictions before the forward", _EVICTIONS),
    Column("finished", COUNT, "requests", "requests that got their last token"),
    Column("running", COUNT, "requests", "running after the iteration", _UNREPORTED),
    Column("waiting", COUNT, "requests", "waiting after the iteration", _UNREPORTED),
    Column("free_blocks", COUNT, "blocks", "free after the iteration", _UNREPORTED),
    Column(
        "unused_tokens", COUNT, "positions", "of running requests' blocks, room that holds nothing yet", _UNREPORTED
    ),
    Column("step_s", pa.float64(), "s", "time of the iteration, as the clock has it", _UNTIMED),
)

ADMISSIONS = (
    *POINT_COLUMNS,
    _ITERATION,
    _REQUEST,
    _SLOT,
    Column("resumed", pa.bool_(), "", "whether it had been evicted before", _UNREPORTED),
    Column("recovered_tokens", COUNT, "positions", "of a resume, found in the prefix cache", _UNREPORTED),
    Column("shared_tokens", COUNT, "positions", "found there, computed by other requests", _UNREPORTED),
    Column("swapped_tokens", COUNT, "positions", "copied back from the swap pool", _UNREPORTED),
)

PREFILLS = (
    *POINT_COLUMNS,
    _ITERATION,
    _REQUEST,
    Column("positions", COUNT, "positions", "of a prompt or a resumed context, computed in this iteration"),
    Column("rebuilt_tokens", COUNT, "positions", "of these, whose K/V had been computed before"),
    Column("resumed", pa.bool_(), "", "whether of a context whose K/V an eviction dropped"),
)

EVICTIONS = (
    *POINT_COLUMNS,
    _ITERATION,
    _REQUEST,
    _SLOT,
    Column("cached_tokens", COUNT, "positions", "positions whose K/V was dropped or swapped", _UNREPORTED),
    Column("generated_tokens", COUNT, "tokens", "tokens that it had generated by then", _UNREPORTED),
    Column("freed_blocks", COUNT, "blocks", "blocks that it gave back", _UNREPORTED),
    Column("thrash", pa.bool_(), "", "had not yet filled the block its last admission bought", _UNREPORTED),
    Column(
        "reclaim",
        _NAME,
        "",
        "what became of its K/V: `recompute` (dropped) or `swap`",
        _UNREPORTED,
    ),
    Column("swap_full", pa.bool_(), "", "it should have been swapped, but the swap pool had no room", _UNREPORTED),
    Column("resumed_iteration", INDEX, "iteration", "when it was admitted again", _UNREPORTED),
    Column("rebuilt_tokens", COUNT, "positions", "computed again after it, up to the next eviction", _UNREPORTED),
    Column("recovered_tokens", COUNT, "positions", "found by that resume in the prefix cache", _UNREPORTED),
    Column("swapped_tokens", COUNT, "positions", "copied back by that resume", _UNREPORTED),
)

TOKEN_RUNS = (
    *POINT_COLUMNS,
    _REQUEST,
    Column("first_iteration", INDEX, "iteration", "iteration of the run's first token"),
    Column("tokens", COUNT, "tokens", "tokens, one in each iteration from there on"),
)

SERVICE = (
    *POINT_COLUMNS,
    Column("metric", _NAME, "", "`ttft`, `itl` (every gap between two tokens of a request), `tpot`, `e2e` or `queue`"),
    Column("unit", _NAME, "", "`iterations` or `s`"),
    Column("count", COUNT, "", "values: requests, or gaps"),
    Column("mean", RATIO, "unit", "mean", "there is no value"),
    *(
        Column(
            f"p{share}", RATIO, "unit", f"the smallest value that {share} % of them do not exceed", "there is no value"
        )
        for share in (50, 90, 95, 99)
    ),
    Column("max", RATIO, "unit", "the largest", "there is no value"),
)

_NOT_WALL = "the counters are exact: those of `pools` hold in every repetition"
REPETITIONS = (
    *POINT_COLUMNS,
    Column("repetition", INDEX, "", "place of the run among those measured at this point, from 0"),
    Column(
        "wall_s",
        pa.float64(),
        "s",
        "time from first submission to last token, harness included: in the first repetition that also writes the "
        "tables of iterations",
    ),
    Column("engine_s", pa.float64(), "s", "time of the iterations, as the clock has it", _UNTIMED),
    Column("duration_s", pa.float64(), "s", "from the first arrival to the last token, as the clock has it", _UNTIMED),
    Column("collected_per_s", RATIO, "tokens/s", "collected_tokens / duration_s", _UNTIMED),
    *(
        Column(f"{metric}_{share}_s", pa.float64(), unit, f"as in `service`: {what} of its {count}", null_when)
        for metric, unit, count, null_when in (
            ("ttft", "s", "requests", f"{_NOT_TOLD}, or {_UNTIMED}"),
            ("itl", "s", "gaps", f"{_NOT_TOLD}, no request has two tokens, or {_UNTIMED}"),
            ("tpot", "s/token", "requests", f"{_NOT_TOLD}, no request has two tokens, or {_UNTIMED}"),
            ("e2e", "s", "requests", _UNTIMED),
        )
        for share, what in (("p50", "the median"), ("p99", "the 99th percentile"))
    ),
    *(
        Column(column.name, column.type, column.unit, column.meaning, f"{_NOT_WALL}, or {_UNREPORTED}")
        for name in REPEATED_COUNTERS
        for column in POOLS
        if column.name == name
    ),
)

STATISTICS = (
    *POINT_COLUMNS,
    Column(
        "metric", _NAME, "", "column of `repetitions`; none that the clock's model or exact counting makes the same"
    ),
    Column("unit", _NAME, "", "its unit"),
    Column("n", COUNT, "runs", "repetitions"),
    Column("median", RATIO, "unit", "of the repetitions' values; halfway between the middle two of an even number"),
    Column("low", RATIO, "unit", "lower end of the bootstrap interval of the median", "n is 1"),
    Column("high", RATIO, "unit", "its upper end", "n is 1"),
    Column("level", RATIO, "1", "0.95, or what so few values can reach: 1 - 0.5 ** (n - 1)", "n is 1"),
)

TEXTS = (
    *POINT_COLUMNS,
    _REQUEST,
    Column("token_ids", pa.list_(pa.int64()), "token ids", "generated tokens, prompt left out"),
    Column(
        "logit_gaps",
        pa.list_(pa.float64()),
        "logits",
        "at each token, the lead of the best over the second best",
        _UNREPORTED,
    ),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "pools": POOLS,
    "requests": REQUESTS,
    "iterations": ITERATIONS,
    "admissions": ADMISSIONS,
    "prefills": PREFILLS,
    "evictions": EVICTIONS,
    "token_runs": TOKEN_RUNS,
    "service": SERVICE,
    "repetitions": REPETITIONS,
    "statistics": STATISTICS,
    "texts": TEXTS,
}
ABOUT = {
    "pools": "one row per point of the sweep",
    "requests": "one row per point and request",
    "iterations": "one row per point and iteration",
    "admissions": "one row per admission, first or resumed",
    "prefills": "one row per forwarded row that computed a prompt or a resumed context",
    "evictions": "one row per eviction",
    "token_runs": "one row per request and stretch of iterations in each of which it got a token: the iterations of "
    "all its tokens, and so every gap between them; in the order in which they end",
    "service": "one row per point, metric and unit; seconds only where the clock takes time",
    "repetitions": "one row per point and measured run: a few numbers of each; the other tables tell of the first",
    "statistics": "one row per point and metric that was measured: its median over the repetitions, with an interval",
    "texts": "one row per point and request; none if the engine computes no text",
}


def arrow_schema(table: str) -> pa.Schema:
    """Typed fields with unit and meaning in their metadata."""
    return pa.schema(
        [
            pa.field(
                column.name,
                column.type,
                nullable=bool(column.null_when),
                metadata={"unit": column.unit, "meaning": column.meaning, "null_when": column.null_when},
            )
            for column in TABLES[table]
        ]
    )
