"""From a recorded trace to requests: which rows are taken, at which scale, and what their prompts are made of."""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from batchbench.errors import ScenarioError, UsageError
from batchbench.lazy_prompts import LazyPrompt, Packed
from batchbench.limits import MAX_REQUESTS
from batchbench.protocol import Tokenizer
from batchbench.traces import Tally, Trace, open_trace, rows_in_window
from batchbench.traces.rows import BEYOND, TraceRow
from batchbench.workload_schema import TraceSource

NS = 1_000_000_000
RECORDED_TIME_WINS = "a turn that follows another: it comes at its recorded time"
NO_OUTPUT = "no output length"


@dataclass(frozen=True)
class Recording:
    """The rows of a trace that are requests, by arrival, those of equal time in file order. Columns: there may be a
    million.

    arrival_ns: since the window's start, or the file's first arrival, at the trace's own rate; None without times.
    """

    trace: Trace
    lines: Sequence[int]
    arrival_ns: Sequence[int] | None
    prompts: Sequence[Sequence[int]]
    output_tokens: Sequence[int]

    @property
    def tally(self) -> Tally:
        return self.trace.tally


class _Row(NamedTuple):
    """A row whose lengths are known, before it is scaled. ids: of a text."""

    line: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int | str, ...] = ()
    ids: Sequence[int] | None = None


def open_source(source: TraceSource) -> Trace:
    """The trace that a scenario names. Raises TraceError."""
    return open_trace(source.path, source.format, prefix_tokens=source.prefix_tokens)


def read_recording(source: TraceSource, seed: int, tokenizer: Tokenizer | None) -> Recording:
    """Read a trace once, or twice if there is a window.

    Rows are taken by window, then by length, then by number. tokenizer: the engine's, which texts need. Raises
    TraceError, ScenarioError if nothing is left or too much, and UsageError if texts have no tokenizer.
    """
    trace = open_source(source)
    if trace.has_texts and tokenizer is None:
        raise UsageError(f"trace {source.path}: texts need the engine's tokenizer, and there is none")
    reader = _Reader(trace, source, tokenizer)
    rows: Iterable[_Row] = reader.rows()
    if source.max_requests is not None:
        rows = heapq.nsmallest(source.max_requests, rows, key=_arrival)  # as stable as sorted
        trace.tally.unuse(BEYOND, trace.tally.rows_used - len(rows))
    columns = _Columns(source, seed, trace)
    for row in rows:
        columns.add(row)
    if not columns.prompts:
        raise ScenarioError(f"trace {source.path}: no row is left to be a request; {trace.tally.lines()[0]}")
    return columns.sorted(reader.origin)


def _arrival(row: _Row) -> int:
    return row.arrival_ns


class _Reader:
    """Rows that window and lengths leave. origin: the time from which the trace's times count."""

    def __init__(self, trace: Trace, source: TraceSource, tokenizer: Tokenizer | None) -> None:
        self._trace, self._source, self._tokenizer = trace, source, tokenizer
        self.origin = 0

    def rows(self) -> Iterator[_Row]:
        """In file order; what is left out is dropped in the trace's books."""
        window_s = self._source.window_s
        found = self._trace.rows() if window_s is None else rows_in_window(self._trace, window_s)
        first, given = None, 0
        for row in found:
            arrival_ns = row.arrival_ns or 0
            first = arrival_ns if first is None else min(first, arrival_ns)
            self.origin = first if window_s is None else round(window_s[0] * NS)
            # Texts have no times, so the first are wanted: the others need no tokens.
            if self._trace.has_texts and given == self._source.max_requests:
                self._trace.tally.unuse(BEYOND)
                continue
            known = self._known(row)
            if reason := known if isinstance(known, str) else self._too_long(known):
                self._trace.tally.unuse(reason)
                continue
            if row.after is not None:
                self._trace.tally.note(RECORDED_TIME_WINS)
            given += 1
            assert isinstance(known, _Row)
            yield known

    def _known(self, row: TraceRow) -> _Row | str:
        """The row with its lengths, or why it cannot be used."""
        if row.prompt is None:
            assert row.prompt_tokens is not None and row.output_tokens is not None
            return _Row(row.line, row.arrival_ns or 0, row.prompt_tokens, row.output_tokens, row.prefix_ids)
        assert self._tokenizer is not None
        output = row.output_tokens
        if output is None and row.output is None:
            return NO_OUTPUT
        ids = self._tokenizer.encode(row.prompt)
        if output is None:
            output = len(self._tokenizer.encode(row.output or ""))
        if not ids or not output:
            return f"{'output' if ids else 'prompt'} of 0 tokens"
        return _Row(row.line, 0, len(ids), output, ids=ids)

    def _too_long(self, row: _Row) -> str | None:
        source = self._source
        if source.max_prompt_tokens is not None and row.prompt_tokens > source.max_prompt_tokens:
            return f"prompt of more than max_prompt_tokens = {source.max_prompt_tokens}"
        if source.max_output_tokens is not None and row.output_tokens > source.max_output_tokens:
            return f"output of more than max_output_tokens = {source.max_output_tokens}"
        return None


