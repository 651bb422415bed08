"""Checks and measures the engine on one GPU in under eight minutes, and writes what it saw as one JSON file.

    python -m benchmarks.gpu_check [results/gpu/NAME.json]

Sections are independent: one that fails or overruns its limit is recorded with its error, and the next one runs.
The file is written anew after every section. `--device cpu` runs everything at toy sizes and the kernels in
Triton's interpreter, to test the script; its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch, Decoder, lay_out
from engine.checkpoint import assemble, tensor_shapes
from engine.config import ModelConfig, SchedulerConfig
from engine.core import Engine
from engine.decoders import choose_decoder
from engine.kv_store import KVStore
from engine.model import Model
from engine.plan import Plan
from engine.runner import ModelRunner
from engine.weights import tiny_model

BUDGET_S = 470
BLOCK_SIZE = 16
# About 1.1 billion parameters in the shape of Llama 3.2 1B, with a vocabulary of its own output matrix.
MID = ModelConfig(32_000, 2048, 16, 32, 8, 64, 8192, 8192, rope_theta=500_000.0)
TOY = ModelConfig(256, 32, 1, 2, 1, 16, 32, 512)  # few sizes of matrices: every one is tried

Json = dict[str, Any]


class OutOfTime(Exception):
    """A section overran its limit."""


@dataclass
class Bench:
    """What every section needs: the device, the sizes, the model."""

    device: torch.device
    toy: bool
    measured: Json = field(default_factory=dict)  # figures of one section that another one needs

    @property
    def rows(self) -> tuple[int, ...]:
        return (1, 3) if self.toy else (1, 8, 32, 128)

    @cached_property
    def model(self) -> Model:
        return random_model(TOY if self.toy else MID, self.device)

    @cached_property
    def decoder(self) -> Decoder:
        """What runs the model: the product's own choice on a GPU; at toy sizes the same, interpreted."""
        return choose_decoder(self.model, kernels="triton" if self.toy else "auto")

    @cached_property
    def shapes(self) -> Any:
        from engine.triton_selftest import choose_shapes

        return choose_shapes(self.model.weights.matrices())

    def seconds(self, call: Callable[[], object], repeats: int = 10) -> float:
        """Median wall seconds of a call, the device's work included, after one call that is not counted."""
        taken = []
        for _ in range(1 + (1 if self.toy else repeats)):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)


def random_model(config: ModelConfig, device: torch.device) -> Model:
    """Normal weights in bfloat16 at gain 2, where texts depend on their context and do not loop at once."""
    found = tensor_shapes(config)
    draw = torch.Generator(device).manual_seed(0)

    def read(name: str) -> Tensor:
        shape = found[name]
        if len(shape) == 1:
            return torch.ones(shape, device=device)
        gain = 1.0 if name in ("model.embed_tokens.weight", "lm_head.weight") else 2.0
        deviation = 1.0 if "embed" in name else gain * shape[1] ** -0.5
        return torch.randn(shape, generator=draw, device=device).mul_(deviation)

    return assemble(config, found, read, torch.bfloat16, device)


# --- sections -----------------------------------------------------------------------------------------------------


def ceilings(bench: Bench) -> Json:
    """What the device gives at best: bytes per second read and copied, matrix products per type."""
    elements = 2**16 if bench.toy else 2**30
    source = torch.ones(elements, device=bench.device)
    target = torch.empty_like(source)
    read_s, copy_s = bench.seconds(source.sum), bench.seconds(lambda: target.copy_(source))
    found: Json = {"read_bytes_per_s": source.nbytes / read_s, "copied_bytes_per_s": 2 * source.nbytes / copy_s}
    bench.measured["read_bytes_per_s"] = max(found.values())  # of reading or copying, whichever torch does better
    size = 128 if bench.toy else 8192
    for dtype in (torch.bfloat16, torch.float32):
        a, b = bench.random(size, size, dtype=dtype), bench.random(size, size, dtype=dtype)
        found[f"{dtype}_flop_per_s"] = 2 * size**3 / bench.seconds(lambda a=a, b=b: a @ b, 5)  # type: ignore[misc]
    return found


