"""The [workload] of a scenario: what it may say, and what contradicts itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from batchbench.arrivals import DRAWN, Arrivals, ClosedLoop
from batchbench.arrivals import TAGS as PROCESS_TAGS
from batchbench.distributions import TAGS as DIST_TAGS
from batchbench.distributions import Delay, Length
from batchbench.limits import MAX_PROMPT_TOKENS, MAX_TIME, Frozen, Index, Rate, Requests, Tokens
from batchbench.paths import FilePath

TAGS = DIST_TAGS | PROCESS_TAGS
Lengths = tuple[tuple[int | None, int], ...]
TraceFormat = Literal[
    "azure", "burstgpt", "mooncake", "qwen-bailian", "vidur", "llmservingsim", "sharegpt", "vllm-custom", "vllm-timed",
    "csv", "jsonl", "parquet",
]  # fmt: skip
Moment = Annotated[float, Field(ge=0, le=MAX_TIME, allow_inf_nan=False)]
_SAID_BY_A_TRACE = (
    "requests", "prompt_tokens", "output_tokens", "length_correlation", "lengths", "lengths_file",
    "arrival_iterations", "prefix", "conversation", "priorities", "prompts",
)  # fmt: skip


class Prefix(Frozen):
    """What prompts begin with: a system prompt that all share, then the examples of one of several groups."""

    tokens: Tokens | None = Field(None, description="Length of the system prompt, with which every prompt begins.")
    groups: Requests | None = Field(
        None, description="Groups of few-shot examples: request n (or conversation n) has those of group n mod groups."
    )
    group_tokens: Tokens | None = Field(None, description="Length of each group's examples, after the system prompt.")

    @model_validator(mode="after")
    def _something(self) -> Prefix:
        if (self.groups is None) != (self.group_tokens is None):
            raise ValueError("groups and group_tokens belong together: how many, and how long each is")
        if self.tokens is None and self.groups is None:
            raise ValueError("there is neither tokens (a system prompt) nor groups and group_tokens")
        return self


class Conversation(Frozen):
    """Requests that follow each other: a turn resends what was said before it, and adds its own prompt."""

    turns: Length = Field(description="Requests of a conversation: an integer, or a table with `dist`.")
    think: Delay = Field(
        0.0, description="From a turn's last token to the next turn's arrival: a number, or a table with `dist`."
    )


class TraceSource(Frozen):
    """A recorded trace whose rows are the requests. What chooses rows is in the trace's own tokens and seconds."""

    path: FilePath = Field(description="Path of the trace, from the scenario's folder (docs/traces.md).")
    format: TraceFormat | None = Field(None, description="Its format; told by its content if left out.")
    prefix_tokens: Tokens | None = Field(
        None, description="Positions that a hash id stands for; the format's own if left out."
    )
    window_s: tuple[Moment, Moment] | None = Field(
        None, description="Only rows from A to before B seconds after the trace's first arrival: `[A, B]`."
    )
    max_prompt_tokens: Tokens | None = Field(
        None, description="Rows with a longer prompt are dropped; of the trace's tokens, before length_scale."
    )
    max_output_tokens: Tokens | None = Field(None, description="Rows with a longer output are dropped; likewise.")
    max_requests: Requests | None = Field(None, description="Of the rows that are left, the first so many to arrive.")
    rate_scale: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] = Field(
        1.0, description="How many times as fast as recorded requests arrive: times are divided by it."
    )
    length_scale: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        1.0, description="Shortens prompts and outputs: lengths times this, a half rounded up, at least 1."
    )
    iterations_per_s: Rate | None = Field(
        None, description='Under `clock = "iterations"`: how many iterations a second of the trace is.'
    )

    @model_validator(mode="after")
    def _a_window(self) -> TraceSource:
        if self.window_s is not None and not self.window_s[0] < self.window_s[1]:
            raise ValueError(f"window_s = [{self.window_s[0]:g}, {self.window_s[1]:g}] is empty")
        return self


