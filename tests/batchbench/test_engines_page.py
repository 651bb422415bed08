"""The engine of docs/engines.md, as it is printed there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from batchbench import RequestRefused, UsageError, load_result, load_scenario, run_scenario
from tests.batchbench.test_cli import DAY34, invoke

BLOCKS = re.findall(r"```python\n(.*?)```", Path("docs/engines.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The class, in a folder where it can be imported and the committed scenarios are."""
    (tmp_path / "toy_engine.py").write_text(BLOCKS[0])
    (tmp_path / "scenarios").symlink_to(DAY34.parent)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_engine", raising=False)
    return importlib.import_module("toy_engine").ToyEngine


def test_it_counts_what_this_projects_engine_counts(toy):
    exec(compile(BLOCKS[1], "docs/engines.md", "exec"), {})
    mine, ours = load_result("out/toy"), load_result(DAY34.parents[1] / "results/day34")
    counted = ("iterations", "preemptions", "forward_tokens", "recomputed_tokens", "rebuilt_tokens", "occupancy",
               "recompute_fraction", "preemption_latency_penalty", "paired_latency_penalty")  # fmt: skip
    for name in counted:
        assert mine.tables["pools"][name].tolist() == ours.tables["pools"][name].tolist(), name
    for name in ("latency_iterations", "preemptions"):
        assert mine.tables["requests"][name].tolist() == ours.tables["requests"][name].tolist(), name
    for command in (["report", "out/toy", "-o", "toy.html"], ["trace", "out/toy", "--pool", "8", "-o", "toy.json"],
                    ["gate", "out/toy", "--max", "recompute_fraction=0.4"]):  # fmt: skip
        done = invoke(*command)
        assert done.exit_code == 0, done.output


def test_its_choices_are_swept_by_name(toy, tmp_path):
    (tmp_path / "x.toml").write_text(DAY34.read_text().replace("[sweep]\n", "[sweep]\nblock_size = [4, 8]\n"))
    result = run_scenario(load_scenario(tmp_path / "x.toml"), tmp_path / "out", toy)
    assert result.tables["pools"]["block_size"].tolist() == [4] * 6 + [8] * 6


def test_what_can_never_run_is_refused_before_the_clock(toy, tmp_path):
    (tmp_path / "x.toml").write_text(DAY34.read_text().replace("[48, 32, 24, 16, 12, 8]", "[48, 6]"))
    with pytest.raises(RequestRefused, match="does not fit 6 blocks, even alone"):
        run_scenario(load_scenario(tmp_path / "x.toml"), tmp_path / "out", toy)


def test_prompts_that_are_texts_take_a_tokenizer_of_ones_own(toy, tmp_path):
    class Bytes:
        def encode(self, text):
            return list(text.encode())

        def decode(self, token_ids):
            return bytes(token_ids).decode(errors="replace")

    text = DAY34.read_text().replace("prompt_tokens = 5", 'prompt_tokens = 5\nprompts = "natural"')
    (tmp_path / "x.toml").write_text(text)
    scenario = load_scenario(tmp_path / "x.toml")
    with pytest.raises(UsageError, match="needs the engine's tokenizer"):
        run_scenario(scenario, tmp_path / "none", toy)
    result = run_scenario(scenario, tmp_path / "out", toy, tokenizer=Bytes())
    assert result.tables["pools"]["preemptions"].tolist()[-1] > 0