def kernels_right(bench: Bench) -> Json:
    """Worst difference of the Triton kernels from float64 on this device, over block and head sizes."""
    from engine.triton_linear import SHAPES, linear

    found: Json = {}
    for dtype in (torch.bfloat16, torch.float32):
        cases = [(64, 1, 40), (64, 5, None), (64, 64, 300), (32, 16, None), (80, 16, None), (128, 16, None)]
        for head_dim, block_size, window in [(16, 3, None), (16, 16, 40)] if bench.toy else cases:
            name = f"attention {dtype} head_dim {head_dim} block_size {block_size} window {window}"
            found[name] = attention_error(bench, dtype, head_dim, block_size, window)
        rows, inner, out = (5, 100, 40) if bench.toy else (300, 2500, 1000)
        x, weight = bench.random(rows, inner, dtype=dtype), bench.random(out, inner, dtype=dtype)
        want = x.double() @ weight.double().T
        for shape in SHAPES[dtype]:
            worst = (linear(x, weight, (shape,)).double() - want).abs().max() / want.abs().max()
            found[f"linear {dtype} {shape.rows}x{shape.out}x{shape.inner}, relative"] = worst.item()
    limits = {"attention torch.bfloat16": 2e-2, "attention torch.float32": 1e-5}
    limits |= {"linear torch.bfloat16": 2**-8, "linear torch.float32": 1e-5}
    over = [name for name, value in found.items() if not value <= limits[" ".join(name.split()[:2])]]
    return {"worst": found, "limits": limits, "over": over}


