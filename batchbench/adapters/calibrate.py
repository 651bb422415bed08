"""Measures what an eviction costs on this machine: resumes through the own engine, copies through its runner."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import torch

from batchbench.adapters.engine import translated
from batchbench.adapters.own import kv_bytes_per_token, load_decoder, resolve_device
from batchbench.calibration import Calibration, CopyPoint, ResumePoint, Timing, ladder
from batchbench.environment import machine, versions
from batchbench.errors import UsageError
from batchbench.scenario import EngineSettings
from engine.batch import Decoder
from engine.config import SchedulerConfig
from engine.core import Engine
from engine.plan import Copy, Plan
from engine.runner import ModelRunner

_Seconds = dict[int, list[float]]


def calibrate(
    settings: EngineSettings, max_tokens: int, rounds: int, on_round: Callable[[int], None] = lambda done: None
) -> Calibration:
    """Costs of victims of 1 to `max_tokens` cached positions, as medians of `rounds` interleaved rounds.

    An iteration of the engine that computes a whole context beside decoding rows is compared with the next one, which
    decodes the same rows: weights are read once by either, so a resume costs less than a forward of its own. Half of
    the slots decode beside. The schedule is the default one, whatever the scenario's: what a rule set costs is not
    measured. Raises UsageError if the model has fewer positions, or if memory does not suffice.
    """
    device = resolve_device(settings.device)
    torch.set_num_threads(settings.threads)
    decoder = load_decoder(settings, device)
    if max_tokens + 2 > decoder.config.max_positions:
        raise UsageError(
            f"a resume of {max_tokens} cached positions and a decode feed {max_tokens + 2}, the model has "
            f"{decoder.config.max_positions}; lower --max-tokens"
        )
    bench = _Bench(decoder, settings, max_tokens)
    for done in range(1, rounds + 1):
        bench.round()
        on_round(done)
    return Calibration(
        batchbench=versions()["kv-batchbench"],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=settings.model.written,
        dtype=settings.dtype,
        device=str(device),
        threads=settings.threads,
        numerics=settings.numerics,
        numerics_detail=decoder.numerics,
        block_size=settings.block_size,
        kv_bytes_per_token=kv_bytes_per_token(decoder),
        machine=dict(machine()),
        beside_rows=bench.beside,
        rounds=rounds,
        resumes=tuple(
            ResumePoint(tokens=n, resume=_timing(bench.resume_s[n]), decode=_timing(bench.decode_s[n]))
            for n in bench.contexts
        ),
        copies=tuple(
            CopyPoint(blocks=n, out=_timing(bench.out_s[n]), back=_timing(bench.back_s[n])) for n in bench.copies
        ),
    )


class _Bench:
    """An engine with room for the longest victim beside decoding rows, and the seconds measured so far."""

    def __init__(self, decoder: Decoder, settings: EngineSettings, max_tokens: int) -> None:
        size = settings.block_size
        self.beside = settings.slots // 2
        self.contexts = ladder(max_tokens, size)
        blocks = -(-max_tokens // size)
        self.copies = ladder(blocks, 2)
        # Beside rows decode twice per rung and once per copy and way; the model's own limit still holds.
        steps = 2 * len(self.contexts) + 2 * len(self.copies) + 2
        self.company = max(1, min(size, decoder.config.max_positions - steps))
        self.steps = min(steps, decoder.config.max_positions - self.company)
        pool = 2 * blocks + 1 + self.beside * -(-(self.company + self.steps) // size)
        config = SchedulerConfig(self.beside + 1, pool, size, reclaim="swap", swap_blocks=2 * blocks)
        try:
            with translated():
                self.runner = ModelRunner(decoder, config)
                decoder.prepare(self.runner.store, config.slots, size)
                self.engine = Engine(config, self.runner)
        except (RuntimeError, MemoryError) as error:
            raise UsageError(
                f"pools of {pool} + {2 * blocks} blocks of {size} could not be allocated: {error}"
            ) from None
        for store in (self.runner.store, self.runner.host):  # a page's first touch is not the link
            store.keys.fill_(0.5)
            store.values.fill_(0.5)
        self.order = random.Random(0)
        self.resume_s: _Seconds = {n: [] for n in self.contexts}
        self.decode_s: _Seconds = {n: [] for n in self.contexts}
        self.out_s: _Seconds = {n: [] for n in self.copies}
        self.back_s: _Seconds = {n: [] for n in self.copies}

    def round(self) -> None:
        """Every rung once, in an order of the round's own: neither a slow spell nor what ran before favours a rung."""
        company = [f"beside{n}" for n in range(self.beside)]
        rungs = [partial(self._resume, tokens) for tokens in self.contexts]
        rungs += [partial(self._copy, blocks) for blocks in self.copies]
        self.order.shuffle(rungs)
        with translated():
            for name in company:
                self.engine.submit(name, self._prompt(self.company), self.steps)
            if company:
                self.engine.step()
            for measure in rungs:
                measure()
            for name in company:
                self.engine.abort(name)

    def _resume(self, tokens: int) -> None:
        """A whole context beside the company, then a decode of all."""
        self.engine.submit("victim", self._prompt(tokens + 1), 2)
        self.resume_s[tokens].append(self._step_s())
        self.decode_s[tokens].append(self._step_s())
        self.engine.take("victim")

    def _copy(self, blocks: int) -> None:
        """Out and back, between blocks that lie scattered, as a run leaves them."""
        config = self.engine.config
        here = self.order.sample(range(config.pool_blocks), blocks)
        there = self.order.sample(range(config.swap_blocks), blocks)
        for out, seconds in ((True, self.out_s), (False, self.back_s)):
            if self.beside:
                self.engine.step()  # as in a run, a forward has had the caches in between
            seconds[blocks].append(self._copy_s(Copy(out, here, there)))

    def _prompt(self, tokens: int) -> list[int]:
        return [n % self.runner.model.config.vocab_size for n in range(tokens)]

    def _step_s(self) -> float:
        begin = time.perf_counter()
        self.engine.step()  # ends with the sampled tokens on the host, so a device has finished
        return time.perf_counter() - begin

    def _copy_s(self, copy: Copy) -> float:
        """The runner's own clock around the copy of an iteration that computes nothing."""
        return self.runner.execute(Plan(0, 0, 0, [copy], [], [], [], [], [], [])).copy_s


def _timing(seconds: list[float]) -> Timing:
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [0.0, 0.0, 0.0]
    return Timing(
        median_ms=round(statistics.median(seconds) * 1e3, 6),
        spread_ms=round((quartiles[2] - quartiles[0]) / 2 * 1e3, 6),
    )
