"""The formats that traces come in: which columns each needs, in which units, and how a file is told to be one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from batchbench.errors import TraceError
from batchbench.traces.cells import UNITS_NS, shown
from batchbench.traces.records import (
    Record,
    csv_names,
    ignore,
    json_records,
    jsonl_records,
    look,
    parquet_names,
)

SESSION = "sub_requests"  # of LLMServingSim's agentic variant
AGENTIC = (
    f"an agentic session ({SESSION}): when its later calls come, only a run can say; a trace has one request a line"
)
_HEAD = 50  # records that are looked at before a file's format is said


@dataclass(frozen=True)
class Format:
    """A format's columns, each with the names it may have (as `plain_name` makes them), and its units.

    kind: what a record is made of. unit: of the times, as `Clock` takes it. prefix_tokens: positions of a hash id.
    """

    name: str
    container: Literal["csv", "jsonl", "json", "parquet"]
    arrival: tuple[str, ...] = ()
    prompt: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    unit: str | None = None
    prefix_tokens: int | None = None
    hash_ids: tuple[str, ...] = ()
    request_id: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    kind: Literal["counts", "conversations", "prompts"] = "counts"

    @property
    def required(self) -> dict[str, tuple[str, ...]]:
        """Of which roles there must be a column."""
        roles = {"arrival": self.arrival, "prompt": self.prompt, "output": self.output}
        return {"prompt": self.prompt} if self.kind != "counts" else roles


@dataclass(frozen=True)
class Columns:
    """Which of a file's columns plays which role, by its own name; None: none does."""

    prompt: str
    arrival: str | None = None
    output: str | None = None
    hash_ids: str | None = None
    request_id: str | None = None
    after: str | None = None

    @property
    def used(self) -> list[str]:
        roles = (self.arrival, self.prompt, self.output, self.hash_ids, self.request_id, self.after)
        return [name for name in roles if name is not None]


_TIMES = ("arrival", "arrival_time", "arrived_at", "timestamp", "time", "ts")
_PLAIN_ARRIVAL = (*_TIMES, *(f"{name}_{unit}" for name in _TIMES for unit in UNITS_NS))
_PLAIN_PROMPT = (
    "prompt_tokens", "input_tokens", "context_tokens", "request_tokens", "contexttokens", "num_prefill_tokens",
    "input_toks", "prompt_length", "input_length", "prompt_len", "input_len",
)  # fmt: skip
_PLAIN_OUTPUT = (
    "output_tokens", "completion_tokens", "generated_tokens", "response_tokens", "generatedtokens",
    "num_decode_tokens", "output_toks", "output_length", "output_len",
)  # fmt: skip


def _plain(container: Literal["csv", "jsonl", "parquet"]) -> Format:
    ids = ("hash_ids",) if container != "csv" else ()
    names = ("request_id", "id")
    return Format(container, container, _PLAIN_ARRIVAL, _PLAIN_PROMPT, _PLAIN_OUTPUT, hash_ids=ids, request_id=names)


