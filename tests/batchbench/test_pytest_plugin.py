"""The pytest plugin, as an engine's author uses it: in a suite of their own, run by a pytest of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
DAY34 = Path("scenarios/day34.toml").resolve()
RESULTS = Path("results").resolve()
CI = Path("docs/ci.md").resolve()


@pytest.fixture
def suite(pytester, monkeypatch):
    """Writes a test module beside a scenario and runs it in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(RESULTS.parent))  # the working folder is pytester's
    pytester.makefile(".toml", day34=DAY34.read_text())

    def run(body, *arguments):
        pytester.makepyfile(body)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist", *arguments)

    return run


def test_limits_that_hold_and_that_do_not(suite):
    done = suite(
        f"""
        def test_within(batchbench_sweep):
            sweep = batchbench_sweep("day34.toml", engine="schedule")
            sweep.assert_max(recompute_fraction=0.4, preemptions=8)
            sweep.assert_max(pool=48, preemptions=0)
            sweep.assert_min(occupancy=0.24)
            sweep.assert_max(**{{"latency_iterations.p99": 100}})
            assert sweep.result.rows("pools")[4]["recomputed_tokens"] == 107

        def test_beyond(batchbench_sweep):
            batchbench_sweep("day34.toml", engine="schedule").assert_max(recompute_fraction=0.38)

        def test_nothing(batchbench_sweep):
            batchbench_sweep("day34.toml", engine="schedule").assert_max(pool=13, recompute_fraction=1)

        def test_no_metric(batchbench_sweep):
            batchbench_sweep("day34.toml", engine="schedule").assert_max(recompute_fractoin=1)

        def test_another_engine(batchbench_sweep):
            batchbench_sweep("day34.toml", engine="schedule").assert_exact({str(RESULTS / "day34")!r})
        """
    )
    done.assert_outcomes(passed=1, failed=4)
    done.stdout.fnmatch_lines([
        "*gate failed*",
        "*failed: recompute_fraction <= 0.38: pool 12: is 0.399254, limit 0.38 (counted)",
        "*gate error*",
        "*error: recompute_fraction@13 <= 1: no point is @13*",
        "*'recompute_fractoin' is no metric; did you mean 'recompute_fraction'?*",
        "*incomparable: baseline: *engine.engine schedule against batchbench*",
    ])  # fmt: skip


def test_what_is_no_limit_is_refused_in_the_words_of_the_call(suite):
    done = suite(
        f"""
        import pytest
        from batchbench.errors import UsageError

        BASELINE = {str(RESULTS / "day34")!r}

        @pytest.mark.parametrize(("call", "message"), [
            (lambda s: s.assert_max(preemptions=None), "assert_max: preemptions: None is no number"),
            (lambda s: s.assert_min(preemptions=True), "assert_min: preemptions: True is no number"),
            (lambda s: s.assert_max(preemptions=[1]), r"assert_max: preemptions: \\[1\\] is no number"),
            (lambda s: s.assert_max(preemptions="5%"), "assert_max: preemptions: '5%' is a share"),
            (lambda s: s.assert_max_increase(BASELINE, preemptions=-1), "assert_max_increase: preemptions: -1 is neg"),
            (lambda s: s.assert_max(), "assert_max: names no metric"),
            (lambda s: s.assert_max(pool=12), "assert_max: names no metric"),
            (lambda s: s.assert_equal(BASELINE), "assert_equal: names no metric"),
            (lambda s: s.with_options(alpha=0.5).assert_max(preemptions=8), "alpha 0.5: must be"),
        ])
        def test_refused(batchbench_sweep, call, message):
            with pytest.raises(UsageError, match=message) as refused:
                call(batchbench_sweep("day34.toml", engine="schedule"))
            assert "--" not in str(refused.value)

        def test_numbers_of_other_kinds(batchbench_sweep):
            from fractions import Fraction
            import numpy as np
            sweep = batchbench_sweep("day34.toml", engine="schedule")
            sweep.assert_max(preemptions=np.int64(8), recompute_fraction=Fraction(2, 5), occupancy=np.float64(1))
        """
    )
    done.assert_outcomes(passed=10)


