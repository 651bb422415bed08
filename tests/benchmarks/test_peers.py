"""The comparison with other engines: its arithmetic, and how it treats a worker, with a scripted one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers import measure
from benchmarks.peers.install import PEERS, WORKERS, CannotInstall, Peer, environment
from benchmarks.peers.measure import CASES, Case, Worker, WorkerFailed, watched
from benchmarks.peers.table import HEAD_ELEMENTS, LAYER_ELEMENTS, floor_rate, markdown, rates

SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(WORKERS)!r})
import loop
WEIGHTS, DTYPE, THREADS, POOL_TOKENS = loop.start()
print("noise that a library prints")

class Scripted:
    settings, versions = f"{{DTYPE}} {{THREADS}} {{POOL_TOKENS}}", {{"scripted": "1"}}

    def generate(self, prompts, output_tokens, at_most):
        if at_most == 7:
            raise MemoryError("no room for 7\\nand more lines")
        if at_most == 6:
            sys.exit("gone away")
        return [[at_most] * (output_tokens - (at_most == 5)) for _ in prompts]

loop.serve(Scripted())
"""


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / "scripted.py"
    script.write_text(SCRIPT)
    started = Worker(Peer("Scripted", str(script)), Path(sys.executable), tmp_path, "float32", 1, tmp_path / "log")
    yield started
    started.close()


def case(at_most: int) -> Case:
    return Case(3, 4, 2, at_most, "output")


def test_a_worker_answers_beside_what_its_libraries_print(worker):
    assert worker.about == {"settings": "float32 1 None", "versions": {"scripted": "1"}}
    assert worker.generate(case(2))[1] == [[2, 2]] * 3
    assert "noise" in worker.log.read_text()


def test_an_idle_worker_is_stopped_and_goes_on_when_asked(worker):
    def stopped() -> bool:
        for _ in range(1000):  # the signal is on its way
            if Path(f"/proc/{worker.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
                return True
            time.sleep(0.01)
        return False

    assert stopped()
    worker.generate(case(1))
    assert stopped()


def test_a_failing_call_is_one_line_and_the_worker_lives_on(worker):
    with pytest.raises(WorkerFailed, match="^MemoryError: no room for 7$"):
        worker.generate(case(7))
    assert worker.generate(case(1))[1] == [[1, 1]] * 3


def test_a_text_of_another_length_is_refused(worker):
    with pytest.raises(WorkerFailed, match=r"texts of \[1\] tokens, asked for 2"):
        worker.generate(case(5))


def test_a_worker_that_ends_says_its_last_line(worker):
    with pytest.raises(WorkerFailed, match="ended with 1: gone away"):
        worker.generate(case(6))


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_names_the_reason(tmp_path):
    peer = Peer("Nothing", "", (("install", "--no-index", "no-such-package"),))
    with pytest.raises(CannotInstall, match="ERROR: No matching distribution found for no-such-package"):
        environment(tmp_path, "nothing", peer)


def test_shares_count_what_the_worker_did_not_use(worker, monkeypatch):
    busy_stolen = iter([(10.0, 1.0), (16.0, 2.0)])
    own, clock = iter([4.0, 9.0]), iter([100.0, 110.0])
    monkeypatch.setattr(measure, "core_seconds", lambda cores: next(busy_stolen))
    monkeypatch.setattr(worker, "cpu_seconds", lambda: next(own))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert watched(worker, lambda: "result") == ("result", 0.1, 0.1)  # 6 busy of which 5 its own, 1 stolen, of 10 s


def test_the_decode_of_one_leaves_the_first_token_out(worker, monkeypatch):
    took = {1: 0.5, CASES["1"].output: 2.5}
    monkeypatch.setattr(Worker, "generate", lambda self, case, output=None: (took[output or case.output], [[7]]))
    assert measure.measure(worker, "scripted", "float32", "1", 0).rate == 128 / 2.0


def sample(peer: str, rate: float, *, disturbed: bool = False, name: str = "8", texts: str = "ab") -> dict[str, object]:
    return {
        "peer": peer, "dtype": "float32", "case": name, "rate": rate, "disturbed": disturbed, "texts": list(texts)
    }  # fmt: skip


def record(*samples: dict[str, object], **more: object) -> dict[str, object]:
    about = {name: {"settings": "as is", "versions": {}} for name in PEERS}
    return {"samples": list(samples), "about": about, "failed": {}, "ceilings": [], "changes": [], **more}


def test_medians_rest_on_undisturbed_measurements_where_there_are_any():
    some = [sample("vllm", rate) for rate in (3.0, 9.0, 5.0)]
    assert rates(record(*some, sample("vllm", 100.0, disturbed=True)), "vllm", ("float32", "8")) == (5.0, True)
    assert rates(record(sample("vllm", 100.0, disturbed=True)), "vllm", ("float32", "8")) == (100.0, False)
    assert rates(record(), "vllm", ("float32", "8")) is None


def test_the_table_has_ratios_failures_and_agreement():
    failed = {"llamacpp": "no compiler"}
    report = markdown(
        record(
            sample("batchbench", 300.0, texts="abc"),
            sample("openvino", 200.0, texts="abx"),
            sample("vllm", 400.0, disturbed=True, texts="abc"),
            failed=failed,
        )
    )
    assert "| engine | fp32: 8 |" in report
    assert "| batchbench / best peer | 0.75 (vllm) |" in report
    assert "| batchbench / vLLM | 0.75 |" in report
    assert "| vLLM CPU build | 400* |" in report
    assert "| llama.cpp server | not measured: no compiler |" in report
    assert "8 and 32 at once: 2 and - of 32" in report


def test_the_floor_reads_weights_once_per_iteration_or_multiplies():
    weights = 4 * (LAYER_ELEMENTS + HEAD_ELEMENTS)
    assert weights == 537_919_488
    reading = {"read_bytes_s": float(weights), "gemm_flop_s": 1e30}  # one second per iteration
    assert floor_rate(CASES["1"], "float32", reading) == 1.0
    assert floor_rate(CASES["8"], "float32", reading) == 2048 / 256  # 4 waves of 1 + 63 iterations
    multiplying = {"read_bytes_s": 1e30, "gemm_flop_s": 2.0 * LAYER_ELEMENTS}  # one second per position
    head = HEAD_ELEMENTS / LAYER_ELEMENTS
    assert floor_rate(CASES["prefill"], "float32", multiplying) == 32 * 512 / (32 * (512 + head))