def attention_error(bench: Bench, dtype: torch.dtype, head_dim: int, block_size: int, window: int | None) -> float:
    """Worst absolute difference of a mixed batch from dense attention in float64."""
    from engine.triton_attention import paged_attention, plan_tiles, tile_queries

    rows = [(0, 9), (70, 71)] if bench.toy else [(0, 300), (511, 512), (700, 701), (1000, 1030)]
    heads, kv_heads, device = 8, 2, bench.device
    width = -(-max(stop for _, stop in rows) // block_size)
    tables = torch.randperm(width * len(rows), device=device).view(len(rows), width).int()
    keys, values = (bench.random(kv_heads, tables.numel() * block_size, head_dim, dtype=dtype) for _ in "kv")
    starts, stops = (np.array(column) for column in zip(*rows, strict=True))
    q = bench.random(int((stops - starts).sum()), heads, head_dim, dtype=dtype) * head_dim**-0.5
    tiles = torch.from_numpy(plan_tiles(starts, stops, tile_queries(heads // kv_heads, dtype))).to(device)
    got = paged_attention(q, keys, values, tables, tiles, block_size, window=window)
    worst, first = 0.0, 0
    for table, (start, stop) in zip(tables.long(), rows, strict=True):
        at, query_at = torch.arange(stop, device=device), torch.arange(start, stop, device=device)[:, None]
        cells = table[at // block_size] * block_size + at % block_size
        k, v = (x[:, cells].double().repeat_interleave(heads // kv_heads, 0) for x in (keys, values))
        mine = slice(first, first + stop - start)
        scores = torch.einsum("qhd,hkd->hqk", q[mine].double(), k)
        hidden = (at > query_at) | (at <= query_at - (window or stop))
        want = torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        worst, first = max(worst, (got[mine].double() - want).abs().max().item()), mine.stop
    return worst


def kernels_keep_bits(bench: Bench) -> Json:
    """The start-up trial of the kernels in the model's shapes: which tile shapes agree, and seconds it took."""
    from engine.triton_linear import BASE, SHAPES
    from engine.triton_selftest import check_attention, check_rms_norm, choose_shapes

    config = bench.model.config
    start = time.perf_counter()
    shapes = bench.shapes
    found: Json = {"shapes kept": [str(shape) for shape in shapes], "linear_s": time.perf_counter() - start}
    found["all shapes agree"] = len(shapes) == len(SHAPES[torch.bfloat16])
    narrow = [("narrow", bench.random(40, 24 if bench.toy else 576, dtype=torch.float32))]
    found["float32 shapes kept"] = [str(shape) for shape in choose_shapes(narrow)]
    found["base"] = str(SHAPES[torch.bfloat16][BASE])
    start = time.perf_counter()
    for dtype in (torch.bfloat16,) if bench.toy else (torch.bfloat16, torch.float32):
        for block_size in (16,) if bench.toy else (1, 16, 64):
            check_attention(config, block_size, dtype, bench.device)
    check_rms_norm(bench.model.weights.norm, config.rms_eps)
    return found | {"attention and norm": "the same bits in every company", "attention_s": time.perf_counter() - start}


def products_speed(bench: Bench) -> Json:
    """All matrices of the model once, as one CUDA graph: seconds and share of the read bandwidth, beside torch's."""
    from engine.triton_forward import captured
    from engine.triton_linear import BASE, SHAPES, linear

    matrices = [matrix for _, matrix in bench.model.weights.matrices()]
    nbytes = sum(matrix.nbytes for matrix in matrices)
    found: Json = {"weight_bytes": nbytes}
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "shapes by rows": lambda x, weight: linear(x, weight, bench.shapes),
        "one shape": lambda x, weight: linear(x, weight, (SHAPES[torch.bfloat16][BASE],)),
        "torch": F.linear,
    }
    for rows in (*bench.rows, *(() if bench.toy else (2048,))):
        inputs = {inner: bench.random(rows, inner) for inner in {matrix.shape[1] for matrix in matrices}}
        for way, product in ways.items():

            def once(product: Callable[[Tensor, Tensor], Tensor] = product, inputs: Any = inputs) -> Tensor:
                return [product(inputs[matrix.shape[1]], matrix) for matrix in matrices][-1]

            taken = bench.seconds(captured(once, bench.device))
            share = nbytes / taken / bench.measured["read_bytes_per_s"]
            flop_per_s = sum(2 * rows * matrix.numel() for matrix in matrices) / taken
            found[f"{rows} rows, {way}"] = {"s": taken, "of_read_bandwidth": share, "flop_per_s": flop_per_s}
    return found


def forward_speed(bench: Bench) -> Json:
    """Decode as the engine does it, a graph and one copy of token ids per iteration, and one long prefill."""
    decoder, context = bench.decoder, 8 if bench.toy else 512

    def taken(rows: int, start: int) -> float:
        """Seconds of a forward of positions start..context-1 in each row."""
        store = KVStore(decoder.config, rows * -(-context // BLOCK_SIZE), BLOCK_SIZE, decoder.dtype, decoder.device)
        store.keys.normal_(), store.values.normal_()
        batch = even_batch(rows, start, context)
        return bench.seconds(lambda: decoder.greedy(decoder.forward(batch, store)))

    found = {
        f"decode {rows} rows": decode_figures(bench, rows, context, taken(rows, context - 1)) for rows in bench.rows
    }
    positions = bench.rows[1] * context
    prefill_s = taken(bench.rows[1], 0)
    flop = 2 * sum(m.numel() for name, m in bench.model.weights.matrices() if name != "lm_head") * positions
    found["prefill"] = {"positions_per_s": positions / prefill_s, "flop_per_s": flop / prefill_s}
    return found


def even_batch(rows: int, start: int, stop: int) -> Batch:
    """Positions start..stop-1 of every row, each row's blocks in order."""
    width = -(-stop // BLOCK_SIZE)
    tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    token_ids = np.repeat(np.arange(rows) % 250, stop - start)
    return lay_out(token_ids, [start] * rows, [stop] * rows, tables, BLOCK_SIZE, rows)


def decode_figures(bench: Bench, rows: int, context: int, taken: float) -> Json:
    """Tokens per second beside the floor: weights once and every row's K/V, at the read bandwidth."""
    model = bench.model
    kv = rows * context * model.config.kv_elements_per_token * model.dtype.itemsize
    floor = (model.matrix_bytes + kv) / bench.measured["read_bytes_per_s"]
    return {"s": taken, "tokens_per_s": rows / taken, "floor_s": floor, "of_floor": floor / taken}


class RecordingRunner(ModelRunner):
    """Keeps every row's logits by (request id, position of the token they predict)."""

    def __init__(self, model: Decoder, config: SchedulerConfig) -> None:
        super().__init__(model, config)
        self.seen: dict[tuple[str, int], Tensor] = {}

    def logits(self, plan: Plan) -> Tensor:
        logits = super().logits(plan)
        self.seen.update(zip(zip(plan.request_ids, plan.stops, strict=True), logits.clone(), strict=False))
        return logits


def engine_keeps_bits(bench: Bench) -> Json:
    """Logits through the real engine, of both kernels: in company, alone, and resumed after eviction; torch.equal."""
    requests, prompt, output = (3, 6, 3) if bench.toy else (8, 40, 40)
    models: dict[str, Decoder] = {"mid torch.bfloat16": bench.decoder}
    for dtype in () if bench.toy else (torch.float32, torch.bfloat16):
        for kernels in ("triton", "torch"):
            models[f"tiny {dtype} {kernels}"] = choose_decoder(tiny_model(0, dtype, bench.device), kernels=kernels)
    found: Json = {}
    for name, model in models.items():
        blocks = -(-(prompt + requests + output) // 4)
        company = logits_of(model, range(requests), prompt, output, blocks * requests)
        others = {"alone": logits_of(model, (1,), prompt, output, blocks)}
        others["evicted"] = logits_of(model, range(requests), prompt, output, blocks * requests // 2)
        found[name] = {"numerics": model.numerics, "preemptions": others["evicted"][1]}
        for how, (seen, _) in others.items():
            different = [key for key, logits in seen.items() if not torch.equal(logits, company[0][key])]
            found[name][how] = {"compared": len(seen), "different": len(different)}
    return found


def logits_of(
    model: Decoder, numbers: Any, prompt: int, output: int, pool_blocks: int
) -> tuple[dict[tuple[str, int], Tensor], int]:
    """Run requests (numbered, of unequal lengths) to their end; every logit seen, and evictions."""
    config = SchedulerConfig(len(numbers), pool_blocks, 4)
    runner = RecordingRunner(model, config)
    engine = Engine(config, runner)
    for number in numbers:
        draw = np.random.default_rng(number)
        engine.submit(f"r{number}", draw.integers(model.config.vocab_size, size=prompt + number).tolist(), output)
    evictions = 0
    while engine.has_work:
        evictions += len(engine.step().evicted)
    return runner.seen, evictions


def day34(bench: Bench) -> Json:
    """The Day-34 sweep on this device: texts proved identical, counters beside those of the CPU."""
    from batchbench import build_requests, engine_factory, load_scenario, sweep_pool_sizes
    from batchbench.demand import resolve_points

    scenario = load_scenario(Path(__file__).parents[1] / "scenarios" / "day34.toml")
    requests = build_requests(scenario.workload)
    rows: dict[str, list[Json]] = {}
    for device in dict.fromkeys(("cpu", str(bench.device))):
        settings = scenario.engine.model_copy(update={"device": device})
        make_engine = engine_factory("own", settings)
        points = resolve_points(scenario.sweep, requests, make_engine, make_engine)
        timings = sweep_pool_sizes(requests, points, make_engine)
        rows[device] = [pool_figures(timing) for timing in timings]
    counted = [[{k: v for k, v in row.items() if k != "engine_s"} for row in pools] for pools in rows.values()]
    return {"pools": rows[str(bench.device)], "counters equal those of the CPU": counted[0] == counted[-1]}


def larger_sweep(bench: Bench) -> Json:
    """The mid-size model through four pools: texts proved identical, what the smaller pools cost."""
    from batchbench import build_requests, sweep_pool_sizes
    from batchbench.adapters.own import OwnEngine
    from batchbench.scenario import EngineSettings
    from batchbench.workload_schema import Workload

    count, prompt, output = (2, 6, 4) if bench.toy else (32, 192, 64)
    workload = Workload(requests=count, prompt_tokens=prompt, output_tokens=output)
    settings = EngineSettings(slots=count, block_size=BLOCK_SIZE, device=str(bench.device), dtype="bfloat16")
    whole = count * -(-(prompt + output) // BLOCK_SIZE)
    pools = [whole, *(max(whole * share // 8, whole // count) for share in (6, 4, 3))]
    requests = build_requests(workload)
    timings = sweep_pool_sizes(
        requests,
        list(dict.fromkeys(pools)),
        lambda pool_blocks, /, **_: OwnEngine(settings, bench.decoder, pool_blocks),
    )
    texts = [timing.texts[request.request_id].token_ids for timing in timings[:1] for request in requests]
    return {
        "numerics": bench.decoder.numerics,
        "pools": [pool_figures(timing) for timing in timings],
        "distinct tokens per text, median": statistics.median(len(set(text)) for text in texts),
    }


def pool_figures(timing: Any) -> Json:
    names = ("pool_blocks", "forward_tokens", "recomputed_tokens", "rebuilt_tokens", "preemptions", "engine_s")
    return {name: getattr(timing, name) for name in names}


def engine_speed(bench: Bench) -> Json:
    """Tokens per second of the engine with every slot decoding, and positions per second of its prefill."""
    model = bench.decoder
    prompt, output = (6, 3) if bench.toy else (128, 48)
    found: Json = {"numerics": model.numerics}
    for rows in bench.rows:
        config = SchedulerConfig(rows, rows * -(-(prompt + output) // BLOCK_SIZE), BLOCK_SIZE)
        engine = Engine(config, ModelRunner(model, config))
        for number in range(rows):
            draw = np.random.default_rng(number)
            engine.submit(f"r{number}", draw.integers(model.config.vocab_size, size=prompt).tolist(), output)
        decode_s: list[float] = []
        prefill_s = 0.0
        while engine.has_work:
            bench.wait()
            start = time.perf_counter()
            step = engine.step()
            if step.prefill_rows:
                prefill_s += time.perf_counter() - start
            elif step.issued_tokens == rows:
                decode_s.append(time.perf_counter() - start)
        found[f"{rows} rows"] = decode_figures(bench, rows, prompt + output // 2, statistics.median(decode_s))
        found[f"{rows} rows"]["prefill_positions_per_s"] = rows * prompt / prefill_s
    return found


SECTIONS: tuple[tuple[Callable[[Bench], Json], int], ...] = (  # with their limits in seconds
    (ceilings, 30),
    (kernels_right, 90),
    (kernels_keep_bits, 60),
    (products_speed, 60),
    (forward_speed, 60),
    (engine_keeps_bits, 80),
    (day34, 60),
    (engine_speed, 80),
    (larger_sweep, 80),
)


# --- running them -------------------------------------------------------------------------------------------------


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raise OutOfTime in the block once the limit is over, as soon as Python runs again."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"not done after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def environment(device: torch.device) -> Json:
    """Versions and device. No host name."""
    versions: Json = {"python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "kv-batchbench"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    found: Json = {"versions": versions, "device": "cpu", "torch_cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return found


def run_sections(bench: Bench, report: Json, save: Callable[[], None], budget_s: float) -> None:
    """Run every section within what is left of the budget, and save after each."""
    end = time.perf_counter() + budget_s
    for section, limit_s in SECTIONS:
        start = time.perf_counter()
        entry: Json = {"ok": True}
        try:
            with limited(min(limit_s, end - start)):
                entry["found"] = section(bench)
        except Exception as error:  # recorded, and the rest still runs
            entry = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        entry["s"] = round(time.perf_counter() - start, 3)
        report["sections"][section.__name__] = entry
        save()
        print(f"{section.__name__:20} {entry['s']:8.1f} s  {'ok' if entry['ok'] else entry['error'][:200]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, help="JSON file to write (default: results/gpu/<device>.json)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: toy sizes, to test the script")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all sections together")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no CUDA device; try --device cpu, which runs toy sizes", file=sys.stderr)
        return 2
    if options.device == "cpu":
        importlib.import_module("tests.triton_interpreter").enable()
        torch.set_num_threads(1)  # toy products gain nothing from more
    device = torch.device(options.device)
    report: Json = {"environment": environment(device), "toy": device.type == "cpu", "sections": {}}
    name = re.sub(r"[^a-z0-9]+", "-", report["environment"]["device"].lower())
    out = options.out or Path("results/gpu") / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        out.write_text(json.dumps(report, indent=1) + "\n")

    run_sections(Bench(device, toy=device.type == "cpu"), report, save, options.budget_s)
    print(f"wrote {out}")
    return 0 if all(section["ok"] for section in report["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
