"""From a declared workload to concrete requests, the same on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction
from itertools import accumulate, repeat

from batchbench.arrivals import ClosedLoop, arrival_times, on_clock
from batchbench.distributions import Delay, correlated, delay_quantile, length_quantile, uniforms
from batchbench.errors import ScenarioError, UsageError
from batchbench.lazy_prompts import Joined, RandomPrompt, Stretch
from batchbench.length_files import read_columns
from batchbench.limits import MAX_PROMPT_TOKENS, MAX_TIME
from batchbench.paths import FilePath
from batchbench.prompts import NATURAL, load_prompts
from batchbench.protocol import RequestSpec, Sampling, Tokenizer, WorkloadClock
from batchbench.recording import NS, Recording, half_up, open_source, read_recording
from batchbench.traces import Trace
from batchbench.workload_schema import TraceSource, Workload

Entrance = Callable[[int, Sequence[str]], tuple[int, str | None]]
Prompts = Iterator[Sequence[int]]
Prefixed = Callable[[int, Sequence[int]], Sequence[int]]  # conversation n's first prompt, from its own part
_NUMBERS = [str(number) for number in range(256)]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of every request: own prompt, (own prompt, output) tokens, and what a trace says besides."""

    count: int
    prompts: Iterable[Sequence[int]]
    lengths: Iterable[tuple[int | None, int]]
    prefix: Prefixed
    times: Iterable[int]  # on the workload's clock, if neither a process nor a turn before decides
    lines: Iterable[int | None]


