"""What this machine gives the project's own engine: devices, kernels, promises kept, ceilings measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from batchbench.adapters.own import load_model, resolve_device
from batchbench.environment import load_average, machine, versions
from batchbench.paths import FilePath
from batchbench.scenario import EngineSettings
from engine.batch import Decoder, lay_out
from engine.checkpoint import assemble, tensor_shapes
from engine.config import ModelConfig
from engine.cpu_kernels import compiler_version, load_kernels
from engine.decoders import choose_decoder
from engine.errors import KernelsUnavailable, NumericsError
from engine.kv_store import KVStore
from engine.model import Model

Report = dict[str, Any]

_DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
_READ_BYTES = 512 * 2**20  # beyond every cache
_REPEATS = 5
_ROWS, _WIDTH = 512, 1024
# Little but products of that width; its output matrix is too small to count.
_WIDE = ModelConfig(
    vocab_size=16, hidden_size=_WIDTH, layers=1, heads=16, kv_heads=16, head_dim=64, intermediate_size=4 * _WIDTH,
    max_positions=_ROWS,
)  # fmt: skip


def examine(model: str | None, threads: int) -> Report:
    """Everything that `batchbench doctor` prints. model: a checkpoint to test beside `tiny`; threads: of the tests.

    `ok`: the decoder that a scenario gets by default keeps its promise, in every dtype. Raises UsageError for a
    model that is not there. Leaves torch at `threads`.
    """
    load, about = load_average(), machine()  # before this process adds its own
    torch.set_num_threads(threads)
    settings = [
        EngineSettings(model=FilePath(name), slots=1, dtype=dtype, threads=threads)
        for name in ("tiny", *([model] if model else []))
        for dtype in _DTYPES
    ]
    numerics = [found for one in settings for found in _promises(one)]
    cores = about["cores"]
    counts = sorted({1, cores if isinstance(cores, int) else 1})
    report = {
        "ok": all(found["keeps"] for found in numerics if found["default"]),
        "machine": {**about, "load_average": load},
        "versions": versions(),
        "devices": ["cpu", *(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))],
        "threads": threads,
        **_kernels(),
        "numerics": numerics,
        "ceilings": [found for count in counts for found in _ceilings(count)],
    }
    torch.set_num_threads(threads)
    return report


def _kernels() -> Report:
    """The compiler, and why there are no native kernels where there are none."""
    found: Report = {"compiler": None, "native_kernels": "built"}
    try:
        found["compiler"] = compiler_version()
        load_kernels()
    except KernelsUnavailable as error:
        found["native_kernels"] = f"not available: {error}"
    return found


def _promises(settings: EngineSettings) -> Iterator[Report]:
    """The numerics self-test of every decoder that can run this model, the default one first."""
    usual = resolve_device("auto")
    choices = [(torch.device("cpu"), "native"), (torch.device("cpu"), "torch")]
    if usual.type != "cpu":
        choices.insert(0, (usual, "auto"))
    default = True
    for device, kernels in choices:
        model = load_model(settings, device)
        start = time.perf_counter()
        keeps: bool | None
        try:
            decoder = choose_decoder(model, kernels=kernels, threads=settings.threads)
            keeps, detail = True, decoder.numerics
        except NumericsError as error:
            keeps, detail = False, str(error)
        except KernelsUnavailable as error:
            keeps, detail = None, str(error)
        yield {
            "model": settings.model.written,
            "dtype": settings.dtype,
            "device": str(device),
            "kernels": kernels,
            "default": default and keeps is not None,
            "keeps": keeps,
            "detail": detail,
            "seconds": time.perf_counter() - start,
        }
        default = default and keeps is None


def _ceilings(threads: int) -> Iterator[Report]:
    """Medians of several, at whatever load the machine has."""
    torch.set_num_threads(threads)
    array = torch.ones(_READ_BYTES // 4)
    yield _rate("read, torch", "float32", threads, "GB/s", array.nbytes / _median_s(array.sum))
    for dtype in _DTYPES:
        # Random: a processor may clock higher on ones.
        x, weight = (torch.randn(rows, _WIDTH).to(getattr(torch, dtype)) for rows in (_ROWS, 4 * _WIDTH))
        seconds = _median_s(partial(F.linear, x, weight))
        yield _rate("products, torch", dtype, threads, "GFLOP/s", 2 * _ROWS * weight.numel() / seconds)
        try:
            native = choose_decoder(_wide_model(dtype), kernels="native", threads=threads)
        except (KernelsUnavailable, NumericsError):
            continue
        operations = 2 * _ROWS * native.matrix_bytes / native.dtype.itemsize
        yield _rate("a prefill, native", dtype, threads, "GFLOP/s", operations / _median_s(_prefill(native)))


def _rate(what: str, dtype: str, threads: int, unit: str, per_s: float) -> Report:
    return {"what": what, "dtype": dtype, "threads": threads, "rate": per_s / 1e9, "unit": unit}


def _median_s(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _wide_model(dtype: str) -> Model:
    shapes = tensor_shapes(_WIDE)
    draw = torch.Generator().manual_seed(0)
    return assemble(
        _WIDE,
        shapes,
        lambda name: torch.randn(shapes[name], generator=draw) * _WIDTH**-0.5,
        getattr(torch, dtype),
        torch.device("cpu"),
    )


def _prefill(decoder: Decoder) -> Callable[[], object]:
    """One forward of one request; its attention is not counted as operations."""
    tables = np.zeros((1, 1), dtype=np.int32)
    batch = lay_out(np.arange(_ROWS) % _WIDE.vocab_size, [0], [_ROWS], tables, block_size=_ROWS, slots=1)
    return partial(decoder.forward, batch, KVStore(_WIDE, 1, _ROWS, decoder.dtype, decoder.device))