def test_equal_and_options(suite, pytester):
    """In real time counters are refused unless allowed, and five repetitions decide at 0.05 and not at 0.01."""
    text = DAY34.read_text().replace("[48, 32, 24, 16, 12, 8]", "[48]")
    pytester.makefile(".toml", wall=text.replace("[engine]", 'clock = "wall"\n[run]\nrepetitions = 5\n[engine]', 1))
    done = suite(
        """
        import pytest

        def test_equal(batchbench_sweep):
            sweep = batchbench_sweep("day34.toml", engine="schedule")
            sweep.assert_equal(sweep.folder, "preemptions", "latency_iterations.p99")
            with pytest.raises(AssertionError, match="wall_s is measured: no two runs are equal; use `max_increase`"):
                sweep.assert_equal(sweep.folder, "wall_s", pool=12)

        def test_options(batchbench_sweep):
            sweep = batchbench_sweep("wall.toml")
            with pytest.raises(AssertionError, match="`allow_varying_counters` takes them"):
                sweep.assert_max(preemptions=8)
            sweep.with_options(allow_varying_counters=True).assert_max(preemptions=100)
            sweep.assert_max(wall_s=1000)
            with pytest.raises(AssertionError, match="would settle it: at least 7 repetitions"):
                sweep.with_options(alpha=0.01).assert_max(wall_s=1000)
        """
    )
    done.assert_outcomes(passed=2)


@pytest.mark.slow
def test_against_a_baseline_and_a_file(suite):
    done = suite(
        f"""
        BASELINE = {str(RESULTS / "day34")!r}

        def test_exact(batchbench_sweep):
            sweep = batchbench_sweep("day34.toml")
            sweep.assert_exact(BASELINE)
            sweep.assert_max_increase(BASELINE, recompute_fraction=0, mean_latency_iterations="0%")
            sweep.assert_max_decrease(BASELINE, occupancy=0)
            sweep.assert_gate({str(DAY34.with_name("day34.gate.toml"))!r})

        def test_once(batchbench_sweep):
            assert batchbench_sweep("day34.toml") is batchbench_sweep("day34.toml")
        """
    )
    done.assert_outcomes(passed=2)


@pytest.mark.slow
def test_an_engine_of_ones_own(suite):
    """Any object with the protocol's members; here one that counts how often it is stepped."""
    done = suite(
        """
        from batchbench import engine_factory, load_scenario

        def test_mine(batchbench_sweep, request):
            inner = engine_factory("own", load_scenario(request.config.rootpath / "day34.toml").engine)
            steps = []

            class Mine:
                def __init__(self, pool_blocks):
                    self.engine = inner(pool_blocks)

                def __getattr__(self, name):
                    return getattr(self.engine, name)

                def step(self):
                    steps.append(1)
                    return self.engine.step()

            batchbench_sweep("day34.toml", engine=Mine).assert_max(recompute_fraction=0.4)
            assert len(steps) == 24 + 32 + 36 + 52 + 64 + 100
        """
    )
    done.assert_outcomes(passed=1)


def test_the_suite_in_the_docs_passes(suite, pytester):
    (body,) = re.findall(r"```python\n(.*?)```", CI.read_text(), re.DOTALL)
    for folder in ("scenarios", "results"):
        (pytester.path / folder).symlink_to(RESULTS.parent / folder)
    suite(body).assert_outcomes(passed=1)


def test_the_plugin_costs_a_suite_nothing(suite):
    """It is loaded in every run of pytest, and must not bring pandas or torch along."""
    done = suite(
        """
        import sys

        def test_light():
            assert not {"torch", "pandas", "pyarrow", "numpy"} & sys.modules.keys()
        """
    )
    done.assert_outcomes(passed=1)
