"""Numerics bugs, planted one at a time in the torch path and in the native kernels: each is caught by the claims."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import engine.attention
import engine.cpu_model
import engine.model
import engine.numerics
from batchbench import build_requests, engine_factory, load_scenario, sweep_pool_sizes
from batchbench.errors import TextsDiffer
from engine import cpu_kernels
from engine.decoders import choose_decoder
from engine.errors import NumericsError
from engine.selftest import ROW_TILES, check_decoder
from engine.weights import tiny_model
from tests.engine.claims import (
    alone,
    assert_same_in_batches,
    assert_same_in_chunks,
    assert_same_resumed_everywhere,
    assert_same_through_pools,
)
from tests.helpers import CPU, DTYPES, needs_compiler, prompt, tiny

PROMPTS = [prompt(n, tokens) for n, tokens in enumerate((9, 30, 80, 5, 61, 17))]
OUTPUT = 30

CLAIMS = {
    "in a batch": lambda model, want, text: assert_same_in_batches(model, PROMPTS, OUTPUT, want, sizes=(3, 32)),
    "in pieces": lambda model, want, text: assert_same_in_chunks(model, PROMPTS[0] + text[:-1], want, sizes=(1, 36)),
    "resumed": lambda model, want, text: assert_same_resumed_everywhere(model, PROMPTS[0], OUTPUT, want),
    "pool at": lambda model, want, text: assert_same_through_pools(model, PROMPTS, OUTPUT),
}


def broken_claims(model):
    """The claims that `model` does not keep."""
    want, text = alone(model, PROMPTS[0], OUTPUT)
    broken = set()
    for name, claim in CLAIMS.items():
        try:
            claim(model, want, text)
        except AssertionError as error:
            if name not in str(error):
                raise  # not about bits
            broken.add(name)
    return broken


def bits_survive_a_sweep(dtype, kernels):
    """Whether a pool that evicts leaves each token's lead over the second best at the same bits."""
    scenario = load_scenario("scenarios/day34.toml")
    settings = {"kernels": kernels, "dtype": str(dtype).removeprefix("torch."), "device": "cpu"}
    with mock.patch("engine.decoders.check_decoder"):  # it would have refused to start
        factory = engine_factory("own", scenario.engine.model_copy(update=settings))
    try:
        timings = sweep_pool_sizes(build_requests(scenario.workload), (48, 12), factory)
    except TextsDiffer:
        return False
    roomy, tight = ([text.logit_gaps for text in timing.texts.values()] for timing in timings)
    return roomy == tight


# ---- torch -----------------------------------------------------------------------------------


@pytest.fixture
def fickle_library(monkeypatch):
    """A library that sums in two halves below 32 rows, on every processor.

    Real libraries change kernels with the row count too, at counts that differ between processors (docs/log.md).
    """

    def by_rows(x, weight):
        if len(x) >= ROW_TILES[0]:
            return F.linear(x, weight)
        half = weight.shape[1] // 2
        return F.linear(x[:, :half], weight[:, :half]) + F.linear(x[:, half:], weight[:, half:])

    monkeypatch.setattr(engine.numerics, "F", SimpleNamespace(linear=by_rows))


def tile_by_row_count(monkeypatch):
    """Tiles of 16 rows where one of the usual would do."""
    honest = engine.model.linear

    def by_rows(x, weight, tile):
        return honest(x, weight, 16 if len(x) == tile else tile)

    monkeypatch.setattr(engine.model, "linear", by_rows)


def unpadded_single_row(monkeypatch):
    honest = engine.model.padded_rows
    monkeypatch.setattr(engine.model, "padded_rows", lambda rows, tile: 1 if rows == 1 else honest(rows, tile))


