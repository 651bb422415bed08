"""The script that checks a GPU, at toy sizes: every section runs, fails alone, and is written."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_check
from tests.triton_interpreter import DEVICE, MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

pytestmark = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="Triton runs natively here: run `python -m benchmarks.gpu_check` instead"
)


@pytest.mark.slow
def test_every_section_runs_at_toy_sizes(tmp_path):
    out = tmp_path / "deep" / "cpu.json"
    assert gpu_check.main(["--device", "cpu", str(out)]) == 0
    report = json.loads(out.read_text())
    assert list(report["sections"]) == [section.__name__ for section, _ in gpu_check.SECTIONS]
    found = {name: section["found"] for name, section in report["sections"].items()}
    assert found["kernels_right"]["over"] == []
    assert found["kernels_keep_bits"]["all shapes agree"]
    for kept in found["engine_keeps_bits"].values():
        assert kept["preemptions"] > 0 and kept["numerics"] == "exact (triton, 4 shapes)"
        assert all(kept[how]["compared"] > 0 and kept[how]["different"] == 0 for how in ("alone", "evicted"))
    assert found["day34"]["counters equal those of the CPU"]
    assert [pool["forward_tokens"] for pool in found["day34"]["pools"]][4] == 268
    assert len(found["larger_sweep"]["pools"]) > 1
    for name in ("forward_speed", "engine_speed"):
        assert all(figures["tokens_per_s"] > 0 for key, figures in found[name].items() if key.endswith("rows"))


def test_a_section_that_fails_or_overruns_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch):
    def wrong(bench):
        raise ValueError("planted")

    def slow(bench):
        while True:
            pass

    def fine(bench):
        return {"figure": 1}

    monkeypatch.setattr(gpu_check, "SECTIONS", ((wrong, 5), (slow, 0.2), (fine, 5)))
    assert gpu_check.main(["--device", "cpu", str(tmp_path / "a.json")]) == 1
    sections = json.loads((tmp_path / "a.json").read_text())["sections"]
    assert sections["wrong"]["error"] == "ValueError: planted"
    assert sections["slow"]["error"].startswith("OutOfTime: not done after")
    assert sections["fine"]["found"] == {"figure": 1}


def test_no_gpu_is_one_line_and_exit_2(capsys):
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err.startswith("error: torch sees no CUDA device; try --device cpu")