class _Columns:
    """Collects rows, scaled, in as little memory as they take."""

    def __init__(self, source: TraceSource, seed: int, trace: Trace) -> None:
        self._source, self._trace = source, trace
        self._scale = Fraction(str(source.length_scale))
        size = trace.prefix_tokens
        self._chunks = _Chunks(seed, max(1, half_up(size * self._scale)) if size else 1)
        self._size = size or 1
        self._lines, self._arrivals, self._outputs = array("q"), array("q"), array("i")
        self.prompts: list[Sequence[int]] = []

    def add(self, row: _Row) -> None:
        if len(self.prompts) == MAX_REQUESTS:
            raise ScenarioError(
                f"trace {self._source.path}: more than {MAX_REQUESTS} rows are left; give window_s or max_requests"
            )
        self._lines.append(row.line)
        self._arrivals.append(row.arrival_ns)
        self._outputs.append(self._scaled(row.output_tokens))
        self.prompts.append(self._prompt(row))

    def _prompt(self, row: _Row) -> Sequence[int]:
        if row.ids is not None:
            return Packed(row.ids[: self._scaled(row.prompt_tokens)])
        tokens = self._scaled(row.prompt_tokens)
        if row.prefix_ids and self._scale != 1:
            # Whole chunks stay whole and a part stays a part, so that there are as many as there are ids.
            whole, rest = divmod(row.prompt_tokens, self._size)
            size = self._chunks.tokens
            tokens = whole * size + (max(1, half_up(Fraction(rest * size, self._size))) if rest else 0)
            self._trace.tally.note(f"hash ids of {self._size} positions, which stand for {size} at length_scale")
        return RecordedPrompt(self._chunks, self._chunks.add(row.prefix_ids), len(row.prefix_ids), row.line, tokens)

    def _scaled(self, tokens: int) -> int:
        return tokens if self._scale == 1 else max(1, half_up(tokens * self._scale))

    def sorted(self, origin: int) -> Recording:
        times = self._arrivals
        order = sorted(range(len(times)), key=times.__getitem__)
        arrivals = array("q", (times[n] - origin for n in order)) if self._trace.has_times else None
        return Recording(
            self._trace,
            array("q", (self._lines[n] for n in order)),
            arrivals,
            [self.prompts[n] for n in order],
            array("i", (self._outputs[n] for n in order)),
        )


def half_up(value: Fraction) -> int:
    """To the nearest whole number, a half upwards."""
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


class _Chunks:
    """The hash ids of all prompts of a trace, one after the other, and what they stand for: `tokens` positions each."""

    __slots__ = ("ids", "seed", "tokens")

    def __init__(self, seed: int, tokens: int) -> None:
        self.seed, self.tokens = seed, tokens
        self.ids = array("i")

    def add(self, ids: Sequence[int | str]) -> int:
        """Where these begin."""
        first, numbers = len(self.ids), [_number(one) for one in ids]
        try:
            self.ids.extend(numbers)
        except OverflowError:  # some are of 64 bits; what was taken before the first of them goes again
            self.ids = array("q", self.ids[:first])
            self.ids.extend(numbers)
        return first

    def content(self, place: int) -> bytes:
        """The chunk of the id at that place: equal for equal ids, whatever prompt they are in."""
        return random.Random(f"batchbench chunk {self.seed} {self.ids[place]}").randbytes(self.tokens)


def _number(name: int | str) -> int:
    """An id as 64 bits. Two ids that are none meet by a chance of one in 2^64."""
    if isinstance(name, int) and -(2**63) <= name < 2**63:
        return name
    said = f"{type(name).__name__} {name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), signed=True)


class RecordedPrompt(LazyPrompt):
    """Byte values: the content of `known` hash ids from `first` on, then what is the row's own, by its line."""

    __slots__ = ("chunks", "first", "known", "line", "tokens")

    def __init__(self, chunks: _Chunks, first: int, known: int, line: int, tokens: int) -> None:
        self.chunks, self.first, self.known, self.line, self.tokens = chunks, first, known, line, tokens

    def __len__(self) -> int:
        return self.tokens

    def ids(self) -> Sequence[int]:
        chunks = self.chunks
        made = b"".join(chunks.content(self.first + n) for n in range(self.known))[: self.tokens]
        own = self.tokens - len(made)
        if own:
            made += random.Random(f"batchbench prompt {chunks.seed} line {self.line}").randbytes(own)
        return tuple(made)