def split_by_longest_context(monkeypatch):
    """Keys in chunks of 16 while every context of the batch is short, of 32 otherwise."""
    honest = engine.model.plan_walk

    def by_longest(tables, starts, stops, *rest):
        monkeypatch.setattr(engine.attention, "KEY_CHUNK", 32 if stops.max() > 26 else 16)
        return honest(tables, starts, stops, *rest)

    monkeypatch.setattr(engine.model, "plan_walk", by_longest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_keeps_every_claim_on_such_a_library(fickle_library, dtype):
    assert broken_claims(tiny(dtype, "torch")) == set()
    check_decoder(tiny(dtype, "torch"))
    assert bits_survive_a_sweep(dtype, "torch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plant", [tile_by_row_count, unpadded_single_row])
def test_a_product_that_follows_the_row_count(fickle_library, monkeypatch, plant, dtype):
    model = tiny(dtype, "torch")
    plant(monkeypatch)
    assert broken_claims(model) == set(CLAIMS)
    with pytest.raises(NumericsError, match="one prefill gives other bits than decoding alone"):
        check_decoder(model)
    assert not bits_survive_a_sweep(dtype, "torch")


def test_a_split_that_follows_the_longest_context(monkeypatch):
    """float32 alone: rounding to bfloat16 hides a difference of 1e-7 in all but one of tens of thousands of values."""
    model = tiny(kernels="torch")
    split_by_longest_context(monkeypatch)
    assert broken_claims(model) >= {"in a batch", "in pieces", "resumed"}
    with pytest.raises(NumericsError, match="gives other bits than decoding alone"):
        check_decoder(model)
    assert not bits_survive_a_sweep(torch.float32, "torch")


# ---- native ----------------------------------------------------------------------------------

# (file, what is there, what is planted): each changes one line, where `bb_planted` says so.
SWITCH = ("lanes.h", "#pragma once\n", '#pragma once\nextern "C" { inline int bb_planted = 0, bb_longest = 0; }\n')
LONGEST = ("decoder.cpp", "b_ = &batch;", "b_ = &batch, bb_longest = int(batch.table_width * batch.block_size);")
CHUNK_BY_ROWS = (  # as a library that blocks k by the height of its tiles
    "matmul.h",
    "for (int from = 0; from < k; from += K_CHUNK) {",
    "const int K_CHUNK = bb_planted == 1 && rows > 8 ? 32 : bb::K_CHUNK;\n"
    "    for (int from = 0; from < k; from += K_CHUNK) {",
)
SINGLE_ROW = (  # a path of its own for one row, which goes through k from its end
    "matmul.h",
    "for (int i = 0; i < k; ++i) {",
    "for (int n = 0; n < k; ++n) {\n        const int i = bb_planted == 2 && M == 1 ? k - 1 - n : n;",
)
WALK_BY_LONGEST = (  # chunks of keys from the last to the first once the batch holds a long context
    "attention.h",
    "for (int from = lowest / CHUNK * CHUNK; from <= last; from += CHUNK) {",
    "for (int n = lowest / CHUNK; n <= last / CHUNK; ++n) {\n        const int from = CHUNK * "
    "(bb_planted == 3 && bb_longest > 48 ? lowest / CHUNK + last / CHUNK - n : n);",
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The library built from a copy of its sources with all bugs in it, and its switch, which is off."""
    folder = tmp_path_factory.mktemp("kernels") / "cpu"
    shutil.copytree(Path(cpu_kernels.__file__).parent / "cpu", folder)
    for name, there, planted in (SWITCH, LONGEST, CHUNK_BY_ROWS, SINGLE_ROW, WALK_BY_LONGEST):
        text = (folder / name).read_text()
        assert text.count(there) == 1, f"{name} has no longer one {there!r}: plant the bug where its code is now"
        (folder / name).write_text(text.replace(there, planted))
    library = ctypes.CDLL(str(cpu_kernels.build(folder=folder)))
    return cpu_kernels.declare(library), ctypes.c_int.in_dll(library, "bb_planted")


@pytest.fixture
def native(kernels, monkeypatch):
    """`tiny` in float32 on that library."""
    library, switch = kernels
    switch.value = 0
    monkeypatch.setattr(engine.cpu_model, "load_kernels", lambda: library)
    return choose_decoder(tiny_model(0, torch.float32, CPU), kernels="native")


@needs_compiler
def test_native_keeps_every_claim_with_all_bugs_off(native):
    assert broken_claims(native) == set()


@needs_compiler
@pytest.mark.parametrize(
    ("bug", "broken", "way"),
    [
        pytest.param(1, set(CLAIMS), "one prefill", id="chunks of k by the row count"),
        pytest.param(2, set(CLAIMS), "one prefill", id="a single row on a path of its own"),
        pytest.param(3, {"in a batch", "pool at"}, "among 4 others", id="walk over keys by the longest context"),
    ],
)
def test_a_bug_in_the_native_kernels(native, kernels, bug, broken, way):
    kernels[1].value = bug
    assert broken_claims(native) == broken
    with pytest.raises(NumericsError, match=f"{way} gives other bits than decoding alone"):
        check_decoder(native)
