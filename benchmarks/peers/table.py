"""From samples to the table in Markdown: medians, ratios, the physical floor. Pure functions of the record."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.peers.install import DTYPES, PEERS
from benchmarks.peers.measure import CASES, Case

# SmolLM2-135M: elements of the layers' matrices (30 x (576 x 960 + 576 x 576 + 3 x 576 x 1536)) and of the head.
LAYER_ELEMENTS, HEAD_ELEMENTS = 106_168_320, 49152 * 576
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}
_BYTES = {"float32": 4, "bfloat16": 2}

Record = dict[str, Any]
Column = tuple[str, str]  # dtype, case


def rates(record: Record, peer: str, column: Column) -> tuple[float, bool] | None:
    """(median rate, whether it rests on undisturbed measurements). None where nothing was measured."""
    dtype, case = column
    mine = [s for s in record["samples"] if (s["peer"], s["dtype"], s["case"]) == (peer, dtype, case)]
    quiet = [s["rate"] for s in mine if not s["disturbed"]]
    values = quiet or [s["rate"] for s in mine]
    return (statistics.median(values), bool(quiet)) if values else None


def floor_rate(case: Case, dtype: str, ceilings: dict[str, float]) -> float:
    """The rate that the machine allows: each iteration reads the weights once or multiplies, whichever is longer.

    ceilings: read_bytes_s and gemm_flop_s of this dtype. Attention, K/V and everything elementwise are left out.
    """
    read_s = _BYTES[dtype] * (LAYER_ELEMENTS + HEAD_ELEMENTS) / ceilings["read_bytes_s"]
    position_s = 2 * LAYER_ELEMENTS / ceilings["gemm_flop_s"]
    token_s = 2 * HEAD_ELEMENTS / ceilings["gemm_flop_s"]
    waves = case.requests // case.at_most
    decode_s = waves * (case.output - 1) * max(read_s, case.at_most * (position_s + token_s))
    prefill_s = waves * max(read_s, case.at_most * (case.prompt * position_s + token_s))
    return case.units / (decode_s if case.counts == "decoded" else prefill_s + decode_s)


def agreement(record: Record, peer: str, dtype: str) -> str:
    """How many of the 32 texts of the two batched cases are batchbench's own, id by id."""

    def texts(name: str, case: str) -> list[str]:
        found = [s["texts"] for s in record["samples"] if (s["peer"], s["dtype"], s["case"]) == (name, dtype, case)]
        return found[-1] if found else []

    parts = []
    for case in ("8", "32"):
        theirs, ours = texts(peer, case), texts("batchbench", case)
        parts.append(f"{sum(a == b for a, b in zip(theirs, ours, strict=True))}" if theirs and ours else "-")
    return " and ".join(parts)


def markdown(record: Record) -> str:
    """The whole report."""
    columns = [(dtype, case) for dtype in DTYPES for case in CASES]
    columns = [c for c in columns if any((s["dtype"], s["case"]) == c for s in record["samples"])]
    names = [name for name in PEERS if any(s["peer"] == name for s in record["samples"])]
    lines = ["| engine | " + " | ".join(f"{_SHORT[d]}: {c}" for d, c in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    found = {(name, c): rates(record, name, c) for name in names for c in columns}
    for name in names:
        cells = [_number(found[name, c]) for c in columns]
        lines.append(f"| {PEERS[name].title} | " + " | ".join(cells) + " |")
    lines.append("| floor of the machine | " + " | ".join(_floor_cell(record, c) for c in columns) + " |")
    if "batchbench" in names:
        lines += _ratio_rows(found, [name for name in names if name != "batchbench"], columns)
    lines += [f"| {PEERS[name].title} | not measured: {reason} |" for name, reason in record["failed"].items()]
    return "\n".join([*lines, "", *_notes(record, names)]) + "\n"


def _ratio_rows(
    found: dict[tuple[str, Column], tuple[float, bool] | None], others: list[str], columns: list[Column]
) -> list[str]:
    best, vllm = [], []
    for column in columns:
        ours = found["batchbench", column]
        theirs = [(rate[0], name) for name in others if (rate := found[name, column])]
        highest, name = max(theirs, default=(0.0, ""))
        best.append(f"{ours[0] / highest:.2f} ({name})" if ours and highest else "-")
        their_vllm = found.get(("vllm", column))
        vllm.append(f"{ours[0] / their_vllm[0]:.2f}" if ours and their_vllm else "-")
    return [
        "| batchbench / best peer | " + " | ".join(best) + " |",
        "| batchbench / vLLM | " + " | ".join(vllm) + " |",
    ]


def _notes(record: Record, names: list[str]) -> list[str]:
    notes = [
        "Columns: decode of one sequence, tokens/s; 32 requests of 64 + 64 tokens with at most 8 and 32 at once, "
        "output tokens/s with the prefill included; prefill of 32 x 512, positions/s. Medians; * rests on disturbed "
        "measurements only.",
        "",
    ]
    for name in names:
        about = record["about"][name]
        versions = ", ".join(f"{key} {value}" for key, value in about["versions"].items())
        agree = f"; float32 texts as batchbench's, 8 and 32 at once: {agreement(record, name, 'float32')} of 32"
        notes.append(f"- {PEERS[name].title}: {versions}; {about['settings']}{agree if name != 'batchbench' else ''}")
    for dtype, found in _ceilings(record).items():
        read, gemm = found["read_bytes_s"] / 1e9, found["gemm_flop_s"] / 1e9
        notes.append(f"- machine, {_SHORT[dtype]}: reads the weights' size at {read:.1f} GB/s, GEMM {gemm:.0f} GFLOP/s")
    for change in record["changes"]:
        who, pools = f"{PEERS[change['peer']].title} {_SHORT[change['dtype']]}", (change["roomy"], change["tight"])
        what = f"{change['changed']} of {change['requests']} requests change"
        notes.append(f"- natural text, {who}: {what} between pools of {pools[0]} and of {pools[1]} positions")
    return notes


def _ceilings(record: Record) -> dict[str, dict[str, float]]:
    """Median over the rounds, per dtype."""
    result = {}
    for dtype in DTYPES:
        mine = [c for c in record["ceilings"] if c["dtype"] == dtype]
        if mine:
            result[dtype] = {
                key: statistics.median(float(c[key]) for c in mine) for key in ("read_bytes_s", "gemm_flop_s")
            }
    return result


def _floor_cell(record: Record, column: Column) -> str:
    dtype, case = column
    found = _ceilings(record).get(dtype)
    return f"{floor_rate(CASES[case], dtype, found):,.0f}" if found else "-"


def _number(found: tuple[float, bool] | None) -> str:
    return "-" if found is None else f"{found[0]:,.0f}" + ("" if found[1] else "*")
