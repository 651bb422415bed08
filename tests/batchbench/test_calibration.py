"""Calibration files: measured, written whole, refused when damaged or of another engine; `cheaper` follows them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest

from batchbench import engine_factory
from batchbench.adapters import calibrate as measuring
from batchbench.calibration import Calibration, CopyPoint, ResumePoint, Timing, ladder, load_calibration
from batchbench.calibration import save_calibration as save
from batchbench.driver import run_workload
from batchbench.errors import UsageError
from batchbench.protocol import RequestSpec
from batchbench.scenario import EngineSettings
from tests.batchbench.scripted import Outcomes
from tests.batchbench.test_cli import assert_refused, here, invoke, scenario  # noqa: F401  # a fixture


def ms(median):
    return Timing(median_ms=median, spread_ms=0.0)


def calibration(resumes=((10, 4.0), (20, 12.0)), copies=((1, 3.0), (4, 6.0)), **changes):
    """Extra milliseconds of a resume by positions, round trips by blocks of 4."""
    about = {
        "batchbench": "1", "created": "2026-01-01T00:00:00+00:00", "model": "tiny", "dtype": "float32",
        "device": "cpu", "threads": 1, "numerics": "exact", "numerics_detail": "", "block_size": 4,
        "kv_bytes_per_token": 768, "machine": {}, "beside_rows": 3, "rounds": 1,
    }  # fmt: skip
    return Calibration(
        **(about | changes),
        resumes=tuple(ResumePoint(tokens=n, resume=ms(5.0 + extra), decode=ms(5.0)) for n, extra in resumes),
        copies=tuple(CopyPoint(blocks=n, out=ms(trip / 3), back=ms(trip * 2 / 3)) for n, trip in copies),
    )


def test_costs_are_linear_between_the_rungs_and_go_on_beyond():
    c = calibration()
    assert [c.recompute_ms(n) for n in (0, 5, 10, 15, 20, 25)] == [0, 2, 4, 8, 12, 16]
    assert [c.swap_ms(n) for n in (0, 1, 4, 5, 16, 17)] == [0, 3, 3, 4, 6, 7]  # whole blocks
    with pytest.raises(ValueError, match="must not be negative"):
        c.recompute_ms(-1)
    assert calibration(resumes=((10, 4.0), (20, 2.0))).recompute_ms(30) == 2  # noise never makes longer cheaper


def test_the_choice_and_where_it_flips():
    c = calibration()
    assert not c.prefers_swap(0)
    assert [n for n in range(1, 17) if c.prefers_swap(n) != c.prefers_swap(n - 1)] == c.crossovers() == [12]
    assert (c.recompute_ms(11), c.recompute_ms(12)) == pytest.approx((4.8, 5.6))
    assert (c.swap_ms(11), c.swap_ms(12)) == (5, 5)
    cheap_link = calibration(copies=((1, 0.1), (4, 0.1)))
    assert cheap_link.crossovers() == [1]
    assert calibration(copies=((1, 99.0), (4, 99.0))).crossovers() == []
    assert calibration(resumes=((10, -4.0), (20, 12.0))).recompute_ms(5) == 0  # a difference lost in the noise
    assert c.link_bytes_per_s() == pytest.approx((4 * 4 * 768 / 2e-3, 4 * 4 * 768 / 4e-3))


def test_a_file_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "c.json"
    save(calibration(), path)
    assert load_calibration(path) == calibration()
    before = path.read_bytes()
    save(calibration(), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    save(calibration(), path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match=r"c\.json: No space left on device"):
        save(calibration(rounds=2), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("format",), "other", "is no calibration file"),
        (("version",), 2, "has version 2, this batchbench reads 1"),
        (("version",), True, "has version True"),
        (("version",), None, "has version None"),
        (("block_size",), 0, "block_size"),
        (("threads",), "1", "threads"),
        (("surprise",), 1, "surprise"),
        (("resumes",), [], "resumes"),
        (("resumes", 0, "tokens"), 20, r"resumes must rise, are \[20, 20\]"),
        (("resumes", 0, "resume", "median_ms"), -1, r"resumes.0.resume.median_ms.*greater than or equal to 0"),
        (("resumes", 1, "decode", "median_ms"), float("nan"), r"resumes.1.decode.median_ms"),
        (("copies", 1, "out", "spread_ms"), float("inf"), r"copies.1.out.spread_ms"),
        (("copies", 1, "out", "spread_ms"), None, r"copies.1.out.spread_ms"),
        (("copies", 1, "blocks"), 10**400, "copies.1.blocks"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, place, value, said):
    path = tmp_path / "c.json"
    document = calibration().model_dump(mode="json")
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=said) as refused:
        load_calibration(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b"{", b"[" * 100_000, b'{"version": ' + b"1" * 5000 + b"}"])
def test_what_is_no_calibration_is_refused_by_name(tmp_path, content):
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"c\.json"):
        load_calibration(path)
    with pytest.raises(UsageError, match=r"gone\.json: No such file"):
        load_calibration(tmp_path / "gone.json")


def test_the_ladder_is_dense_where_costs_are_small():
    assert ladder(100, 16) == [1, 16, 32, 64, 100]
    assert ladder(64, 16) == [1, 16, 32, 64]
    assert ladder(1, 16) == [1]


def test_what_is_measured_is_what_the_clock_says(monkeypatch):
    """A clock that moves by 1 ms per call: every step and every copy take exactly that."""
    ticks = itertools.count()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(ticks) * 1e-3)
    honest = measuring.ModelRunner
    monkeypatch.setattr(measuring, "ModelRunner", lambda *a: honest(*a, clock=lambda: next(ticks) * 1e-3))
    found = measuring.calibrate(EngineSettings(slots=4, block_size=4), 9, 3)
    assert [point.tokens for point in found.resumes] == [1, 4, 8, 9]
    assert [point.blocks for point in found.copies] == [1, 2, 3]
    timings = [t for p in found.resumes for t in (p.resume, p.decode)]
    timings += [t for p in found.copies for t in (p.out, p.back)]
    assert set(timings) == {Timing(median_ms=1.0, spread_ms=0.0)}
    assert (found.beside_rows, found.rounds, found.kv_bytes_per_token) == (2, 3, 768)


def test_a_resume_computes_its_whole_context_beside_the_decoding_rows(monkeypatch):
    forwards = []
    honest = measuring.Engine.step

    def watched(engine):
        step = honest(engine)
        forwards.append((step.issued_tokens, step.forward_tokens))
        return step

    monkeypatch.setattr(measuring.Engine, "step", watched)
    measuring.calibrate(EngineSettings(slots=6, block_size=4), 9, 1)
    for tokens in (1, 4, 8, 9):
        at = forwards.index((4, 3 + tokens + 1))  # three decodes, and the context with its newest token
        assert forwards[at + 1] == (4, 4)


def test_more_than_the_model_has_is_refused():
    with pytest.raises(UsageError, match="the model has .*; lower --max-tokens"):
        measuring.calibrate(EngineSettings(slots=1), 10_000_000, 1)


SETTINGS = {"slots": 4, "block_size": 4, "reclaim": "cheaper", "swap_blocks": 40}
REQUESTS = [RequestSpec(f"r{n}", tuple(range(1, 6 + n)), 20) for n in range(6)]


def ledger(engine, path):
    settings = EngineSettings(**SETTINGS, calibration=str(path))
    seen = Outcomes()
    run_workload(engine_factory(engine, settings)(14), REQUESTS, observer=seen, batches=False)
    return [dataclasses.replace(outcome, padded_tokens=None, copy_s=None) for _, outcome in seen.outcomes]


def test_cheaper_follows_the_file_and_both_engines_agree(tmp_path):
    path = tmp_path / "c.json"
    save(calibration(resumes=((10, 1.0), (20, 9.0))), path)
    events = ledger("own", path)
    assert events == ledger("schedule", path)
    evictions = [e for outcome in events for e in outcome.evictions]
    measured = load_calibration(path)
    assert {e.reclaim for e in evictions} == {"swap", "recompute"}
    assert all((e.reclaim == "swap") == measured.prefers_swap(e.cached_tokens) for e in evictions)


@pytest.mark.parametrize("engine", ["own", "schedule"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "other"}, "was measured with model other, the engine has tiny"),
        ({"dtype": "bfloat16"}, "was measured with dtype bfloat16, the engine has float32"),
        ({"block_size": 8}, "was measured with block_size 8, the engine has 4"),
        ({"device": "cuda:1"}, "was measured with device cuda, the engine has cpu"),
    ],
)
def test_a_calibration_of_another_engine_is_refused_by_name(tmp_path, engine, changes, said):
    path = tmp_path / "c.json"
    save(calibration(**changes), path)
    settings = EngineSettings(**SETTINGS, calibration=str(path), device="cpu")
    with pytest.raises(UsageError, match=said):
        engine_factory(engine, settings)(14)


def test_cheaper_and_calibration_need_each_other(here):  # noqa: F811
    scenario(here, ("[engine]", '[engine]\nreclaim = "cheaper"\nswap_blocks = 4'))
    assert_refused(invoke("validate", "x.toml"), here, "reclaim = 'cheaper' needs engine.calibration")
    scenario(here, ("[engine]", '[engine]\ncalibration = "c.json"'))
    assert_refused(invoke("validate", "x.toml"), here, "engine.calibration = 'c.json' would do nothing")
    scenario(here, ("[engine]", '[engine]\nreclaim = "cheaper"\nswap_blocks = 4\ncalibration = "c.json"'))
    assert_refused(invoke("validate", "x.toml"), here, "calibration c.json: No such file")


def test_the_command_writes_what_a_sweep_can_use(here):  # noqa: F811
    changed = ("[engine]", '[engine]\nreclaim = "cheaper"\nswap_blocks = 40\ncalibration = "c.json"\ndevice = "cpu"')
    name = scenario(here, changed)  # the file is not there yet
    done = invoke("calibrate", name, "-o", "c.json", "--rounds", "2")
    assert done.exit_code == 0, done.output
    assert "calibration: c.json" in done.stdout
    measured = load_calibration("c.json")
    assert measured.resumes[-1].tokens == 27  # 5 + 24 tokens, of which the last is never fed and the newest was not
    printed = invoke("calibrate", name, "-o", "d.json", "--rounds", "1", "--max-tokens", "9", "--format", "json")
    assert json.loads(printed.stdout) == json.loads((here / "d.json").read_text())
    assert invoke("sweep", name, "--out", "out", "--no-progress").exit_code == 0
    refused = invoke("calibrate", name, "-o", "no/c.json")
    assert (refused.exit_code, refused.stderr) == (2, "error: calibration no/c.json: No such file or directory\n")
    assert invoke("calibrate", name, "-o", ".").stderr == "error: calibration . is a folder; name a file in it\n"


def test_a_calibration_is_read_without_torch():
    code = 'import sys; sys.modules["torch"] = None; import batchbench.calibration, batchbench.eviction_cost'
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_device_is_no_endless_file():
    with pytest.raises(UsageError, match="calibration /dev/zero: is no regular file"):
        load_calibration("/dev/zero")
