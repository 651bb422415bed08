"""What a gate demands: rules from a command line or a file, as data."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from batchbench.errors import ScenarioError, UsageError
from batchbench.text_files import read_text

_MAX_BYTES = 2**24  # of a file of rules

Bound = Literal["max", "min", "max_increase", "max_decrease", "equal"]
BOUNDS: tuple[Bound, ...] = ("max", "min", "max_increase", "max_decrease", "equal")


@dataclass(frozen=True, slots=True)
class Limit:
    """A number, or a share of the baseline's value. Decimals are taken at their word: 0.1 is a tenth."""

    amount: Fraction
    relative: bool = False

    def __str__(self) -> str:
        shown = f"{float(100 * self.amount if self.relative else self.amount):.15g}"
        return f"{shown}%" if self.relative else shown


@dataclass(frozen=True, slots=True)
class Rule:
    """One demand on one metric. pool, choices: of which points; of every one if None and empty.

    choices: as the tables name them, all or some: `victim oldest`. limit: None for `equal`.
    """

    bound: Bound
    metric: str
    limit: Limit | None = None
    pool: int | None = None
    choices: str = ""

    def __str__(self) -> str:
        words = {"max": "<=", "min": ">=", "max_increase": "<= baseline +", "max_decrease": ">= baseline -"}
        demand = "== baseline" if self.limit is None else f"{words[self.bound]} {self.limit}"
        return f"{self.metric}{self.where} {demand}"

    @property
    def where(self) -> str:
        if self.pool is None and not self.choices:
            return ""
        return f"@{self.pool or ''}" + (f":{self.choices}" if self.choices else "")

    @property
    def needs_baseline(self) -> bool:
        return self.bound in ("max_increase", "max_decrease", "equal")

    def covers(self, pool: Mapping[str, Any]) -> bool:
        """Whether it is about this row of `pools`."""
        parts = {part.strip() for part in self.choices.split(",")} - {""}
        return self.pool in (None, pool["pool_blocks"]) and parts <= set(pool["choices"].split(", "))


@dataclass(frozen=True, slots=True)
class Demands:
    """All that a gate holds a result to. baseline: a result folder. exact: every counter as in the baseline, in every
    table; same_text: every token.
    """

    rules: tuple[Rule, ...] = ()
    baseline: Path | None = None
    exact: bool = False
    same_text: bool = False

    @property
    def needs_baseline(self) -> bool:
        return self.exact or self.same_text or any(rule.needs_baseline for rule in self.rules)


def limit_of(text: str | float, *, relative: bool) -> Limit:
    """0.01, 1e-3, or, where a baseline is behind it, 5%. Raises ValueError, for what is no number at all, too."""
    if isinstance(text, bool) or not isinstance(text, (str, Real)):
        raise ValueError(f"{text!r} is no number")
    share = isinstance(text, str) and text.strip().endswith("%")
    if share and not relative:
        raise ValueError(f"{text!r} is a share, and there is no baseline that it is of")
    number = float(text.strip().removesuffix("%") if isinstance(text, str) else text)
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not finite")
    if relative and number < 0:
        raise ValueError(f"{text!r} is negative")
    amount = Fraction(repr(number))
    return Limit(amount / 100 if share else amount, share)


def parse_rule(bound: Bound, text: str) -> Rule:
    """METRIC=LIMIT, METRIC@POOL=LIMIT or METRIC=LIMIT@POOL, and after a pool :CHOICES; no limit for `equal`.

    Raises UsageError.
    """
    option = f"--{bound.replace('_', '-')} {text}"
    metric, equals, limit = text.partition("=")
    metric, at, where = metric.partition("@")
    if not at and "@" in limit:
        limit, at, where = limit.partition("@")
    if bound == "equal" and equals and not at:
        raise UsageError(f"{option}: takes METRIC or METRIC@POOL")
    if not metric.strip() or (bound != "equal" and not limit.strip()):
        raise UsageError(f"{option}: must be METRIC=LIMIT, such as recompute_fraction=0.30")
    pool, _, choices = where.partition(":")
    try:
        if at and not (pool.strip().isdecimal() or (not pool.strip() and choices)):
            raise ValueError(f"{pool!r} is no pool size in blocks")
        found = None if bound == "equal" else limit_of(limit, relative=bound in ("max_increase", "max_decrease"))
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    return Rule(bound, metric.strip(), found, int(pool) if pool.strip() else None, choices.strip())


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _FileRule(_Strict):
    metric: Text
    max: Number | None = None
    min: Number | None = None
    max_increase: Number | Text | None = None
    max_decrease: Number | Text | None = None
    equal: Literal[True] | None = None
    pool: Annotated[int, Field(ge=1)] | None = None
    choices: str = ""

    def rules(self) -> list[Rule]:
        given = {bound: value for bound in BOUNDS if (value := getattr(self, bound)) is not None}
        if not given:
            raise ValueError(f"the rule on {self.metric!r} has none of {', '.join(BOUNDS)}")
        return [
            Rule(
                bound,
                self.metric,
                None if bound == "equal" else limit_of(value, relative=bound in ("max_increase", "max_decrease")),
                self.pool,
                self.choices,
            )
            for bound, value in given.items()
        ]


class _File(_Strict):
    baseline: Text | None = None
    exact: bool = False
    same_text: bool = False
    rules: list[_FileRule] = []


def load_demands(path: Path) -> Demands:
    """A gate's file (TOML); its baseline is relative to it. Raises UsageError."""
    try:
        file = _File.model_validate(tomllib.loads(read_text(path, _MAX_BYTES)))
        rules = tuple(rule for entry in file.rules for rule in entry.rules())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"gate file {path}: {where}: {first['msg']}") from None
    except ScenarioError as error:
        raise UsageError(f"gate file {error}") from None
    except (ValueError, RecursionError) as error:  # TOML, a limit
        raise UsageError(f"gate file {path}: {error}") from None
    if not (rules or file.exact or file.same_text):
        raise UsageError(f"gate file {path}: demands nothing")
    baseline = None if file.baseline is None else path.parent / file.baseline
    return Demands(rules, baseline, file.exact, file.same_text)
