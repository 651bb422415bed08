"""Holds a result to rules: what each rule finds at each point, and one predicate over all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from batchbench.comparable import machine_differences, matched, require_same_engine
from batchbench.counted_rows import COUNTED_TABLES, counted_rows, first_difference
from batchbench.errors import Incomparable, UsageError
from batchbench.gate_rules import Demands, Rule
from batchbench.measures import Measure, Measures, kind_of, point_name
from batchbench.results import Result
from batchbench.row_counts import lost_rows, lost_texts
from batchbench.schema import MAY_DIFFER
from batchbench.significance import ALPHA, against_baseline, against_limit

Verdict = Literal["passed", "failed", "inconclusive", "error", "incomparable"]
EXIT_CODES: dict[Verdict, int] = {"passed": 0, "failed": 3, "inconclusive": 6, "incomparable": 5, "error": 2}
_WORST: tuple[Verdict, ...] = ("incomparable", "error", "failed", "inconclusive", "passed")
VARYING = "counters may differ between runs of the clock `wall`; `allow_varying_counters` takes them all the same"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found at a point. limit: what the value was held to, the baseline's share of it added."""

    rule: str
    where: str
    verdict: Verdict
    detail: str
    value: float | None = None
    limit: float | None = None
    baseline: float | None = None
    p: float | None = None


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """The one predicate behind the exit code and every output. Nothing found is an error, never a pass."""
    found = {finding.verdict for finding in findings} or {"error"}
    return next(verdict for verdict in _WORST if verdict in found)


def judge(
    result: Result,
    demands: Demands,
    baseline: Result | None,
    *,
    alpha: float = ALPHA,
    allow_varying: bool = False,
) -> list[Finding]:
    """Every rule at every point that it covers. alpha: largest chance of a wrong verdict on what was measured.

    Raises UsageError if nothing is demanded, if a baseline is needed and not given, or given and not needed, and for an
    alpha that is none. Messages name options as a command line, a file and a call all do, but for dashes.
    """
    if not 0 < alpha < 0.5:
        raise UsageError(f"alpha {alpha:g}: must be above 0 and below 0.5")
    if not (demands.rules or demands.exact or demands.same_text):
        raise UsageError("the gate has no rule, and would let everything pass: give `max`, `exact` or `rules`")
    if demands.needs_baseline and baseline is None:
        raise UsageError("a rule compares with a baseline, and there is none: give `baseline`")
    if baseline is not None:
        if not demands.needs_baseline:
            raise UsageError(
                "there is a baseline, but no rule compares with it: give `max_increase`, `equal` or `exact`"
            )
        try:
            require_same_engine(result, baseline)
        except Incomparable as error:
            return [Finding("baseline", "", "incomparable", str(error))]
    gate = _Gate(result, baseline, alpha, allow_varying)
    return [finding for rule in demands.rules for finding in gate.hold(rule)] + [
        *(gate.exact() if demands.exact else ()),
        *(gate.same_text() if demands.same_text else ()),
    ]