def _hashed(name: str, unit: str, prefix_tokens: int, ids: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Format:
    lengths = (("input_length",), ("output_length",))
    return Format(name, "jsonl", ("timestamp",), *lengths, unit, prefix_tokens, ("hash_ids",), ids, after)


_KNOWN = (
    Format("azure", "csv", ("timestamp",), ("contexttokens",), ("generatedtokens",), "date"),
    Format("burstgpt", "csv", ("timestamp",), ("request_tokens",), ("response_tokens",), "s"),
    _hashed("mooncake", "ms", 512),
    _hashed("qwen-bailian", "s", 16, ("chat_id",), ("parent_chat_id",)),
    Format("vidur", "csv", ("arrived_at",), ("num_prefill_tokens",), ("num_decode_tokens",), "s"),
    Format("llmservingsim", "jsonl", ("arrival_time_ns",), ("input_toks",), ("output_toks",), "ns"),
    Format("sharegpt", "json", prompt=("conversations",), request_id=("id",), kind="conversations"),
    Format("vllm-custom", "jsonl", prompt=("prompt",), output=("output_tokens",), kind="prompts"),
    _hashed("vllm-timed", "ms", 16),
    _plain("csv"),
    _plain("jsonl"),
    _plain("parquet"),
)
BY_NAME = {known.name: known for known in _KNOWN}


def plain_name(name: str) -> str:
    """`Request tokens` -> `request_tokens`: how columns' names are compared."""
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def sniff(path: Path) -> str:
    """The name of a file's format, by its content. Raises TraceError: it is none that is known, or cannot be read."""
    container = look(path)
    if container == "parquet":
        return "parquet"
    if container == "csv":
        names = csv_names(path)
        found = {plain_name(name) for name in names}
        if name := _first_named(found, ("azure", "burstgpt", "vidur", "csv")):
            return name
        raise TraceError(f"{path}:1: {_unknown(names)}")
    if container == "json":
        return "sharegpt"
    head = [record for _, record in _head(path, "jsonl")]
    return _sniff_jsonl(path, head, list(dict.fromkeys(key for record in head for key in record)))


def _sniff_jsonl(path: Path, head: Sequence[Record], keys: list[str]) -> str:
    found = {plain_name(key) for key in keys}
    if SESSION in found:
        return "llmservingsim"
    if "conversations" in found:
        return "sharegpt"
    if {"chat_id", "hash_ids"} <= found or "parent_chat_id" in found:
        return "qwen-bailian"
    if _has(BY_NAME["mooncake"], found):
        return "vllm-timed" if _fitting(head, 16) > _fitting(head, 512) else "mooncake"
    if name := _first_named(found, ("llmservingsim", "jsonl", "vllm-custom")):
        return name
    raise TraceError(f"{path}:1: {_unknown(keys)}")


def _first_named(found: set[str], names: Sequence[str]) -> str | None:
    return next((name for name in names if _has(BY_NAME[name], found)), None)


def _has(known: Format, found: set[str]) -> bool:
    return all(found & set(names) for names in known.required.values())


def _fitting(head: Sequence[Record], size: int) -> int:
    """How many records have as many hash ids as their prompt has chunks of `size` positions."""
    pairs = [(record.get("input_length"), record.get("hash_ids")) for record in head]
    return sum(
        -(-length // size) == len(ids) for length, ids in pairs if type(length) is int and isinstance(ids, list) and ids
    )


def _unknown(names: Sequence[str]) -> str:
    listed = ", ".join(map(shown, names[:12])) + (", ..." if len(names) > 12 else "")
    has = f"its columns are {listed}" if names else "it has no columns"
    return (
        f"a trace of no known format: {has}; a plain one needs times (such as timestamp_s), prompt_tokens and "
        "output_tokens"
    )


def _head(path: Path, container: str) -> list[tuple[int, Record]]:
    records = (json_records if container == "json" else jsonl_records)(path, ignore)
    return [(number, record) for number, record in islice(records, _HEAD) if record is not None]


def resolve(path: Path, known: Format) -> Columns:
    """Which of the file's columns play the format's roles. Raises TraceError: one is missing, or there are two."""
    if known.container == "csv":
        names, place = csv_names(path), f"{path}:1"
    elif known.container == "parquet":
        names, place = parquet_names(path), f"trace {path}"
    else:
        head = _head(path, known.container)
        names = list(dict.fromkeys(key for _, record in head for key in record))
        if known.name == "llmservingsim" and (line := next((n for n, one in head if SESSION in one), None)):
            raise TraceError(f"{path}:{line}: {AGENTIC}")
        place = f"{path}:1" if known.container == "jsonl" else f"{path}: record 1"
    optional = {"output": known.output} if known.kind != "counts" else {}
    optional |= {"hash_ids": known.hash_ids, "request_id": known.request_id, "after": known.after}
    roles = {role: _column(place, known, role, names, wanted) for role, wanted in known.required.items()}
    roles |= {role: _column(place, known, "", names, wanted) for role, wanted in optional.items()}
    prompt = roles.pop("prompt")
    assert prompt is not None
    return Columns(prompt, **roles)


def _column(place: str, known: Format, role: str, names: Sequence[str], wanted: Sequence[str]) -> str | None:
    found = [name for name in names if plain_name(name) in wanted]
    if len(found) > 1:
        raise TraceError(f"{place}: the columns {' and '.join(map(shown, found[:2]))} could both be {wanted[0]}")
    if found:
        return found[0]
    if role:
        listed = ", ".join(map(shown, names[:12])) + (", ..." if len(names) > 12 else "")
        more = f" (or another name for {role}, docs/traces.md)" if len(wanted) > 1 else ""
        raise TraceError(
            f"{place}: no column {wanted[0]}{more}, which {known.name} needs; there are {listed or 'none'}"
        )
    return None


def unit_of(known: Format, columns: Columns) -> str | None:
    """The unit of the times: the format's, or that which the column's name ends in, or None."""
    if known.unit is not None or columns.arrival is None:
        return known.unit
    ending = plain_name(columns.arrival).rpartition("_")[2]
    return ending if ending in UNITS_NS else None
