"""Distributions of lengths and delays: what a scenario may say of them, and the value at every quantile.

A value is its distribution's inverse CDF at a uniform random number, so one number makes one value, two numbers that
are correlated make correlated lengths, and a range is cut out exactly: what is drawn has the distribution of a draw
that is repeated until it falls in min..max. Nothing is moved to a bound, where it would pile up.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from batchbench.length_files import read_columns
from batchbench.limits import MAX_TOKENS, Duration, Frozen, Tokens
from batchbench.paths import FilePath

Quantile = Callable[[float], int]  # from a number in (0, 1)
NANO = 10**9  # delays and times are whole billionths of a second, or of an iteration
MAX_ZIPF_TOKENS = 1_000_000  # of a table with one entry per length
_LEAST_SHARE = 0.01  # of a distribution between min and max: with less, the range is not what was meant
_STANDARD = NormalDist()
_BELOW_ONE = 1 - 2.0**-53

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Sigma = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]


class FixedLength(Frozen):
    """Always the same."""

    dist: Literal["fixed"]
    value: Tokens = Field(description="The length.")

    def quantile(self) -> Quantile:
        return lambda u: self.value


def _require_range(least: float, greatest: float) -> None:
    if least > greatest:
        raise ValueError(f"min = {least} is above max = {greatest}")


class _Ranged(Frozen):
    min: Tokens = Field(1, description="Least length.")
    max: Tokens = Field(MAX_TOKENS, description="Greatest length.")

    @model_validator(mode="after")
    def _a_range(self) -> _Ranged:
        _require_range(self.min, self.max)
        return self


class UniformLength(_Ranged):
    """Every whole number from min to max, equally likely."""

    dist: Literal["uniform"]
    min: Tokens = Field(description="Least length.")
    max: Tokens = Field(description="Greatest length.")

    def quantile(self) -> Quantile:
        least, greatest, count = self.min, self.max, self.max - self.min + 1
        return lambda u: min(least + int(u * count), greatest)  # rounding may carry u * count up to count


class NormalLength(_Ranged):
    """Normal, rounded to the nearest whole number, of those from min to max."""

    dist: Literal["normal"]
    mean: Positive = Field(description="Mean, before min and max cut.")
    std: Positive = Field(description="Standard deviation, before min and max cut.")

    @model_validator(mode="after")
    def _enough_inside(self) -> NormalLength:
        _check_share(*self._range, f"min = {self.min}..max = {self.max}")
        return self

    @property
    def _range(self) -> tuple[float, float]:
        return (self.min - 0.5 - self.mean) / self.std, (self.max + 0.5 - self.mean) / self.std

    def quantile(self) -> Quantile:
        mean, std, deviate = self.mean, self.std, _deviate_between(*self._range)
        return _whole(lambda u: mean + std * deviate(u), self.min, self.max)


class LognormalLength(_Ranged):
    """exp of a normal whose standard deviation is sigma, rounded, of those from min to max.

    The normal's mean is ln(mean) - sigma^2 / 2, so that `mean` is the lengths' own; their median is
    mean * exp(-sigma^2 / 2).
    """

    dist: Literal["lognormal"]
    mean: Positive = Field(description="Mean of the lengths, before min and max cut.")
    sigma: Sigma = Field(description="Standard deviation of the lengths' natural logarithm.")

    @model_validator(mode="after")
    def _enough_inside(self) -> LognormalLength:
        _check_share(*self._range, f"min = {self.min}..max = {self.max}")
        return self

    @property
    def _range(self) -> tuple[float, float]:
        mu = _log_mean(self.mean, self.sigma)
        return (math.log(self.min - 0.5) - mu) / self.sigma, (math.log(self.max + 0.5) - mu) / self.sigma

    def quantile(self) -> Quantile:
        mu, sigma, deviate = _log_mean(self.mean, self.sigma), self.sigma, _deviate_between(*self._range)
        return _whole(lambda u: math.exp(mu + sigma * deviate(u)), self.min, self.max)


class ZipfLength(_Ranged):
    """P(n) proportional to n^-alpha, for n from min to max."""

    dist: Literal["zipf"]
    alpha: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = Field(description="Exponent.")
    max: Annotated[int, Field(ge=1, le=MAX_ZIPF_TOKENS)] = Field(description="Greatest length.")

    def quantile(self) -> Quantile:
        least, greatest = self.min, self.max
        below = array("d", accumulate(n**-self.alpha for n in range(least, greatest + 1)))
        return lambda u: min(least + bisect_right(below, u * below[-1]), greatest)


class EmpiricalLength(_Ranged):
    """The lengths of one column of a file, equally likely, of those from min to max."""

    dist: Literal["empirical"]
    file: FilePath = Field(description="Path, from the scenario's folder, of one or two columns of numbers.")
    column: Annotated[int, Field(ge=1, le=2)] = Field(1, description="Which column, from 1.")

    def quantile(self) -> Quantile:
        """Raises ScenarioError if the file cannot be read or has no such length."""
        listed = sorted(read_columns(self.file, self.column, self.min, self.max)[self.column - 1])
        return lambda u: listed[min(int(u * len(listed)), len(listed) - 1)]


class UniformDelay(Frozen):
    """Equally likely from min to max."""

    dist: Literal["uniform"]
    min: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)] = Field(description="Least delay.")
    max: Duration = Field(description="Greatest delay.")

    @model_validator(mode="after")
    def _a_range(self) -> UniformDelay:
        _require_range(self.min, self.max)
        return self

    def quantile(self) -> Quantile:
        least, span = self.min, self.max - self.min
        return lambda u: round((least + u * span) * NANO)


class ExponentialDelay(Frozen):
    """Memoryless: P(delay > t) = exp(-t / mean)."""

    dist: Literal["exponential"]
    mean: Duration = Field(description="Mean delay.")

    def quantile(self) -> Quantile:
        mean = self.mean
        return lambda u: round(-mean * math.log1p(-u) * NANO)


class LognormalDelay(Frozen):
    """exp of a normal, of those up to max; mean and sigma as of a length."""

    dist: Literal["lognormal"]
    mean: Duration = Field(description="Mean delay, before max cuts.")
    sigma: Sigma = Field(description="Standard deviation of the delays' natural logarithm.")
    max: Duration = Field(1e7, description="Greatest delay.")

    @model_validator(mode="after")
    def _enough_inside(self) -> LognormalDelay:
        _check_share(*self._range, f"0..max = {self.max}")
        return self

    @property
    def _range(self) -> tuple[float, float]:
        return -math.inf, (math.log(self.max) - _log_mean(self.mean, self.sigma)) / self.sigma

    def quantile(self) -> Quantile:
        mu, sigma, deviate = _log_mean(self.mean, self.sigma), self.sigma, _deviate_between(*self._range)
        return lambda u: round(math.exp(mu + sigma * deviate(u)) * NANO)


_NUMBER = "a number"
LENGTHS = (FixedLength, UniformLength, NormalLength, LognormalLength, ZipfLength, EmpiricalLength)
DELAYS = (UniformDelay, ExponentialDelay, LognormalDelay)


def _dist_of(value: Any) -> str | None:
    """Which member of a union a value is meant to be: by its key `dist`, if it is a table."""
    if isinstance(value, (int, float)):
        return _NUMBER
    dist = value.get("dist") if isinstance(value, dict) else getattr(value, "dist", None)
    return None if dist is None else f"dist {dist}"


Length = Annotated[
    Annotated[Tokens, Tag(_NUMBER)]
    | Annotated[FixedLength, Tag("dist fixed")]
    | Annotated[UniformLength, Tag("dist uniform")]
    | Annotated[NormalLength, Tag("dist normal")]
    | Annotated[LognormalLength, Tag("dist lognormal")]
    | Annotated[ZipfLength, Tag("dist zipf")]
    | Annotated[EmpiricalLength, Tag("dist empirical")],
    Discriminator(
        _dist_of,
        custom_error_type="dist",
        custom_error_message="must be an integer, or a table whose dist is "
        "'fixed', 'uniform', 'normal', 'lognormal', 'zipf' or 'empirical'",
    ),
]
Delay = Annotated[
    Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False), Tag(_NUMBER)]
    | Annotated[UniformDelay, Tag("dist uniform")]
    | Annotated[ExponentialDelay, Tag("dist exponential")]
    | Annotated[LognormalDelay, Tag("dist lognormal")],
    Discriminator(
        _dist_of,
        custom_error_type="dist",
        custom_error_message="must be a number, or a table whose dist is 'uniform', 'exponential' or 'lognormal'",
    ),
]
TAGS = frozenset([_NUMBER, *(f"dist {name}" for name in ("fixed", "uniform", "normal", "lognormal", "zipf"))]) | {
    "dist empirical",
    "dist exponential",
}


def length_quantile(length: Length) -> Quantile:
    """Tokens, or turns, at a number in (0, 1). Raises ScenarioError if a file cannot be read."""
    return (lambda u: length) if isinstance(length, int) else length.quantile()


def delay_quantile(delay: Delay) -> Quantile:
    """Billionths of a second, or of an iteration, at a number in (0, 1)."""
    if isinstance(delay, (int, float)):
        fixed = round(delay * NANO)
        return lambda u: fixed
    return delay.quantile()


def uniforms(key: str) -> Callable[[], float]:
    """Draws from (0, 1): the same for one key on every machine and in every process."""
    draw = random.Random(key).random
    return lambda: draw() or 2.0**-54  # `random` may give 0, of which there is no logarithm


def correlated(first: float, second: float, rank_correlation: float) -> float:
    """A uniform number whose Spearman correlation with `first` is rank_correlation, made with the independent `second`.

    A Gaussian copula: the two are the quantiles of normals whose Pearson correlation is 2 sin(pi r / 6), which gives
    the ranks the correlation r (Kruskal, Ordinal Measures of Association, 1958).
    """
    extreme = abs(rank_correlation) == 1  # where the sine is a last bit short of it
    pearson = rank_correlation if extreme else 2 * math.sin(math.pi * rank_correlation / 6)
    mixed = pearson * _STANDARD.inv_cdf(first) + math.sqrt(1 - pearson * pearson) * _STANDARD.inv_cdf(second)
    return _inside(_STANDARD.cdf(mixed))


def _inside(u: float) -> float:
    """u, or the nearest number that is neither 0 nor 1."""
    return max(2.0**-1074, min(_BELOW_ONE, u))


def _log_mean(mean: float, sigma: float) -> float:
    """Mean of the logarithms of a lognormal that has this mean."""
    return math.log(mean) - sigma * sigma / 2


def _check_share(low: float, high: float, where: str) -> None:
    """Refuse a range that a normal distribution hardly meets; low, high: in standard deviations from the mean."""
    share = _STANDARD.cdf(high) - _STANDARD.cdf(low)
    if share < _LEAST_SHARE:
        raise ValueError(f"only {share:.2g} of the distribution lies in {where}; at least {_LEAST_SHARE} must")


def _deviate_between(low: float, high: float) -> Callable[[float], float]:
    """Standard normal deviates, of those between low and high, by their quantile."""
    below = _STANDARD.cdf(low)
    share = _STANDARD.cdf(high) - below
    return lambda u: _STANDARD.inv_cdf(_inside(below + u * share))


def _whole(value: Callable[[float], float], least: int, greatest: int) -> Quantile:
    """Values rounded to the nearest whole number; the bounds only catch the last bit of a quantile at the edge."""
    return lambda u: max(least, min(greatest, math.floor(value(u) + 0.5)))
