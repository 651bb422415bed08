"""The doctor: what it finds here, and that it names what is broken or missing."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import engine.cpu_kernels
import engine.decoders
import engine.selftest
from batchbench.adapters import doctor
from engine.cpu_model import CpuModel
from engine.errors import NumericsError
from engine.model import Model
from engine.weights import TINY
from tests.batchbench.test_cli import invoke
from tests.engine.test_checkpoint import COMMON
from tests.helpers import needs_compiler


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Rates over little, once: whether they are printed is tested, not what they are."""
    for name, value in {"_READ_BYTES": 2**20, "_REPEATS": 1, "_WIDTH": 64, "_WIDE": TINY}.items():
        monkeypatch.setattr(doctor, name, value)


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine.cpu_kernels.load_kernels.cache_clear()
    yield
    engine.cpu_kernels.load_kernels.cache_clear()


def examined(*arguments):
    done = invoke("doctor", "--format", "json", *arguments)
    return done.exit_code, json.loads(done.stdout)


def promises(report):
    return {(one["model"], one["dtype"], one["kernels"]): (one["keeps"], one["default"]) for one in report["numerics"]}


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="the default is the GPU where there is one")
def test_a_sound_machine():
    code, report = examined()
    assert (code, report["ok"], report["devices"]) == (0, True, ["cpu"])
    assert promises(report) == {
        ("tiny", dtype, kernels): (True, kernels == "native")
        for dtype in ("float32", "bfloat16")
        for kernels in ("native", "torch")
    }
    assert report["numerics"][0]["detail"].startswith("exact (native ")
    assert report["native_kernels"] == "built" and report["compiler"]
    assert report["versions"]["torch"] == torch.__version__
    found = {(one["what"], one["dtype"], one["threads"]) for one in report["ceilings"]}
    rated = {("read, torch", "float32")}
    rated |= {(by, dtype) for by in ("products, torch", "a prefill, native") for dtype in ("float32", "bfloat16")}
    assert found == {(*one, threads) for one in rated for threads in {1, len(os.sched_getaffinity(0))}}
    assert all(one["rate"] > 0 for one in report["ceilings"])


def test_the_table_says_it_in_words(monkeypatch):
    monkeypatch.setattr(
        doctor, "_ceilings", lambda threads: [doctor._rate("read, torch", "float32", threads, "GB/s", 9e9)]
    )
    done = invoke("doctor")
    assert done.exit_code == 0
    for words in (
        "(default)",
        "kept",
        "versions: python ",
        "load average before: ",
        "read, torch, float32: 9.0 GB/s with 1 thread",
    ):
        assert words in done.stdout
    assert "BROKEN" not in done.stdout
    assert invoke("doctor", "--format", "markdown").stdout.startswith("| model | dtype | device | decoder | promise |")


def test_a_default_decoder_that_breaks_its_promise_ends_with_1(monkeypatch, no_compiler):
    def by_row_count(x, weight, tile):
        out = F.linear(x, weight)
        return out if x.shape[0] <= tile else out + 1e-3 * out

    monkeypatch.setattr(engine.selftest, "linear", by_row_count)
    done = invoke("doctor")
    assert done.exit_code == 1 and done.stderr == ""
    assert "BROKEN" in done.stdout
    assert (
        "tiny in float32, torch: numerics self-test: linear layers.0.qkv (128, 64) in tiles of 32 rows" in done.stdout
    )


@needs_compiler
@pytest.mark.parametrize(("broken", "kind", "code"), [("native", CpuModel, 1), ("torch", Model, 0)])
def test_only_the_default_decoder_decides(monkeypatch, broken, kind, code):
    def fails(decoder):
        if isinstance(decoder, kind):
            raise NumericsError("one prefill gives other bits")

    monkeypatch.setattr(engine.decoders, "check_decoder", fails)
    found, report = examined()
    assert (found, report["ok"]) == (code, code == 0)
    assert {kernels for (_, _, kernels), (keeps, _) in promises(report).items() if keeps is False} == {broken}
    assert any(one["detail"] == "one prefill gives other bits" for one in report["numerics"])


def test_without_a_compiler_it_says_why_and_torch_is_the_default(no_compiler):
    code, report = examined()
    assert code == 0
    assert report["native_kernels"].startswith("not available: no C++ compiler: no-such-compiler not found")
    assert promises(report)["tiny", "float32", "native"] == (None, False)
    assert promises(report)["tiny", "float32", "torch"] == (True, True)
    assert "not available" in invoke("doctor").stdout


def test_a_checkpoint_is_tested_beside_tiny(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**COMMON)).save_pretrained(tmp_path / "llama")
    code, report = examined("--model", str(tmp_path / "llama"))
    assert code == 0
    assert {model for model, _, _ in promises(report)} == {"tiny", str(tmp_path / "llama")}
    assert all(keeps for keeps, _ in promises(report).values())


def test_the_self_test_runs_with_the_threads_that_were_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(doctor, "_promises", lambda how: seen.append((how.threads, torch.get_num_threads())) or [])
    assert examined("--threads", "3")[1]["threads"] == 3
    assert set(seen) == {(3, 3)} and torch.get_num_threads() == 3


def test_a_checkpoint_that_is_not_there_is_one_line():
    done = invoke("doctor", "--model", "nowhere")
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        done.stderr == "error: unknown model 'nowhere': not tiny, and no checkpoint folder or GGUF file of that path\n"
    )
