"""Arrival processes: what a scenario may say of them, and the times they give.

Keys carry no unit: under clock = "iterations" a time is in iterations and a rate per iteration, under any other clock
in seconds and per second. Here times are whole billionths of that unit. A gap is rounded before gaps are added up, so
that the last bit of a logarithm, in which C libraries differ, moves no arrival but with a chance of about 1e-8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from batchbench.distributions import NANO, Delay, uniforms
from batchbench.errors import ScenarioError
from batchbench.limits import MAX_TIME, Duration, Frozen, Rate, Requests
from batchbench.protocol import WorkloadClock

Draw = Callable[[], float]  # from (0, 1)
_STANDARD = NormalDist()


class Burst(Frozen):
    """All at once, or `size` of them `every` so often."""

    process: Literal["burst"]
    size: Requests | None = Field(None, description="Arrivals in a group; all if left out.")
    every: Duration | None = Field(None, description="From one group to the next.")

    @model_validator(mode="after")
    def _both_or_neither(self) -> Burst:
        if (self.size is None) != (self.every is None):
            raise ValueError("size and every belong together: size arrivals, every so often")
        return self

    def times(self, draw: Draw) -> Iterator[int]:
        """The first group at 0."""
        if self.size is None or self.every is None:
            return (0 for _ in count())
        size, every = self.size, self.every
        return (round(n // size * every * NANO) for n in count())


class Constant(Frozen):
    """One every 1 / rate, the first at 0."""

    process: Literal["constant"]
    rate: Rate = Field(description="Arrivals per second, or per iteration.")

    def times(self, draw: Draw) -> Iterator[int]:
        return (round(n * NANO / self.rate) for n in count())


class Poisson(Frozen):
    """Independent arrivals: gaps are exponential, of mean 1 / rate, the first one before the first arrival."""

    process: Literal["poisson"]
    rate: Rate = Field(description="Mean arrivals per second, or per iteration.")

    def times(self, draw: Draw) -> Iterator[int]:
        return accumulate(round(exponential(draw) / self.rate * NANO) for _ in count())


class Gamma(Frozen):
    """Gaps are gamma of shape `burstiness` and mean 1 / rate; their variance is the mean's square over burstiness.

    The definition of vLLM's serving benchmark: 1 is Poisson, less is burstier, more is smoother. That one also scales
    the gaps so that the last arrival falls where the rate says; here nothing is scaled.
    """

    process: Literal["gamma"]
    rate: Rate = Field(description="Mean arrivals per second, or per iteration.")
    burstiness: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)] = Field(
        description="Shape: 1 is Poisson, less is burstier, more is smoother."
    )

    def times(self, draw: Draw) -> Iterator[int]:
        scale = NANO / (self.rate * self.burstiness)
        return accumulate(round(standard_gamma(self.burstiness, draw) * scale) for _ in count())


class OnOff(Frozen):
    """Poisson for a time of `on`, nothing for a time of `off`, and again; on average rate * on / (on + off)."""

    process: Literal["on-off"]
    rate: Rate = Field(description="Mean arrivals per second, or per iteration, while on.")
    on: Duration = Field(description="How long there are arrivals.")
    off: Duration = Field(description="How long there are none.")

    def times(self, draw: Draw) -> Iterator[int]:
        on, off = round(self.on * NANO), round(self.off * NANO)
        busy = Poisson(process="poisson", rate=self.rate).times(draw)
        return (time + time // on * off for time in busy)


class Ramp(Frozen):
    """Poisson whose rate goes from start_rate to end_rate in a straight line, over a time of `over`, and stays there.

    By inversion: with S the sum of k exponentials of mean 1, the k-th arrival is at the time t at which the rates up
    to t integrate to S (Cinlar, Introduction to Stochastic Processes, 1975).
    """

    process: Literal["ramp"]
    start_rate: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = Field(
        description="Mean arrivals per second, or per iteration, at 0."
    )
    end_rate: Rate = Field(description="The same when the ramp is over.")
    over: Duration = Field(description="How long the ramp takes.")

    def times(self, draw: Draw) -> Iterator[int]:
        sums = accumulate(round(exponential(draw) * NANO) for _ in count())
        return (round(self._reached(total / NANO) * NANO) for total in sums)

    def _reached(self, expected: float) -> float:
        """The time until which so many arrivals are expected: of s t + (e - s) t^2 / (2 over), the inverse."""
        whole = (self.start_rate + self.end_rate) / 2 * self.over
        if expected >= whole:
            return self.over + (expected - whole) / self.end_rate
        slope = (self.end_rate - self.start_rate) / self.over
        root = math.sqrt(max(0.0, self.start_rate**2 + 2 * slope * expected))
        return 2 * expected / (self.start_rate + root) if expected else 0.0


class ClosedLoop(Frozen):
    """`users` at work: each sends its next request (or begins its next conversation) when the last one's answer is
    complete and it has thought. All send their first at 0; the n-th belongs to user n mod users.
    """

    process: Literal["closed-loop"]
    users: Requests = Field(description="How many; never more are in the system.")
    think: Delay = Field(0.0, description="From an answer's last token to the next request; a number, or a table.")


PROCESSES = (Burst, Constant, Poisson, Gamma, OnOff, Ramp, ClosedLoop)


def _process_of(value: Any) -> str:
    return f"process {value.get('process') if isinstance(value, dict) else getattr(value, 'process', None)}"


DRAWN = (Poisson, Gamma, OnOff, Ramp)  # those whose times are random
Open = Burst | Constant | Poisson | Gamma | OnOff | Ramp  # arrivals do not wait for answers
Arrivals = Annotated[
    Annotated[Burst, Tag("process burst")]
    | Annotated[Constant, Tag("process constant")]
    | Annotated[Poisson, Tag("process poisson")]
    | Annotated[Gamma, Tag("process gamma")]
    | Annotated[OnOff, Tag("process on-off")]
    | Annotated[Ramp, Tag("process ramp")]
    | Annotated[ClosedLoop, Tag("process closed-loop")],
    Discriminator(
        _process_of,
        custom_error_type="process",
        custom_error_message="must be a table whose process is "
        "'burst', 'constant', 'poisson', 'gamma', 'on-off', 'ramp' or 'closed-loop'",
    ),
]
TAGS = frozenset(
    f"process {name}" for name in ("burst", "constant", "poisson", "gamma", "on-off", "ramp", "closed-loop")
)


def arrival_times(process: Open, arrivals: int, key: str, clock: WorkloadClock) -> Iterator[int]:
    """Non-decreasing iterations, or nanoseconds. key: of the random numbers. Raises ScenarioError if one is too far."""
    for time in islice(process.times(uniforms(key)), arrivals):
        if time > MAX_TIME * NANO:
            raise ScenarioError(f"workload.arrivals: an arrival at {time // NANO}, later than {MAX_TIME}")
        yield on_clock(time, clock)


def on_clock(time: int, clock: WorkloadClock) -> int:
    """Billionths as the clock counts them: nanoseconds, or the iteration they fall in."""
    return time // NANO if clock == "iterations" else time


def exponential(draw: Draw) -> float:
    """Of mean 1."""
    return -math.log(draw())


def standard_gamma(shape: float, draw: Draw) -> float:
    """Gamma of scale 1, by rejection from a cubed normal (Marsaglia & Tsang 2000), and for a shape below 1 by theirs
    of shape + 1, times a uniform to the power 1 / shape. Not the standard library's, which may change.
    """
    if shape < 1:
        return float(standard_gamma(shape + 1, draw) * draw() ** (1 / shape))
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = _STANDARD.inv_cdf(draw())
        v = (1 + c * x) ** 3
        if v > 0 and math.log(draw()) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v