def build_requests(
    workload: Workload,
    tokenizer: Tokenizer | None = None,
    clock: WorkloadClock = "iterations",
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> tuple[RequestSpec, ...]:
    """Requests r0, r1, ... in submission order, with seeded random prompts or with texts, or as a trace has them.

    tokenizer: the engine's, which texts need (`adapters.engine_tokenizer`). clock: the scenario's. on_trace: given the
    trace, if there is one, with the books of its rows. The turns of a conversation follow each other. Raises UsageError
    if texts have no tokenizer, TraceError, and ScenarioError for files that cannot be read, texts that are too short,
    arrivals that are too far, and lists that another clock counts.
    """
    if workload.trace is not None:
        recording = read_recording(workload.trace, workload.seed, tokenizer)
        on_trace(recording.trace)
        return tuple(_limited(_requests(workload, clock, _recorded(workload, workload.trace, recording, clock))))
    if workload.arrival_iterations is not None and clock != "iterations":
        raise ScenarioError(f"arrival_iterations counts iterations, but clock is {clock!r}: give [workload.arrivals]")
    lengths = list(_lengths(workload))
    prompts, prefix = _random(workload, lengths) if workload.prompts is None else _texts(workload, tokenizer, lengths)
    count, times = workload.request_count, workload.arrival_iterations or repeat(0)
    asked = _Asked(count, prompts, lengths, prefix, times, repeat(None, count))
    return tuple(_limited(_requests(workload, clock, asked)))


def needs_tokenizer(workload: Workload) -> bool:
    """Whether prompts are texts, of which only an engine's tokenizer makes requests. Raises TraceError."""
    return workload.prompts is not None or (workload.trace is not None and open_source(workload.trace).has_texts)


def _requests(workload: Workload, clock: WorkloadClock, asked: _Asked) -> Iterator[RequestSpec]:
    enter, think = _entrance(workload, clock, asked), _thinking(workload, clock)
    sampling = None
    if workload.temperature:
        sampling = Sampling(workload.temperature, workload.top_k, workload.top_p, workload.sampling_seed)
    priorities = workload.priorities or repeat(0, asked.count)
    before: RequestSpec | None = None
    ends: list[str] = []  # of every conversation so far, its last request
    for number, (turn, prompt, (_, output_tokens), priority, line) in enumerate(
        zip(_turns(workload, asked.count), asked.prompts, asked.lengths, priorities, asked.lines, strict=True)
    ):
        after, history_tokens = None, 0
        if before is not None and turn:
            arrival, after, history_tokens = think(), before.request_id, before.prompt_tokens + before.output_tokens
        else:
            ends += [before.request_id] if before is not None else []
            arrival, after = enter(len(ends), ends)
            prompt = asked.prefix(len(ends), prompt)
        name = f"r{number}"
        before = RequestSpec(name, prompt, output_tokens, arrival, sampling, priority, after, history_tokens, line)
        yield before
    _require_all_busy(workload, len(ends) + 1)


def _require_all_busy(workload: Workload, conversations: int) -> None:
    """Raise ScenarioError if there are users who never send, or groups that nobody is of."""
    users = workload.arrivals.users if isinstance(workload.arrivals, ClosedLoop) else 0
    groups = (workload.prefix.groups if workload.prefix else None) or 0
    for key, number in (("arrivals.users", users), ("prefix.groups", groups)):
        if number > conversations:
            raise ScenarioError(f"{key} is {number}, but there are only {conversations} conversations")


def _limited(requests: Iterable[RequestSpec]) -> Iterator[RequestSpec]:
    """The same, as long as their prompts are not more tokens than anyone means."""
    total = 0
    for request in requests:
        total += request.prompt_tokens
        if total > MAX_PROMPT_TOKENS:
            raise ScenarioError(f"the prompts hold {total} tokens together, more than {MAX_PROMPT_TOKENS}")
        yield request


def workload_hash(requests: Iterable[RequestSpec]) -> str:
    """SHA-256 of the requests themselves, so that two spellings of one workload have one name.

    It is of a JSON array with a row for each; ids are made and forgotten request by request.
    """
    digest = hashlib.sha256()
    for number, request in enumerate(requests):
        digest.update(("," if number else "[").encode() + _row(request).encode())
    digest.update(b"]")
    return digest.hexdigest()


def _row(request: RequestSpec) -> str:
    """[id, [token ids], output_tokens, arrival, and what not every request has]."""
    ids = tuple(request.prompt)
    try:
        listed = ",".join([_NUMBERS[token] for token in ids])  # bytes, several times as fast as by json
    except IndexError:
        listed = ",".join(map(str, ids))
    rest = [
        request.output_tokens,
        request.arrival,
        *(astuple(request.sampling) if request.sampling else ()),
        *((["priority", request.priority],) if request.priority else ()),
        *((["after", request.after, request.history_tokens],) if request.after else ()),
    ]
    return f"[{json.dumps(request.request_id)},[{listed}],{json.dumps(rest, separators=(',', ':'))[1:]}"


# ---- traces ----------------------------------------------------------------------------------


def _recorded(workload: Workload, source: TraceSource, recording: Recording, clock: WorkloadClock) -> _Asked:
    """Rows as requests, each at its recorded time, whatever it followed then."""
    if recording.trace.has_texts and workload.seed and not workload.draws:
        raise ScenarioError(f"seed = {workload.seed} draws random prompts, but trace {source.path} has texts")
    count = len(recording.lines)
    try:
        workload.require_busy_users(count)
    except ValueError as error:
        raise ScenarioError(f"workload.{error}") from None
    times = _recorded_times(source, recording, clock) if workload.arrivals is None else repeat(0)
    lengths = ((len(p), output) for p, output in zip(recording.prompts, recording.output_tokens, strict=True))
    return _Asked(count, recording.prompts, lengths, lambda number, own: own, times, recording.lines)


def _recorded_times(source: TraceSource, recording: Recording, clock: WorkloadClock) -> Iterator[int]:
    """Arrivals on the clock: nanoseconds, rounded to the nearest, or iterations, rounded down."""
    if recording.arrival_ns is None:
        for name, idle in (("rate_scale", 1.0), ("iterations_per_s", None)):
            if getattr(source, name) != idle:
                raise ScenarioError(f"trace.{name} would do nothing: trace {source.path} has no times")
        return repeat(0)
    if clock != "iterations" and source.iterations_per_s is not None:
        raise ScenarioError(f"trace.iterations_per_s would do nothing: clock is {clock!r}, and a trace is in seconds")
    if clock == "iterations" and source.iterations_per_s is None and any(recording.arrival_ns):
        raise ScenarioError(
            f"trace {source.path} is in seconds, but clock is 'iterations': give trace.iterations_per_s, or "
            f"[workload.arrivals], or clock = 'virtual'"
        )
    return _scaled_times(source, recording.arrival_ns, clock)


def _scaled_times(source: TraceSource, arrival_ns: Iterable[int], clock: WorkloadClock) -> Iterator[int]:
    """Exactly: a float stands for the decimal that it is written as."""
    rate = 1 / Fraction(str(source.rate_scale))
    if clock == "iterations":
        rate *= Fraction(str(source.iterations_per_s or 0)) / NS
    limit = MAX_TIME if clock == "iterations" else MAX_TIME * NS
    for ns in arrival_ns:
        time = ns * rate.numerator // rate.denominator if clock == "iterations" else half_up(ns * rate)
        if time > limit:
            raise ScenarioError(f"trace {source.path}: an arrival at {time}, later than {limit}")
        yield time


# ---- lengths ---------------------------------------------------------------------------------


def _lengths(workload: Workload) -> Iterator[tuple[int | None, int]]:
    """(own prompt, output) tokens of every request; None: as long as its text is."""
    if workload.request_lengths is not None:
        yield from workload.request_lengths
        return
    draw = uniforms(f"batchbench lengths {workload.seed}")
    if workload.lengths_file is not None:
        prompts, outputs = read_columns(workload.lengths_file, 2)
        for _ in range(workload.request_count):
            place = min(int(draw() * len(prompts)), len(prompts) - 1)
            yield prompts[place], outputs[place]
        return
    assert workload.output_tokens is not None
    prompt_at = None if workload.prompt_tokens is None else length_quantile(workload.prompt_tokens)
    output_at = length_quantile(workload.output_tokens)
    for _ in range(workload.request_count):
        first, second = draw(), draw()
        if workload.length_correlation is not None:
            second = correlated(first, second, workload.length_correlation)
        yield prompt_at and prompt_at(first), output_at(second)


# ---- arrivals --------------------------------------------------------------------------------


def _turns(workload: Workload, count: int) -> Iterator[int]:
    """Of every request, which turn of its conversation it is, from 0; the last conversation may be cut short."""
    if workload.conversation is None:
        yield from repeat(0, count)
        return
    left, turns_at = count, length_quantile(workload.conversation.turns)
    draw = uniforms(f"batchbench turns {workload.seed}")
    while left:
        turns = min(turns_at(draw()), left)
        yield from range(turns)
        left -= turns


def _entrance(workload: Workload, clock: WorkloadClock, asked: _Asked) -> Entrance:
    """When conversation n begins, from its number and the last request of every one before: (arrival, after)."""
    process, key = workload.arrivals, f"batchbench arrivals {workload.seed}"
    if isinstance(process, ClosedLoop):
        users, think = process.users, _delays(process.think, key, clock)
        return lambda number, ends: (0, None) if number < users else (think(), ends[number - users])
    times = iter(asked.times) if process is None else arrival_times(process, asked.count, key, clock)
    return lambda number, ends: (next(times), None)


def _thinking(workload: Workload, clock: WorkloadClock) -> Callable[[], int]:
    """From a turn's last token to the next turn."""
    think: Delay = workload.conversation.think if workload.conversation else 0.0
    return _delays(think, f"batchbench think {workload.seed}", clock)


def _delays(delay: Delay, key: str, clock: WorkloadClock) -> Callable[[], int]:
    draw, delay_at = uniforms(key), delay_quantile(delay)
    return lambda: on_clock(delay_at(draw()), clock)


# ---- prompts ---------------------------------------------------------------------------------


def _random(workload: Workload, lengths: Iterable[tuple[int | None, int]]) -> tuple[Prompts, Prefixed]:
    """Own parts and prefixes of random ids."""
    prompts = (
        RandomPrompt(f"batchbench prompt {workload.seed} {number}", tokens or 0)
        for number, (tokens, _) in enumerate(lengths)
    )
    return prompts, _prefixes(
        workload, lambda part, _, tokens: RandomPrompt(f"batchbench {part} {workload.seed}", tokens)
    )


def _texts(
    workload: Workload, tokenizer: Tokenizer | None, lengths: Iterable[tuple[int | None, int]]
) -> tuple[Prompts, Prefixed]:
    """Texts in their order, from the first again when they run out; prefixes are cut from all of them, joined."""
    assert workload.prompts is not None
    if tokenizer is None:
        raise UsageError(f"prompts = {workload.prompts.written!r} needs the engine's tokenizer, and there is none")
    source = NATURAL if workload.prompts.written == NATURAL else workload.prompts
    encoded = [tuple(tokenizer.encode(text)) for text in load_prompts(source)]
    joined = tuple(token for ids in encoded for token in ids)
    if not joined:
        raise ScenarioError(f"the prompts of {workload.prompts.written!r} have no tokens")
    if workload.request_lengths is not None or (workload.prompt_tokens is None and workload.lengths_file is None):
        prompts = _single_texts(workload.prompts, encoded, lengths)
    else:
        starts = [0, *accumulate(map(len, encoded))]
        prompts = (
            Stretch(joined, starts[number % len(encoded)], tokens or 0) for number, (tokens, _) in enumerate(lengths)
        )
    return prompts, _prefixes(workload, lambda _, start, tokens: Stretch(joined, start, tokens))


def _single_texts(
    source: FilePath, encoded: Sequence[tuple[int, ...]], lengths: Iterable[tuple[int | None, int]]
) -> Prompts:
    """Each text whole or, where a request says its prompt_tokens, of exactly that many: shorter texts are passed over
    and longer ones cut.
    """
    long_enough: dict[int, list[tuple[int, ...]]] = {}
    for number, (tokens, _) in enumerate(lengths):
        least = tokens or 1
        if least not in long_enough:
            long_enough[least] = [ids for ids in encoded if len(ids) >= least]
        if not long_enough[least]:
            longest = max(map(len, encoded))
            raise ScenarioError(f"no prompt of {source.written!r} has {least} tokens; the longest has {longest}")
        ids = long_enough[least][number % len(long_enough[least])]
        yield ids[:tokens]


def _prefixes(workload: Workload, make: Callable[[str, int, int], Sequence[int]]) -> Prefixed:
    """make: ids of a part, from its name, where it begins in all prefixes joined, and its length."""
    if workload.prefix is None:
        return lambda number, own: own
    system_tokens, group_tokens = workload.prefix.tokens or 0, workload.prefix.group_tokens or 0
    system = [make("prefix", 0, system_tokens)] if system_tokens else []
    groups = [
        [*system, make(f"prefix group {group}", system_tokens + group * group_tokens, group_tokens)]
        for group in range(workload.prefix.groups or 0)
    ] or [system]
    return lambda number, own: Joined([*groups[number % len(groups)], own])
