"""What the promise costs: tokens per second of exact numerics against fast, interleaved in one run.

Run with `make bench`. Three decoders compute the same forwards, in turn: native exact (what a scenario gets by
default), torch exact (padded tiles that keep a row's bits: what it gets without a compiler) and torch fast (the same
code, products in whatever shape the batch has: no promise). The cost is the time that exact takes beyond torch fast.

One thread unless `--threads` says more: where another process runs, torch's threads slow each other down many times
over, which would flatter the native kernels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.batch import Batch, Decoder, lay_out
from engine.decoders import choose_decoder
from engine.hf_folder import load_folder
from engine.kv_store import KVStore
from engine.model import Model
from engine.weights import tiny_model

SMOLLM2, CPU = Path("scenarios/models/SmolLM2-135M-Instruct"), torch.device("cpu")
NATIVE, TORCH, FAST = "native exact", "torch exact", "torch fast"
CONTEXT, BLOCK_SIZE = 128, 16
TURNS, LEAST_TURNS, ENOUGH_S = 21, 3, 2.0
FORWARDS = {"decode of 1": (1, 1), "decode of 8": (8, 1), "decode of 32": (32, 1), "prefill of 256": (1, 256)}

Load = Callable[[torch.dtype], Model]


def decoders(load: Load, dtype: torch.dtype, threads: int) -> dict[str, Decoder]:
    """All three, of the same weights; without the native one where it cannot be built, which prints a warning."""
    model, usual = load(dtype), choose_decoder(load(dtype), threads=threads)
    found: dict[str, Decoder] = {NATIVE: usual} if "native" in usual.numerics else {}
    found[TORCH] = choose_decoder(model, kernels="torch", threads=threads)
    found[FAST] = choose_decoder(model, numerics="fast", threads=threads)
    return found


def batch_of(rows: int, positions: int) -> Batch:
    """Every row computes the last of CONTEXT tokens, or a whole prompt of so many `positions`."""
    start = 0 if positions > 1 else CONTEXT - 1
    width = -(-(start + positions) // BLOCK_SIZE)
    tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    at, row = np.tile(np.arange(start, start + positions), rows), np.repeat(np.arange(rows), positions)
    starts = np.full(rows, start)
    return lay_out((at * 7919 + row) % 251, starts, starts + positions, tables, BLOCK_SIZE, slots=rows)


def rates(found: dict[str, Decoder], rows: int, positions: int) -> dict[str, float]:
    """Median positions per second of a forward and its best tokens, the decoders taking turns after one to warm up."""
    batch = batch_of(rows, positions)
    stores = {n: KVStore(d.config, batch.tables.size, BLOCK_SIZE, d.dtype, d.device) for n, d in found.items()}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    began = time.perf_counter()
    for turn in range(1 + TURNS):
        if turn > LEAST_TURNS and time.perf_counter() - began > ENOUGH_S:
            break
        for name in list(found) if turn % 2 else reversed(found):
            start = time.perf_counter()
            found[name].greedy(found[name].forward(batch, stores[name]))
            seconds[name].append(time.perf_counter() - start)
    return {name: rows * positions / statistics.median(values[1:]) for name, values in seconds.items()}


def report(model: str, load: Load, threads: int) -> None:
    """A line per dtype and forward."""
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        found = decoders(load, dtype, threads)
        for forward, (rows, positions) in FORWARDS.items():
            got = rates(found, rows, positions)
            shown = "".join(f"{got[name]:14.0f}" if name in got else f"{'-':>14}" for name in (NATIVE, TORCH, FAST))
            costs = "".join(
                f"{got[FAST] / got[name] - 1:+14.0%}" if name in got else f"{'-':>14}" for name in (NATIVE, TORCH)
            )
            print(f"  {model:8} {str(dtype).removeprefix('torch.'):9} {forward:15}{shown}{costs}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--threads", type=int, default=1, help="for SmolLM2, on a quiet machine; tiny has one")
    threads = options.parse_args().threads
    print(f"what the promise costs, decoders taking turns; load average before: {os.getloadavg()[0]:.1f}")
    print(f"tokens per second (prefill: positions), medians of {LEAST_TURNS} to {TURNS}; SmolLM2's threads: {threads}")
    print("cost: time that exact takes beyond torch fast; negative where exact is faster (target: under 5 %)")
    print(f"  {'':34}{NATIVE:>14}{TORCH:>14}{FAST:>14}{'cost, native':>14}{'cost, torch':>14}")
    report("tiny", lambda dtype: tiny_model(0, dtype, CPU), 1)
    if SMOLLM2.is_dir():
        report("SmolLM2", lambda dtype: load_folder(SMOLLM2, dtype, CPU), threads)
    else:
        print(f"  SmolLM2: {SMOLLM2} is not there; `make model` makes it")


if __name__ == "__main__":
    main()