class Workload(Frozen):
    """Requests: `requests` of equal or drawn lengths, a list of `lengths`, or a trace; prompts are random, or texts."""

    requests: Requests | None = Field(None, description="How many, of equal or drawn lengths; all turns counted.")
    prompt_tokens: Length | None = Field(
        None,
        description="Length of each request's own prompt, without prefix and history: an integer, or a table with "
        "`dist`; with `prompts`, may be left out: each text whole.",
    )
    output_tokens: Length | None = Field(
        None, description="Tokens that each request generates: an integer, or a table with `dist`."
    )
    length_correlation: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] | None = Field(
        None, description="Rank correlation (Spearman's) of drawn prompt and output lengths; independent if left out."
    )
    lengths: tuple[tuple[Tokens, Tokens], ...] | None = Field(
        None, description="Explicit requests, each [prompt_tokens, output_tokens]."
    )
    lengths_file: FilePath | None = Field(
        None,
        description="Path, from the scenario's folder, of recorded pairs `prompt_tokens output_tokens`, one a line: "
        "each request draws one, with replacement.",
    )
    arrival_iterations: tuple[Index, ...] | None = Field(
        None, description="Iteration in which each request arrives; all at 0 if left out."
    )
    arrivals: Arrivals | None = Field(None, description="A process instead of a list: a table with `process`.")
    prefix: Prefix | None = Field(None, description="What prompts begin with, shared: a table.")
    conversation: Conversation | None = Field(
        None, description="Requests are the turns of conversations, whose first turns the arrivals are of: a table."
    )
    trace: TraceSource | None = Field(
        None, description="A recorded trace instead of all these, arrivals apart: a table."
    )
    priorities: tuple[Index, ...] | None = Field(
        None,
        description="Of each request, for the victim rule `priority`: the highest number gives way; all 0 if left out.",
    )
    prompts: FilePath | None = Field(
        None,
        description="Texts instead of random token ids: `natural` (a set that ships with batchbench), or the path of "
        "a file, from the scenario's folder.",
    )
    seed: Index = Field(0, description="Seed of all that is drawn: random prompts' token ids, lengths, arrivals.")
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = Field(
        0.0, description="0 takes the best token (greedy); above, tokens are drawn, logits divided by it."
    )
    top_k: Index = Field(0, description="Of drawn tokens: among that many of the best; 0 for all.")
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        1.0, description="Of drawn tokens: among the fewest of these whose probabilities reach it."
    )
    sampling_seed: Index = Field(0, description="Seed of drawn tokens, with the request and the position.")

    @model_validator(mode="after")
    def _one_form(self) -> Workload:
        if self.trace is not None:
            return self._traced(self.trace)
        given = [name for name in ("requests", "prompt_tokens", "output_tokens") if getattr(self, name) is not None]
        if self.lengths is not None and given:
            raise ValueError(f"give either lengths or {', '.join(given)}, not both")
        recorded = [name for name in ("lengths", "prompt_tokens", "output_tokens") if getattr(self, name) is not None]
        if self.lengths_file is not None and recorded:
            raise ValueError(f"give either lengths_file or {', '.join(recorded)}, not both")
        needed = ["requests"]
        if self.lengths_file is None:
            needed += ["prompt_tokens"] * (self.prompts is None) + ["output_tokens"]
        if self.lengths is None and (missing := [name for name in needed if name not in given]):
            raise ValueError(f"{', '.join(missing)} missing (or give lengths = [[prompt, output], ...])")
        if self.lengths is not None and not self.lengths:
            raise ValueError("lengths is empty: there are no requests")
        return self

    def _traced(self, trace: TraceSource) -> Workload:
        said = [name for name in _SAID_BY_A_TRACE if getattr(self, name) is not None]
        if said:
            raise ValueError(f"give either [workload.trace] or {', '.join(said)}, not both: a trace says it itself")
        for name, idle in (("rate_scale", 1.0), ("iterations_per_s", None)):
            if self.arrivals is not None and getattr(trace, name) != idle:
                raise ValueError(f"trace.{name} would do nothing: [workload.arrivals] replaces the trace's times")
        return self

    @model_validator(mode="after")
    def _nothing_idle(self) -> Workload:
        """No key that would do nothing."""
        if self.prompts is not None and self.seed and not self.draws:
            raise ValueError(
                f"seed = {self.seed} draws random prompts, but prompts = {self.prompts.written!r}; leave one out"
            )
        fixed = [name for name in ("prompt_tokens", "output_tokens") if _plain(getattr(self, name))]
        if self.length_correlation is not None and fixed:
            raise ValueError(f"length_correlation is of two drawn lengths, but {fixed[0]} is not a table with dist")
        neutral = {"top_k": 0, "top_p": 1.0, "sampling_seed": 0}
        ignored = [name for name, value in neutral.items() if getattr(self, name) != value]
        if ignored and not self.temperature:
            raise ValueError(f"{', '.join(ignored)} would do nothing: temperature is 0, which takes the best token")
        return self

    @model_validator(mode="after")
    def _as_many(self) -> Workload:
        """Lists are as long as there are requests, and not more tokens than anyone means."""
        total = sum(prompt or 0 for prompt, _ in self.request_lengths or ())
        if total > MAX_PROMPT_TOKENS:
            raise ValueError(f"the prompts hold {total} tokens together, more than {MAX_PROMPT_TOKENS}")
        for name in ("arrival_iterations", "priorities"):
            listed = getattr(self, name)
            if listed is not None and len(listed) != self.request_count:
                raise ValueError(f"{name} has {len(listed)} entries for {self.request_count} requests")
        return self

    @model_validator(mode="after")
    def _one_arrival(self) -> Workload:
        for name in ("arrivals", "conversation"):
            if self.arrival_iterations is not None and getattr(self, name) is not None:
                raise ValueError(f"give either arrival_iterations or [workload.{name}], not both")
        if self.trace is None:  # else only its file says how many requests there are
            self.require_busy_users(self.request_count)
        groups = (self.prefix.groups if self.prefix else None) or 0
        if groups > self.request_count:
            raise ValueError(f"prefix.groups is {groups}, but there are only {self.request_count} requests")
        return self

    def require_busy_users(self, requests: int) -> None:
        """Raise ValueError if some users of a closed loop would never send one."""
        users = self.arrivals.users if isinstance(self.arrivals, ClosedLoop) else 0
        if users > requests:
            raise ValueError(f"arrivals.users is {users}, but there are only {requests} requests")

    @property
    def request_count(self) -> int:
        """Requests, every turn of a conversation counted; 0 of a trace, which only its file tells."""
        return len(self.lengths) if self.lengths is not None else self.requests or 0

    @property
    def request_lengths(self) -> Lengths | None:
        """(prompt_tokens, output_tokens) of every request, in submission order; None: as long as its text is.

        None for the whole where lengths are drawn.
        """
        if self.lengths is not None:
            return self.lengths
        if not isinstance(self.output_tokens, int) or not (self.prompt_tokens is None or _plain(self.prompt_tokens)):
            return None
        assert self.prompt_tokens is None or isinstance(self.prompt_tokens, int)
        return ((self.prompt_tokens, self.output_tokens),) * self.request_count

    @property
    def draws(self) -> bool:
        """Whether `seed` decides anything but random prompts."""
        if self.lengths_file is not None or isinstance(self.arrivals, DRAWN):
            return True
        chosen: list[object] = [self.prompt_tokens, self.output_tokens]
        if isinstance(self.arrivals, ClosedLoop):
            chosen.append(self.arrivals.think)
        if self.conversation is not None:
            chosen += [self.conversation.turns, self.conversation.think]
        return not all(map(_plain, chosen))


def _plain(length: object) -> bool:
    """Said in the scenario, not drawn."""
    return length is None or isinstance(length, (int, float))