class _Gate:
    def __init__(self, result: Result, baseline: Result | None, alpha: float, allow_varying: bool) -> None:
        self.result, self.baseline, self.alpha, self.allow_varying = result, baseline, alpha, allow_varying
        self.found = Measures(result)
        self.pools = self.found.pools
        self.before = None if baseline is None else Measures(baseline)
        pairs, self.new, self.gone = ([], [], []) if baseline is None else matched(result, baseline)
        self.twins = dict(pairs)  # place of a point -> that of the same one in the baseline

    # ---- rules -------------------------------------------------------------------------------

    def hold(self, rule: Rule) -> Iterator[Finding]:
        covered = [place for place, pool in enumerate(self.pools) if rule.covers(pool)]
        if not covered:
            there = "; ".join(map(point_name, self.pools))
            yield Finding(str(rule), "", "error", f"no point is {rule.where}; there are: {there}")
        for place in covered:
            yield self._at(rule, place)
        if rule.needs_baseline:
            yield from self._missing(str(rule), [pool for pool in self.gone if rule.covers(pool)])

    def _at(self, rule: Rule, place: int) -> Finding:
        name, where = str(rule), point_name(self.pools[place])
        twin = self.twins.get(place)
        if rule.needs_baseline and twin is None:
            return Finding(name, where, "error", "the baseline has no such point")
        try:
            measure = self.found.at(rule.metric, place)
            before = (
                self.before.at(rule.metric, twin) if self.before and rule.needs_baseline and twin is not None else None
            )
        except UsageError as error:
            return Finding(name, where, "error", str(error))
        if wrong := self._unusable(rule, place, measure, before):
            verdict: Verdict = "incomparable" if wrong.startswith("measured on") else "error"
            return Finding(name, where, verdict, wrong, measure.value, None, before.value if before else None)
        return _held(rule, where, measure, before, self.alpha)

    def _unusable(self, rule: Rule, place: int, measure: Measure, before: Measure | None) -> str:
        """Why this cannot be judged; empty if it can."""
        for whose, one in (("", measure), ("the baseline's ", before)):
            if one is not None and one.value is None:
                return f"{whose}{rule.metric} is null: {one.why}"
        timed = kind_of(rule.metric.partition(".")[0], "iterations") == "measured"
        varying = self.pools[place]["counters"] == MAY_DIFFER and not timed
        if varying and not self.allow_varying:
            return VARYING
        if measure.kind == "counted" or (varying and not measure.samples):
            return ""
        if rule.bound == "equal":
            return f"{rule.metric} is measured: no two runs are equal; use `max_increase`"
        if not measure.samples or (before is not None and not before.samples):
            return f"{rule.metric} is known of one run only, which shows nothing; columns of `repetitions` can be gated"
        differences = [] if before is None or self.baseline is None else machine_differences(self.result, self.baseline)
        return f"measured on different machines: {'; '.join(differences)}" if differences else ""

    def _missing(self, rule: str, gone: Sequence[Any]) -> Iterator[Finding]:
        for pool in gone:
            yield Finding(rule, point_name(pool), "error", "the baseline has this point, the result does not")

    def _unpaired(self, rule: str) -> Iterator[Finding]:
        yield from self._missing(rule, self.gone)
        for pool in self.new:
            yield Finding(rule, point_name(pool), "error", "the baseline has no such point")

    # ---- everything that was counted ---------------------------------------------------------

    def exact(self) -> Iterator[Finding]:
        """Every counted column of every table, row by row."""
        assert self.baseline is not None
        yield from self._unpaired("exact")
        for place, twin in self.twins.items():
            where = point_name(self.pools[place])
            if self.pools[place]["counters"] == MAY_DIFFER and not self.allow_varying:
                yield Finding("exact", where, "error", VARYING)
                continue
            yield self._exact_at(where, place, twin)

    def _exact_at(self, where: str, place: int, twin: int) -> Finding:
        assert self.baseline is not None and self.before is not None
        sides = ((self.result, place, self.pools[place]), (self.baseline, twin, self.before.pools[twin]))
        for whose, side in zip(("", "the baseline: "), sides, strict=True):
            if lost := lost_rows(*side):
                return Finding("exact", where, "error", whose + lost)
        rows, differences = 0, dict[str, str]()
        for table in COUNTED_TABLES:
            mine, theirs = (counted_rows(result, table, at, pool["clock"]) for result, at, pool in sides)
            rows += len(mine)
            if found := first_difference(mine, theirs):
                differences[table] = found
        if not differences:
            return Finding("exact", where, "passed", f"{rows} rows of {len(COUNTED_TABLES)} tables are equal")
        (table, first), *others = differences.items()
        also = f"; also in {', '.join(name for name, _ in others)}" if others else ""
        return Finding("exact", where, "failed", f"{table}: {first}{also}")

    def same_text(self) -> Iterator[Finding]:
        """Every token of every request."""
        yield from self._unpaired("same_text")
        for place, twin in self.twins.items():
            yield self._same_text_at(point_name(self.pools[place]), place, twin)

    def _same_text_at(self, where: str, place: int, twin: int) -> Finding:
        assert self.baseline is not None and self.before is not None
        if None in (self.pools[place]["text_digest"], self.before.pools[twin]["text_digest"]):
            return Finding("same_text", where, "error", "one of the two computed no text")
        for whose, result, at in (("", self.result, place), ("the baseline: ", self.baseline, twin)):
            if lost := lost_texts(result, at):
                return Finding("same_text", where, "error", whose + lost)
        mine, theirs = (
            result.files.point("texts", at, ["request_id", "token_ids"])
            for result, at in ((self.result, place), (self.baseline, twin))
        )
        differs = first_difference(mine, theirs)
        detail = differs or f"the texts of {len(mine)} requests are equal"
        return Finding("same_text", where, "failed" if differs else "passed", detail)


def _held(rule: Rule, where: str, measure: Measure, before: Measure | None, alpha: float) -> Finding:
    """The value against the limit: exactly if it was counted, by a test if it was measured."""
    assert measure.value is not None
    known = None if before is None or before.value is None else before.value
    allowed = _allowed(rule, known)
    upper, shown_limit = rule.bound in ("max", "max_increase"), float(allowed)
    if measure.kind == "counted" or not measure.samples:
        value = Fraction(repr(measure.value))  # shortest decimal: 0.1 is a tenth, as in the rule
        how = "counted" if measure.kind == "counted" else "counted in the first repetition"
        how += f", {measure.note}" if measure.note else ""
        kept = value == allowed if rule.bound == "equal" else value <= allowed if upper else value >= allowed
        return Finding(str(rule), where, "passed" if kept else "failed", how, measure.value, shown_limit, known)
    if before is None:
        shown = against_limit(measure.samples, shown_limit, upper=upper, alpha=alpha)
    else:
        shifted = [float(_allowed(rule, sample)) for sample in before.samples]
        shown = against_baseline(measure.samples, shifted, upper=upper, alpha=alpha)
    sides: dict[str, Verdict] = {"above": "failed" if upper else "passed", "below": "passed" if upper else "failed"}
    verdict = sides.get(shown.side, "inconclusive")
    detail = f"measured, n={len(measure.samples)}" + (f" and {len(before.samples)}" if before else "")
    detail += ", no value breaks the limit" if shown.p is None else f", p={shown.p:.2g}"
    detail += f"; would settle it: {shown.settles}" if shown.settles else ""
    return Finding(str(rule), where, verdict, detail, measure.value, shown_limit, known, shown.p)


def _allowed(rule: Rule, before: float | None) -> Fraction:
    """The limit, with the baseline's value in it."""
    if before is None:
        assert rule.limit is not None
        return rule.limit.amount
    base = Fraction(repr(before))
    if rule.limit is None:
        return base
    change = abs(base) * rule.limit.amount if rule.limit.relative else rule.limit.amount
    return base + change if rule.bound == "max_increase" else base - change
