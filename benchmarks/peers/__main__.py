"""Measures batchbench and its peers, interleaved: `python -m benchmarks.peers`, or `make bench-peers`.

Every round runs every case on every peer in every dtype, one after another; a measurement that others disturbed is
repeated. The record is written after each measurement, so an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.install import DTYPES, MACHINE, PEERS, CannotInstall, environment, prepare_weights
from benchmarks.peers.measure import CASES, Worker, WorkerFailed, measure
from benchmarks.peers.table import markdown

NATURAL_OUTPUT, ROOMY, TIGHT = 128, 32 * 1024, 1536  # tokens; a request needs up to 64 + 128 positions
PREEMPTING = ("batchbench", "openvino", "vllm")  # peers whose pool can be given so small that they preempt


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)

    def some_of(known: Any) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            names = text.split(",")
            if unknown := [name for name in names if name not in known]:
                raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; known: {', '.join(known)}")
            return names

        return split

    for option, known in (("--peers", PEERS), ("--dtypes", DTYPES), ("--cases", CASES)):
        parser.add_argument(option, type=some_of(known), default=list(known), help=f"some of {','.join(known)}")
    parser.add_argument("--rounds", type=int, default=5, help="of every measurement; 0 with --changes: those alone")
    parser.add_argument("--tries", type=int, default=3, help="measurements at most where others disturb them")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores of each engine")
    parser.add_argument("--cache", type=Path, default=Path(".peers"), help="environments and weights, kept")
    parser.add_argument("--out", type=Path, default=Path("out/peers"), help="folder of peers.json and peers.md")
    parser.add_argument("--natural", type=Path, default=Path("batchbench/natural.toml"), help="prompts, as TOML")
    parser.add_argument("--changes", action="store_true", help="also count texts that a preempting pool changes")
    return parser.parse_args()


class Run:
    """What is measured, the record so far, and the workers that are loaded."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cache: Path = options.cache.resolve()
        self.workers: dict[tuple[str, str], Worker] = {}
        self.record: dict[str, Any] = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
            "threads": options.threads,
            "about": {},
            "failed": {},
            "ceilings": [],
            "changes": [],
            "samples": [],
        }

    def save(self) -> None:
        """Both files, each complete or as before."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        for name, text in (("peers.json", json.dumps(self.record)), ("peers.md", markdown(self.record))):
            unfinished = self.options.out / f"{name}.new"
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self.options.out / name)

    def worker(self, name: str, dtype: str, pool_tokens: int = 0) -> Worker:
        """Load a peer. Raises WorkerFailed."""
        peer = MACHINE if name == "machine" else PEERS[name]
        python = environment(self.cache, name, peer)
        log = self.cache / "logs" / f"{name}-{dtype}.log"
        _say(f"loading {peer.title} {dtype}")
        return Worker(peer, python, self.cache / "weights", dtype, self.options.threads, log, pool_tokens)

    def install(self) -> None:
        """The environment of every peer. One that cannot be had is recorded with its reason."""
        for name in list(self.options.peers):
            try:
                environment(self.cache, name, PEERS[name])
            except CannotInstall as error:
                self.record["failed"][name] = str(error)
                self.options.peers.remove(name)

    def load(self) -> None:
        """Every worker of the run, warmed up on every case. A peer that fails is recorded with its reason."""
        for dtype in self.options.dtypes:
            self.workers["machine", dtype] = self.worker("machine", dtype)
            for name in self.options.peers:
                with self.reported(name, dtype):
                    worker = self.workers[name, dtype] = self.worker(name, dtype)
                    self.record["about"][name] = worker.about
                    for case in self.options.cases:
                        worker.warm_up(CASES[case])

    def rounds(self) -> None:
        """The measurements, interleaved. Order within a round is the table's."""
        for turn in range(self.options.rounds):
            for dtype in self.options.dtypes:
                ceilings = self.workers["machine", dtype].ask("ceilings")["result"]
                self.record["ceilings"].append({"dtype": dtype, "round": turn, **ceilings})
                for case in self.options.cases:
                    for name in self.options.peers:
                        if (name, dtype) in self.workers:
                            with self.reported(name, dtype):
                                self.one(name, dtype, case, turn)

    def one(self, name: str, dtype: str, case: str, turn: int) -> None:
        """One measurement, repeated while it was disturbed; all tries are kept."""
        for _ in range(self.options.tries):
            sample = measure(self.workers[name, dtype], name, dtype, case, turn)
            self.record["samples"].append(sample.as_dict())
            self.save()
            note = f"  disturbed: others {sample.foreign_share:.0%}, stolen {sample.stolen_share:.0%}"
            _say(
                f"round {turn + 1} {dtype} {case:>7} {name:<13}{sample.rate:9,.1f}/s{note if sample.disturbed else ''}"
            )
            if not sample.disturbed:
                return

    def changes(self) -> None:
        """How many natural texts differ between a pool that holds all requests and one that makes it preempt."""
        prompts = json.loads((self.cache / "weights" / "natural.json").read_text(encoding="utf-8"))
        prompts = [prompt[:64] for prompt in prompts[:32]]
        for dtype in self.options.dtypes:
            for name in (name for name in self.options.peers if name in PREEMPTING):
                texts = []
                for pool_tokens in (ROOMY, TIGHT):
                    with self.reported(name, dtype):
                        worker = self.worker(name, dtype, pool_tokens)
                        try:
                            asked = {"prompts": prompts, "output_tokens": NATURAL_OUTPUT, "at_most": len(prompts)}
                            texts.append(worker.ask("generate", **asked)["result"])
                        finally:
                            worker.close()
                if len(texts) == 2:
                    changed = sum(roomy != tight for roomy, tight in zip(*texts, strict=True))
                    fact = {"peer": name, "dtype": dtype, "requests": len(prompts), "changed": changed}
                    self.record["changes"].append({**fact, "roomy": ROOMY, "tight": TIGHT})
                    self.save()

    @contextmanager
    def reported(self, name: str, dtype: str) -> Iterator[None]:
        """Turn a peer's failure into a line of the record; the run goes on without it."""
        try:
            yield
        except WorkerFailed as error:
            self.record["failed"][name] = f"{dtype}: {error}"
            _say(f"{name} {dtype} failed: {error}")
            if worker := self.workers.pop((name, dtype), None):
                worker.close()

    def close(self) -> None:
        while self.workers:
            self.workers.popitem()[1].close()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = arguments()
    run = Run(options)
    try:
        prepare_weights(run.cache, options.peers, options.natural)
    except CannotInstall as error:
        raise SystemExit(f"the weights cannot be prepared: {error}") from None
    try:
        run.install()
        if options.rounds:
            run.load()
            run.rounds()
            run.close()  # the next pools need their memory
        if options.changes:
            run.changes()
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted; what was measured until then is in {options.out}") from None
    finally:
        run.close()
        run.save()
    print(markdown(run.record))


if __name__ == "__main__":
    main()
