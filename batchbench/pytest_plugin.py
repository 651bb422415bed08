"""pytest: run a scenario, and hold what it counted to limits, for engine authors who gate in their own suites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # loaded in every run of pytest where batchbench is installed, so nothing heavy is imported here
    from batchbench.gate_rules import Bound, Demands
    from batchbench.protocol import EngineFactory, Tokenizer
    from batchbench.results import Result


class Sweep:
    """A finished sweep. Each `assert_` raises AssertionError, naming what it found, unless every point passes.

    UsageError if it is asked for nothing, or for a baseline that is none. Paths are relative to the root of the tests.

    Limits are named by metric, as in `batchbench gate`: `assert_max(recompute_fraction=0.3)`, or, where the name is no
    identifier, `assert_max(**{"latency_iterations.p99": 80})`. pool, choices: of which points; of all if left out.
    """

    def __init__(self, folder: Path, result: Result, root: Path) -> None:
        self.folder, self.result, self._root = folder, result, root

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
        try:
            rules = tuple(
                Rule(bound, metric, limit_of(limit, relative=relative), pool, choices)
                for metric, limit in limits.items()
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._judge(Demands(rules, None if baseline is None else self._root / baseline))

    def _judge(self, demands: Demands) -> None:
        __tracebackhide__ = True
        from batchbench.gate_formats import said
        from batchbench.gating import judge, verdict_of
        from batchbench.results import load_result

        baseline = None if demands.baseline is None else load_result(demands.baseline)
        findings = judge(self.result, demands, baseline)
        if (verdict := verdict_of(findings)) != "passed":
            wrong = [f for f in findings if f.verdict != "passed"]
            lines = [f"  {finding.verdict}: {finding.rule}: {said(finding)}" for finding in wrong]
            raise AssertionError("\n".join([f"gate {verdict}", *lines]))


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
