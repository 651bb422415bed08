"""pytest: run a scenario, and hold what it counted to limits, for engine authors who gate in their own suites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # loaded in every run of pytest where batchbench is installed, so nothing heavy is imported here
    from batchbench.gate_rules import Bound, Demands, Rule
    from batchbench.protocol import EngineFactory, Tokenizer
    from batchbench.results import Result


class Sweep:
    """A finished sweep. Each `assert_` raises AssertionError, naming what it found, unless every point passes.

    UsageError if it is asked for nothing, for a limit that is no number, or for a baseline that is none. Paths are
    relative to the root of the tests.

    Limits are named by metric, as in `batchbench gate`: `assert_max(recompute_fraction=0.3)`, or, where the name is no
    identifier, `assert_max(**{"latency_iterations.p99": 80})`. pool, choices: of which points; of all if left out.
    """

    def __init__(self, folder: Path, result: Result, root: Path) -> None:
        self.folder, self.result, self._root = folder, result, root
        self._options: dict[str, Any] = {}

    def with_options(self, *, alpha: float = 0.05, allow_varying_counters: bool = False) -> Sweep:
        """The same sweep, held with these, as `batchbench gate` has them. alpha: largest chance of a wrong verdict on
        what was measured, for each limit and point. Counters that may differ between runs are refused unless allowed.
        """
        other = Sweep(self.folder, self.result, self._root)
        other._options = {"alpha": alpha, "allow_varying": allow_varying_counters}
        return other

    def assert_max(self, *, pool: int | None = None, choices: str = "", **limits: float) -> None:
        """At most these."""
        self._hold("max", None, pool, choices, limits)

    def assert_min(self, *, pool: int | None = None, choices: str = "", **limits: float) -> None:
        """At least these."""
        self._hold("min", None, pool, choices, limits)

    def assert_max_increase(
        self, baseline: str | Path, *, pool: int | None = None, choices: str = "", **limits: float | str
    ) -> None:
        """At most so much above the baseline: 0.01, or "5%"."""
        self._hold("max_increase", baseline, pool, choices, limits)

    def assert_max_decrease(
        self, baseline: str | Path, *, pool: int | None = None, choices: str = "", **limits: float | str
    ) -> None:
        """At most so much below it."""
        self._hold("max_decrease", baseline, pool, choices, limits)

    def assert_equal(self, baseline: str | Path, *metrics: str, pool: int | None = None, choices: str = "") -> None:
        """Exactly the baseline's."""
        from batchbench.gate_rules import Demands, Rule

        __tracebackhide__ = True
        rules = tuple(Rule("equal", metric, None, pool, choices) for metric in metrics)
        self._judge(Demands(_some("equal", rules), self._root / baseline))

    def assert_exact(self, baseline: str | Path) -> None:
        """Every counter of every table as in the baseline."""
        from batchbench.gate_rules import Demands

        self._judge(Demands(baseline=self._root / baseline, exact=True))

    def assert_same_text(self, baseline: str | Path) -> None:
        """Every token as in the baseline."""
        from batchbench.gate_rules import Demands

        self._judge(Demands(baseline=self._root / baseline, same_text=True))

    def assert_gate(self, rules: str | Path) -> None:
        """The rules of a gate's file."""
        from batchbench.gate_rules import load_demands

        self._judge(load_demands(self._root / rules))

    def _hold(
        self, bound: Bound, baseline: str | Path | None, pool: int | None, choices: str, limits: dict[str, Any]
    ) -> None:
        from batchbench.errors import UsageError
        from batchbench.gate_rules import Demands, Rule, limit_of

        __tracebackhide__ = True
        relative = baseline is not None
        rules = []
        for metric, limit in limits.items():
            try:
                rules.append(Rule(bound, metric, limit_of(limit, relative=relative), pool, choices))
            except ValueError as error:
                raise UsageError(f"assert_{bound}: {metric}: {error}") from None
        self._judge(Demands(_some(bound, rules), None if baseline is None else self._root / baseline))

    def _judge(self, demands: Demands) -> None:
        __tracebackhide__ = True
        from batchbench.gate_formats import said
        from batchbench.gating import judge, verdict_of
        from batchbench.results import load_result

        baseline = None if demands.baseline is None else load_result(demands.baseline)
        findings = judge(self.result, demands, baseline, **self._options)
        if (verdict := verdict_of(findings)) != "passed":
            wrong = [f for f in findings if f.verdict != "passed"]
            lines = [f"  {finding.verdict}: {finding.rule}: {said(finding)}" for finding in wrong]
            raise AssertionError("\n".join([f"gate {verdict}", *lines]))


def _some(bound: str, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """All of them. Raises UsageError if there is none."""
    from batchbench.errors import UsageError

    if not rules:
        raise UsageError(f"assert_{bound}: names no metric, and would let everything pass")
    return tuple(rules)


@pytest.fixture(scope="session")
def batchbench_sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Sweep]:
    """`batchbench_sweep(scenario, engine="own", tokenizer=None)` -> Sweep.

    scenario: a file; relative, to the root of the tests. engine: "own", "schedule", or your factory: called with a pool
    size in blocks, and with what the point changes by name (`victim="oldest"`), it returns a `BenchEngine`. tokenizer:
    that engine's, which prompts that are texts need. A scenario runs once a session with each engine and tokenizer.
    """
    done: dict[tuple[Path, Any, int], tuple[Any, Any, Sweep]] = {}  # what is one's own by its identity, and kept alive

    def sweep(scenario: str | Path, engine: str | EngineFactory = "own", tokenizer: Tokenizer | None = None) -> Sweep:
        from batchbench.running import run_scenario
        from batchbench.scenario import load_scenario

        path = (request.config.rootpath / scenario).resolve()
        key = path, engine if isinstance(engine, str) else id(engine), id(tokenizer)
        if key not in done:
            folder = tmp_path_factory.mktemp(path.stem, numbered=True)
            result = run_scenario(load_scenario(path), folder, engine, tokenizer=tokenizer)
            done[key] = engine, tokenizer, Sweep(folder, result, request.config.rootpath)
        return done[key][2]

    return sweep
