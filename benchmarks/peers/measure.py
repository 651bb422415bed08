"""One worker process, and one measurement with what else the machine did meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.install import ROOT, WORKERS, Peer, preloaded

VOCABULARY, FIRST_ORDINARY = 49152, 17  # SmolLM2: ids below are control tokens
FOREIGN_LIMIT, STOLEN_LIMIT = 0.03, 0.02  # of the cores' time; beyond it a measurement is repeated
_TICK = os.sysconf("SC_CLK_TCK")


class WorkerFailed(Exception):
    """A worker ended, or answered with an error; the message is one line."""


@dataclass(frozen=True)
class Case:
    """A column of the table. Rates count output tokens, decoded tokens, or positions, per second."""

    requests: int
    prompt: int
    output: int
    at_most: int
    counts: str

    def prompts(self) -> list[list[int]]:
        """Token ids, the same in every run."""
        draw = random.Random(f"{self.requests} {self.prompt}")
        return [[draw.randrange(FIRST_ORDINARY, VOCABULARY) for _ in range(self.prompt)] for _ in range(self.requests)]

    @property
    def units(self) -> int:
        """How many tokens or positions the rate is of."""
        return (
            self.requests * {"output": self.output, "decoded": self.output - 1, "positions": self.prompt}[self.counts]
        )


CASES = {
    "1": Case(1, 64, 129, 1, "decoded"),
    "8": Case(32, 64, 64, 8, "output"),
    "32": Case(32, 64, 64, 32, "output"),
    "prefill": Case(32, 512, 1, 32, "positions"),
}


@dataclass
class Sample:
    """One measurement. Shares are of the wall time of the cores used; `texts` are digests, one per request."""

    peer: str
    dtype: str
    case: str
    round: int
    seconds: float
    rate: float
    foreign_share: float
    stolen_share: float
    load: float
    at: float
    texts: list[str]

    @property
    def disturbed(self) -> bool:
        return self.foreign_share > FOREIGN_LIMIT or self.stolen_share > STOLEN_LIMIT

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "disturbed": self.disturbed}


class Worker:
    """A peer, loaded. It runs only while asked: between questions the whole session of processes is stopped.

    Raises WorkerFailed if the peer cannot be loaded.
    """

    def __init__(
        self, peer: Peer, python: Path, weights: Path, dtype: str, threads: int, log: Path, pool_tokens: int = 0
    ) -> None:
        self.cores = sorted(os.sched_getaffinity(0))[:threads]
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        environment = {**os.environ, "LD_PRELOAD": preloaded(peer, python), "PYTHONUNBUFFERED": "1"}
        if not peer.pip:
            environment["PYTHONPATH"] = str(ROOT)
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [python, WORKERS / peer.worker, weights, dtype, str(threads), str(pool_tokens)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        self.about = self._answer()
        self._signal(signal.SIGSTOP)

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """{"seconds", "result"} of one call."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"do": method, **arguments}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def generate(self, case: Case, output: int | None = None) -> tuple[float, list[list[int]]]:
        """(seconds, texts). Raises WorkerFailed if a text has another length than asked for."""
        wanted = case.output if output is None else output
        answer = self.ask("generate", prompts=case.prompts(), output_tokens=wanted, at_most=case.at_most)
        texts: list[list[int]] = answer["result"]
        if [len(text) for text in texts] != [wanted] * case.requests:
            raise WorkerFailed(f"texts of {sorted({len(text) for text in texts})} tokens, asked for {wanted}")
        return float(answer["seconds"]), texts

    def warm_up(self, case: Case) -> None:
        """Run a little of the case, untimed: as many rows and positions at once, fewer of them in all."""
        prompts = case.prompts()[: 32 * 128 // case.prompt]
        self.ask("generate", prompts=prompts, output_tokens=min(case.output, 4), at_most=case.at_most)

    def close(self) -> None:
        """End the whole session of processes."""
        self._signal(signal.SIGKILL)
        with self.process:  # waits, and closes the pipes
            pass

    def cpu_seconds(self) -> float:
        """Processor time that the processes of the session have used."""
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # ended meanwhile
            if int(fields[3]) == self.process.pid:
                total += int(fields[11]) + int(fields[12])
        return total / _TICK

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            said = [text.strip() for text in self.log.read_text(errors="replace").splitlines() if text.strip()]
            raise WorkerFailed(f"ended with {self.process.returncode}: {(said or ['no output'])[-1][:300]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"][:300])
        return answer

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return  # it ended; the next answer says so


def core_seconds(cores: list[int]) -> tuple[float, float]:
    """(busy, stolen) seconds of these cores since boot. Busy is all but idle, waiting for disks, and stolen."""
    busy = stolen = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name in {f"cpu{core}" for core in cores}:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, values[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    return busy / _TICK, stolen / _TICK


def watched(worker: Worker, call: Callable[[], Any]) -> tuple[Any, float, float]:
    """(result, foreign share, stolen share): what others took of the worker's cores while `call` ran."""
    begin, (busy, stolen), own = time.perf_counter(), core_seconds(worker.cores), worker.cpu_seconds()
    result = call()
    (busy_after, stolen_after), own_after = core_seconds(worker.cores), worker.cpu_seconds()
    available = (time.perf_counter() - begin) * len(worker.cores)
    foreign = max(0.0, (busy_after - busy) - (own_after - own))
    return result, foreign / available, (stolen_after - stolen) / available


def measure(worker: Worker, name: str, dtype: str, case_name: str, turn: int) -> Sample:
    """Run a case once. The decode of one sequence is timed as a long run less a run of one token."""
    case = CASES[case_name]

    def run() -> tuple[float, list[list[int]]]:
        first = worker.generate(case, 1)[0] if case.counts == "decoded" else 0.0
        seconds, texts = worker.generate(case)
        return seconds - first, texts

    load, now = os.getloadavg()[0], time.time()
    (seconds, texts), foreign, stolen = watched(worker, run)
    digests = [hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12] for text in texts]
    rate = case.units / seconds
    return Sample(name, dtype, case_name, turn, seconds, rate, foreign, stolen, load, now, digests)
