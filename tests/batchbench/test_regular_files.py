"""Files that are named to batchbench: a pipe that nobody writes to, a device or a folder is refused, not waited for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from batchbench import load_scenario
from batchbench.calibration import load_calibration
from batchbench.errors import BatchbenchError
from batchbench.gate_rules import load_demands
from batchbench.length_files import read_columns
from batchbench.prompts import load_prompts
from batchbench.regular_files import open_regular
from batchbench.results import load_result
from batchbench.traces import open_trace
from engine.errors import EngineError
from engine.gguf_file import open_gguf
from engine.hf_folder import load_folder
from engine.tokenizer import load_tokenizer
from tests.batchbench.test_cli import DAY34, here, invoke
from tests.fuzz.targets import CONFIG

assert here  # a fixture


@pytest.fixture(autouse=True)
def _in_time():
    """What waits for a pipe is interrupted."""

    def late(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def of_checkpoint(folder):
    return load_folder(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda folder: load_scenario(folder / "x"), "x"),
        (lambda folder: read_columns(folder / "x", 1), "x"),
        (lambda folder: load_prompts(folder / "x.txt"), "x.txt"),
        (lambda folder: load_prompts(folder / "x.toml"), "x.toml"),
        (lambda folder: load_calibration(folder / "x"), "x"),
        (lambda folder: load_demands(folder / "x"), "x"),
        (lambda folder: open_trace(folder / "x"), "x"),
        (lambda folder: open_trace(folder / "x", "azure"), "x"),
        (lambda folder: open_trace(folder / "x", "parquet"), "x"),
        (of_checkpoint, "config.json"),
        (load_tokenizer, "tokenizer.json"),
        (lambda folder: open_gguf(folder / "x.gguf"), "x.gguf"),
    ],
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_refused_by_name(tmp_path, read, name, make):
    make(tmp_path / name)
    with pytest.raises((BatchbenchError, EngineError), match="is no regular file") as refused:
        read(tmp_path)
    assert str(tmp_path / name) in str(refused.value)


@pytest.mark.parametrize("name", ["run.json", "pools.parquet"])
def test_a_result_with_a_pipe_in_it_lacks_that_file(tmp_path, name):
    for file in (DAY34.parents[1] / "results/day34").iterdir():
        os.symlink(file, tmp_path / file.name)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(BatchbenchError, match=f"it lacks {name}"):
        load_result(tmp_path)


def test_weights_that_are_a_pipe_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"model\.safetensors: is no regular file"):
        of_checkpoint(tmp_path)


@pytest.mark.parametrize("key", ["lengths_file", "prompts"])
def test_a_scenario_that_names_a_pipe_is_one_line(here, key):
    text = (DAY34.parent / "day34.toml").read_text()
    kept = [line for line in text.splitlines() if not line.startswith(("prompt_tokens", "output_tokens"))]
    at = kept.index("[workload]") + 1
    more = [f'{key} = "pipe.txt"'] + ["output_tokens = 4"] * (key == "prompts")
    (here / "x.toml").write_text("\n".join([*kept[:at], *more, *kept[at:]]))
    os.mkfifo(here / "pipe.txt")
    done = invoke("validate", "x.toml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: pipe.txt: is no regular file\n"


def test_a_file_behind_a_name_of_the_system_is_read(tmp_path):
    """A redirected `< FILE` is one, and so is a link to one."""
    (tmp_path / "x").write_bytes(b"3\n")
    os.symlink("x", tmp_path / "link")
    with (tmp_path / "x").open("rb") as opened:
        for path in (tmp_path / "link", Path(f"/dev/fd/{opened.fileno()}")):
            with open_regular(path) as file:
                assert file.read() == b"3\n"


def test_no_file_is_left_open(tmp_path):
    os.mkfifo(tmp_path / "x")
    before = os.listdir("/dev/fd")
    for _ in range(3):
        with pytest.raises(OSError, match="is no regular file"):
            open_regular(tmp_path / "x")
    assert os.listdir("/dev/fd") == before
