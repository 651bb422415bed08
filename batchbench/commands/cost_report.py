"""What `batchbench calibrate` and `batchbench cost` print: documents, tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from batchbench import cost
from batchbench.calibration import Calibration
from batchbench.errors import UsageError
from batchbench.eviction_cost import DEFINITION, TOLERANCE, EvictionCost, PointCost
from batchbench.sheets import Sheet, one_line
from batchbench.units import show_bytes, show_count

_SHAPE = ("layers", "kv_heads", "head_size", "element_bytes")
Document = dict[str, Any]


def calibration_sheet(calibration: Calibration) -> Sheet:
    """Both ladders, a row per length; a ladder without that length has a dash."""
    resumes = {point.tokens: point for point in calibration.resumes}
    copies = {point.blocks * calibration.block_size: point for point in calibration.copies}
    rows = []
    for tokens in sorted({*resumes, *copies}):
        resume, copy = resumes.get(tokens), copies.get(tokens)
        added = (resume.resume, resume.decode) if resume else (None, None)
        link = (copy.out, copy.back) if copy else (None, None)
        timings = ["-" if t is None else f"{t.median_ms:.3f} ± {t.spread_ms:.3f}" for t in (*added, *link)]
        rows.append((str(tokens), *timings[:2], f"{resume.extra_ms:.3f}" if resume else "-", *timings[2:]))
    return Sheet(("positions", "resume ms", "decode ms", "recompute ms", "out ms", "back ms"), tuple(rows))


def calibration_lines(calibration: Calibration) -> list[str]:
    """What was measured, and what follows from it."""
    c = calibration
    lines = [
        f"model {c.model} in {c.dtype} on {c.device}, {show_count(c.threads, 'thread')}, numerics {c.numerics}; blocks "
        f"of {c.block_size}; {show_bytes(c.kv_bytes_per_token)} of K/V per position",
        f"medians of {show_count(c.rounds, 'round')} ± half the distance of the quartiles; a resume beside "
        f"{show_count(c.beside_rows, 'decoding row')}, less the decode that it replaces",
        _flip_line(c),
    ]
    if link := c.link_bytes_per_s():
        lines.append(f"link: {link[0] / 1e9:.2f} GB/s out and {link[1] / 1e9:.2f} GB/s back at the largest copy")
    return [one_line(line) for line in lines]


def kv_bytes(bytes_per_token: int | None, shape: Mapping[str, int | None]) -> int:
    """Bytes of K/V per position: given, of a model's shape, or the toy's. Raises UsageError for half an answer."""
    given = {name: size for name, size in shape.items() if size is not None}
    if bytes_per_token is not None and given:
        raise UsageError(f"--bytes-per-token and {_option(next(iter(given)))} both say it; give one")
    if given and (missing := [name for name in _SHAPE if name not in given]):
        raise UsageError(f"{', '.join(map(_option, missing))} missing: K/V bytes per position need all four")
    try:
        return cost.bytes_per_token(**given) if given else bytes_per_token or cost.BYTES_PER_TOKEN
    except ValueError as error:
        raise UsageError(str(error)) from None


def constants_document(
    tokens: int, ms_per_token: float, bandwidth_bytes_per_s: float, per_token_bytes: int
) -> Document:
    """The comparison at a cost per position and a bandwidth that are given."""
    return {
        "source": "constants",
        "tokens": tokens,
        "ms_per_token": ms_per_token,
        "kv_bytes_per_token": per_token_bytes,
        "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
        "recompute_ms": cost.recompute_ms(tokens, ms_per_token),
        "swap_ms": cost.swap_ms(tokens, per_token_bytes, bandwidth_bytes_per_s),
        "cheaper": cost.cheaper(tokens, per_token_bytes, bandwidth_bytes_per_s, ms_per_token),
        "flip_bandwidth_bytes_per_s": cost.flip_bandwidth_bytes_per_s(per_token_bytes, ms_per_token),
    }


def calibration_document(calibration: Calibration, path: str, tokens: int) -> Document:
    """The same comparison, measured. flip_bandwidth_bytes_per_s: null where recomputing cost nothing measurable."""
    recompute_ms, link = calibration.recompute_ms(tokens), calibration.link_bytes_per_s()
    moved = 2 * tokens * calibration.kv_bytes_per_token
    return {
        "source": "calibration",
        "calibration": path,
        "model": calibration.model,
        "dtype": calibration.dtype,
        "device": calibration.device,
        "tokens": tokens,
        "extrapolated": tokens > calibration.max_tokens,
        "kv_bytes_per_token": calibration.kv_bytes_per_token,
        "out_bytes_per_s": link[0] if link else None,
        "back_bytes_per_s": link[1] if link else None,
        "recompute_ms": recompute_ms,
        "swap_ms": calibration.swap_ms(tokens),
        "cheaper": "swap" if calibration.prefers_swap(tokens) else "recompute",
        "flip_bandwidth_bytes_per_s": moved / (recompute_ms / 1e3) if recompute_ms > 0 else None,
        "crossover_tokens": calibration.crossovers(),
    }


def comparison_sheet(document: Mapping[str, Any]) -> Sheet:
    flip = document["flip_bandwidth_bytes_per_s"]
    return Sheet(
        ("positions", "recompute ms", "swap ms", "cheaper", "flips at"),
        (
            (
                str(document["tokens"]),
                f"{document['recompute_ms']:.3f}",
                f"{document['swap_ms']:.3f}",
                document["cheaper"],
                "unknown" if flip is None else f"{flip / 1e9:.2f} GB/s",
            ),
        ),
    )


def comparison_lines(document: Mapping[str, Any], calibration: Calibration | None) -> list[str]:
    """What the figures rest on."""
    size = f"{show_bytes(document['kv_bytes_per_token'])} of K/V per position"
    if calibration is None:
        bandwidth = document["bandwidth_bytes_per_s"] / 1e9
        return [f"constants: {document['ms_per_token']} ms per position, {size}, {bandwidth:.2f} GB/s each way"]
    lines = [f"measured: {document['calibration']}, model {document['model']} on {document['device']}, {size}"]
    lines.append(_flip_line(calibration))
    if document["extrapolated"]:
        lines.append(f"extrapolated: nothing longer than {calibration.max_tokens} positions was measured")
    return [one_line(line) for line in lines]


def evictions_document(
    name: str, path: str, calibration: Calibration, costs: Sequence[EvictionCost], sums: Sequence[PointCost]
) -> Document:
    return {
        "scenario": name,
        "calibration": path,
        "model": calibration.model,
        "definition": DEFINITION,
        "points": [{**asdict(total), "ratio": total.ratio} for total in sums],
        "evictions": [asdict(one) for one in costs],
    }


def evictions_sheet(sums: Sequence[PointCost]) -> Sheet:
    """A row per point and strategy."""
    varied = any(total.choices for total in sums)
    return Sheet(
        (
            "pool",
            *(("choices",) if varied else ()),
            "reclaim",
            "evictions",
            "not measured",
            "predicted ms",
            "measured ms",
            "predicted /measured",
        ),
        tuple(
            (
                str(total.pool_blocks),
                *((one_line(total.choices),) if varied else ()),
                total.reclaim,
                str(total.evictions),
                str(total.unmeasured),
                *("-" if ms is None else f"{ms:.2f}" for ms in (total.predicted_ms, total.measured_ms)),
                "-" if total.ratio is None else f"{total.ratio:.2f}",
            )
            for total in sums
        ),
    )


def evictions_lines(
    calibration: Calibration, costs: Sequence[EvictionCost], sums: Sequence[PointCost], threads: int | None
) -> list[str]:
    """Where the prediction is off, what was left out, and what `measured` means."""
    if not costs:
        return ["no evictions: every pool held what ran in it"]
    lines = [_verdict(total) for total in sums if total.ratio is None or abs(total.ratio - 1) > TOLERANCE]
    if not lines:
        lines.append(f"every sum is predicted within {TOLERANCE:.0%} of what was measured")
    if left_out := sum(total.unmeasured for total in sums):
        lines.append(
            f"{show_count(left_out, 'eviction')} left out of both sums: the resume shared its iteration with a "
            f"prompt's first computation or with copies, or its point had no copy_s"
        )
    if far := sum(one.extrapolated for one in costs):
        lines.append(
            f"{show_count(far, 'eviction')} longer than the {calibration.max_tokens} positions that were calibrated: "
            f"extrapolated"
        )
    if threads is not None and threads != calibration.threads:
        lines.append(f"calibrated with {show_count(calibration.threads, 'thread')}, run with {threads}")
    return [one_line(line) for line in (*lines, DEFINITION)]


def _verdict(total: PointCost) -> str:
    where = ", ".join(filter(None, (f"pool {total.pool_blocks}", total.choices, total.reclaim)))
    if total.measured_ms is None or total.predicted_ms is None:
        return f"{where}: no eviction could be measured"
    if total.ratio is None:
        return f"{where}: predicted {total.predicted_ms:.2f} ms, measured none: lost in the noise"
    over = "over" if total.ratio > 1 else "under"
    return (
        f"{where}: {over}predicted, {total.predicted_ms:.2f} ms against {total.measured_ms:.2f} ms: "
        f"{total.ratio - 1:+.1%} of what was measured"
    )


def _flip_line(c: Calibration) -> str:
    flips = c.crossovers()
    if not flips:
        return f"recomputing takes less at every length up to {c.max_tokens} positions"
    if len(flips) == 1:
        return f"swapping takes less from {show_count(flips[0], 'position')} on, up to the {c.max_tokens} measured"
    return f"the choice changes at {', '.join(map(str, flips))} positions; swapping takes less from the first on"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
