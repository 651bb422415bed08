"""The start-up check passes here, is fast, and names what breaks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import engine.attention
import engine.decoders
import engine.selftest
from batchbench import engine_factory
from batchbench.errors import EngineFailed
from batchbench.scenario import EngineSettings
from engine.errors import NumericsError
from engine.numerics import linear, padded_rows
from engine.selftest import choose_tiles
from tests.helpers import DTYPES, tiny


@pytest.mark.parametrize("dtype", DTYPES)
def test_this_machine_keeps_the_promise(dtype):
    choose_tiles(tiny(dtype, "torch"))


def test_a_linear_that_depends_on_the_row_count_is_named(monkeypatch):
    def by_row_count(x, weight, tile):
        out = F.linear(x, weight)
        return out if x.shape[0] <= tile else out + 1e-7 * out

    monkeypatch.setattr(engine.selftest, "linear", by_row_count)
    with pytest.raises(
        NumericsError,
        match=r"linear layers.0.qkv \(128, 64\) in tiles of 32 rows, repeated in three tiles .*float32 on cpu",
    ):
        choose_tiles(tiny(kernels="torch"))


def test_a_linear_that_depends_on_the_place_of_a_row_is_named(monkeypatch):
    def by_place(x, weight, tile):
        out = F.linear(x, weight)
        out[5] += 1e-6
        return out

    monkeypatch.setattr(engine.selftest, "linear", by_place)
    with pytest.raises(NumericsError, match=r"linear layers.0.qkv"):
        choose_tiles(tiny(kernels="torch"))


def test_a_linear_that_depends_on_the_other_rows_is_named(monkeypatch):
    def by_neighbours(x, weight, tile):
        return F.linear(x, weight) + 1e-6 * (x[1].abs().sum() > 0) * (x[1] != x[0]).any()

    monkeypatch.setattr(engine.selftest, "linear", by_neighbours)
    with pytest.raises(NumericsError, match=r"linear layers.0.qkv \(128, 64\) in tiles of 32 rows, among other rows"):
        choose_tiles(tiny(kernels="torch"))


def test_an_rms_norm_that_depends_on_the_row_count_is_named(monkeypatch):
    honest = engine.selftest.rms_norm
    monkeypatch.setattr(engine.selftest, "rms_norm", lambda x, w, eps: honest(x, w, eps) * (1 + 1e-6 * (len(x) > 500)))
    with pytest.raises(NumericsError, match="rms_norm of 1056 rows"):
        choose_tiles(tiny(kernels="torch"))


def test_a_torch_silu_with_its_remainder_loop_is_named(monkeypatch):
    def uneven(x):
        out = F.silu(x)
        out.view(-1)[-1] += 1e-6  # what a differently coded remainder loop does
        return out

    monkeypatch.setattr(engine.selftest, "silu", uneven)
    with pytest.raises(NumericsError, match="silu of 32 rows"):
        choose_tiles(tiny(kernels="torch"))


@pytest.mark.parametrize(
    ("breaks", "named"),
    [
        (lambda walk: len(walk.scatter) > walk.tiling.queries, "attention over 16 keys .*prefill against decode"),
        (lambda walk: len(walk.gather) > 20 * walk.tiling.queries, "attention over 16 keys .*among 31 others"),
        (lambda walk: len(walk.chunks) > 1 and len(walk.gather) > walk.tiling.queries, "attention over 67 keys"),
    ],
    ids=["tile", "company", "chunks"],
)
def test_attention_that_depends_on_its_company_is_named(monkeypatch, breaks, named):
    honest = engine.attention.paged_attention

    def by_company(queries, store, layer, walk):
        return honest(queries, store, layer, walk) * (1 + 1e-6 * breaks(walk))

    monkeypatch.setattr(engine.selftest, "paged_attention", by_company)
    with pytest.raises(NumericsError, match=named):
        choose_tiles(tiny(kernels="torch"))


def test_no_engine_is_built_on_a_machine_that_fails(monkeypatch):
    def fails(model):
        raise NumericsError("linear lm_head (256, 64)")

    monkeypatch.setattr(engine.decoders, "choose_tiles", fails)
    with pytest.raises(EngineFailed, match="NumericsError: linear lm_head"):
        engine_factory("own", EngineSettings(slots=1, block_size=4, kernels="torch"))


def test_a_tile_that_breaks_gives_way_to_one_that_holds(monkeypatch):
    """Kernels that treat the last rows of a 32-row tile differently, as AVX2 code paths do."""

    def by_strip(x, weight, tile):
        out = F.linear(x, weight)
        for start in range(0, len(x), tile):
            out[start + tile - tile % 24 : start + tile] += 1e-6
        return out

    monkeypatch.setattr(engine.selftest, "linear", by_strip)
    assert choose_tiles(tiny(kernels="torch")).rows == 48


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 128), (256, 128), (576, 192), (1536, 576), (576, 1536)])
def test_tiled_rows_do_not_depend_on_how_many_there_are(shape, dtype):
    """Shapes at which plain F.linear was seen to change a row's bits with the row count (docs/log.md)."""
    generator = torch.Generator().manual_seed(0)
    columns, rows = shape
    tile = tiny(dtype, "torch").tiles.rows
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    x = torch.randn(4 * tile, columns, generator=generator).to(dtype)
    want = linear(x, weight, tile)
    for n in range(1, 4 * tile):
        padded = F.pad(x[:n], (0, 0, 0, padded_rows(n, tile) - n))
        assert torch.equal(linear(padded, weight, tile)[:n], want[:n]), n


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["AVX2", "SSE4_2"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_promise_holds_on_processors_without_avx512(instructions, threads):
    """MKL takes other code paths there; whichever tile is chosen, the text must not depend on the pool."""
    environment = os.environ | {
        "MKL_ENABLE_INSTRUCTIONS": instructions,
        "ATEN_CPU_CAPABILITY": "avx2" if instructions == "AVX2" else "default",
    }
    code = f"""
from batchbench import build_requests, engine_factory, load_scenario, sweep_pool_sizes
scenario = load_scenario("scenarios/day34.toml")
settings = scenario.engine.model_copy(update={{"threads": {threads}, "device": "cpu", "kernels": "torch"}})
timings = sweep_pool_sizes(build_requests(scenario.workload), (48, 12, 8), engine_factory("own", settings))
gaps = [[text.logit_gaps for text in timing.texts.values()] for timing in timings]
assert gaps[0] == gaps[1] == gaps[2], "logits differ in their last bits"
print(timings[0].engine.numerics_detail)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("exact (torch, tiles of ")
