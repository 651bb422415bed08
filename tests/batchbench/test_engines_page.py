"""The engine of docs/engines.md, as it is printed there."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchbench import RequestRefused, Text, UsageError, load_result, load_scenario, run_scenario
from batchbench.errors import BatchbenchError
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
    page = Path("toy.html").read_text()
    assert "made from Python" in page and "the factory of the engine that calls itself toy" in page


def test_its_choices_are_swept_by_name(toy, tmp_path):
    (tmp_path / "x.toml").write_text(DAY34.read_text().replace("[sweep]\n", "[sweep]\nblock_size = [4, 8]\n"))
    result = run_scenario(load_scenario(tmp_path / "x.toml"), tmp_path / "out", toy)
    assert result.tables["pools"]["block_size"].tolist() == [4] * 6 + [8] * 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (("slots = 6", "slots = 2"), "scenario day34: slots = 2 was asked for, and the engine says that it has 6"),
        (("block_size = 4", "block_size = 16"), "block_size = 16 was asked for, and the engine says that it has 4"),
        (("[sweep]\n", '[sweep]\nvictim = ["oldest"]\n'), "the toy has no choice of victim"),
    ],
)
def test_what_the_engine_does_not_do_is_not_said_of_it(toy, tmp_path, text, message):
    (tmp_path / "x.toml").write_text(DAY34.read_text().replace(*text))
    with pytest.raises(BatchbenchError, match=message):
        run_scenario(load_scenario(tmp_path / "x.toml"), tmp_path / "out", toy)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ({"describe": lambda was: replace(was, pool_blocks=99)}, "pool_blocks = 48 was asked for.* it has 99"),
        ({"describe": lambda was: replace(was, block_size=8)}, "block_size = 4 was asked for.* it has 8"),
        ({"step": lambda was: replace(was, free_blocks=10**6)}, "1000000 blocks are free in a pool of 48"),
        ({"step": lambda was: replace(was, running=1000)}, "1000 requests run in 6 slots"),
        ({"step": lambda was: replace(was, waiting=1.5)}, "waiting is 1.5, which is no whole number"),
        ({"step": lambda was: replace(was, preempted=(), evictions=())}, "nobody was evicted, but 46 positions are"),
        ({"step": lambda was: replace(was, recomputed_tokens=0, rebuilt_tokens=0)}, "these 0 again.*: 44 are too many"),
        ({"take": lambda was: Text(tuple(-1 - n for n in was.token_ids))}, "token id -"),
    ],
)
def test_a_flawed_engine_leaves_an_earlier_result_alone(toy, tmp_path, flaw, message):
    ((name, change),) = flaw.items()
    honest = getattr(toy, name)
    flawed = type("Flawed", (toy,), {name: lambda self, *arguments: change(honest(self, *arguments))})
    scenario = load_scenario("scenarios/day34.toml")
    run_scenario(scenario, "out", toy)
    before = {path: path.read_bytes() for path in Path("out").glob("*")}
    with pytest.raises(BatchbenchError, match=message):
        run_scenario(scenario, "out", flawed)
    assert {path: path.read_bytes() for path in Path("out").glob("*") if path.is_file()} == before


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
