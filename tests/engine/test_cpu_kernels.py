"""The native kernels: built once, refused with a reason, right for awkward shapes, and no second copy of weights."""

from __future__ import annotations

import ctypes
import gc
import os
import platform

import pytest
import torch

import engine.cpu_kernels
import engine.cpu_model
from engine.config import ModelConfig
from engine.cpu_kernels import build, declare
from engine.decoders import choose_decoder
from engine.errors import ConfigError, KernelsUnavailable
from engine.weights import tiny_model
from tests.engine.claims import alone, assert_same_bits, assert_same_in_batches
from tests.helpers import CPU, DTYPES, needs_compiler, prompt, random_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine.cpu_kernels.load_kernels.cache_clear()
    yield tmp_path / "batchbench"
    engine.cpu_kernels.load_kernels.cache_clear()


def shaped(dtype=torch.float32, **shape):
    sizes = {"vocab_size": 101, "hidden_size": 50, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 22}
    return random_model(ModelConfig(**(sizes | {"intermediate_size": 67, "max_positions": 256} | shape)), dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 6, "kv_heads": 2, "head_dim": 18, "qkv_bias": True},
        {"heads": 4, "kv_heads": 4, "head_dim": 10, "qk_norm": True, "tied_embedding": True},
        {"sliding_window": 5, "hidden_size": 33, "vocab_size": 17},
        {"heads": 48, "kv_heads": 1, "head_dim": 2, "layers": 1},
        {"heads": 2, "kv_heads": 1, "head_dim": 256, "layers": 1, "intermediate_size": 1},
        {"hidden_size": 300, "intermediate_size": 700, "tied_embedding": True},
    ],
    ids=str,
)
def test_awkward_shapes_agree_with_torch(shape, dtype):
    text = [token % 17 for token in prompt(0, 70)]
    want, _ = alone(choose_decoder(shaped(dtype, **shape), kernels="torch"), text, 3)
    got, _ = alone(choose_decoder(shaped(dtype, **shape), kernels="native"), text, 3)
    # float32: two orders of summation. bfloat16: torch rounds the residual stream to 8 bits, native does not
    bound = 2e-5 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(got[len(text)], want[len(text)], rtol=0, atol=bound)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="chooses among instruction sets of x86")
@pytest.mark.parametrize(
    ("flags", "unit"),
    [("-march=x86-64-v3", "avx2"), ("-march=x86-64", "generic"), ("-mno-amx-tile -mno-amx-bf16", "avx512")],
)
def test_other_processors_compute_the_same(monkeypatch, flags, unit):
    """Wide and narrow builds give float32 the same bits; without fused multiply-adds it is the same function."""
    shape, prompts = {"heads": 6, "kv_heads": 2, "head_dim": 72, "hidden_size": 150}, [prompt(n, 70) for n in range(3)]
    here = {dtype: choose_decoder(shaped(dtype, vocab_size=256, **shape)) for dtype in DTYPES}
    if unit == "avx512" and "amx" not in here[torch.bfloat16].numerics:
        pytest.skip("this processor has no AMX to leave out")
    library = declare(ctypes.CDLL(str(build(tuple(flags.split())))))
    monkeypatch.setattr(engine.cpu_model, "load_kernels", lambda: library)
    for dtype in DTYPES:
        model = choose_decoder(shaped(dtype, vocab_size=256, **shape), kernels="native")
        assert model.numerics.startswith(f"exact (native {unit}")
        (got, _), (want, _) = (alone(decoder, prompts[0], 9) for decoder in (model, here[dtype]))
        if dtype == torch.float32 and unit != "generic":
            assert_same_bits(got, want, flags)
        bound = 2e-5 if dtype == torch.float32 else 0.05  # rounding: of float32 sums, of activations to 8 bits
        torch.testing.assert_close(got[70], want[70], rtol=0, atol=bound)
        assert_same_in_batches(model, prompts, 9, got, sizes=(2, 9, 32))


@needs_compiler
@pytest.mark.parametrize("shape", [{"heads": 49}, {"head_dim": 258}])
def test_shapes_beyond_the_kernels_are_refused_and_left_to_torch(shape):
    with pytest.raises(
        KernelsUnavailable, match="query heads per K/V head of .* native kernels take up to 48 of up to 256"
    ):
        choose_decoder(shaped(**shape), kernels="native")
    with pytest.warns(UserWarning, match="torch computes instead: .*query heads"):
        assert "torch" in choose_decoder(shaped(**shape)).numerics


@needs_compiler
def test_weights_are_packed_once_and_the_originals_dropped():
    model = shaped(layers=3)
    sizes = model.weights.nbytes
    native = choose_decoder(model, kernels="native")
    assert model.weights.layers == []
    assert native.matrix_bytes <= native.weight_bytes < 1.6 * sizes  # panels of 16 outputs, 50 and 67 are padded
    model = shaped(hidden_size=64, intermediate_size=128, vocab_size=128, heads=4, head_dim=16, tied_embedding=True)
    sizes = model.weights.nbytes
    assert choose_decoder(model, kernels="native").weight_bytes == sizes  # nothing to pad, the embedding once


@needs_compiler
def test_a_library_is_built_once(cache):
    first = build()
    assert first.parent == cache and list(cache.iterdir()) == [first]
    before = first.stat().st_mtime_ns
    assert build() == first and first.stat().st_mtime_ns == before
    assert build(("-DOTHER",)) != first


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler", "no C.. compiler: no-such-compiler not found; install g.. or set CXX"),
        ("false", "false failed"),
    ],
)
def test_without_a_compiler_torch_takes_over_and_says_so(cache, monkeypatch, compiler, message):
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=message):
        assert choose_decoder(tiny_model(0, torch.float32, CPU)).numerics.startswith("exact (torch")
    with pytest.raises(KernelsUnavailable, match=message):
        choose_decoder(tiny_model(0, torch.float32, CPU), kernels="native")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions as POSIX has them")
def test_a_cache_that_others_can_write_is_not_executed(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="not this user's alone; chmod go-w it, or set XDG_CACHE_HOME"):
        build()


def test_contradictory_choices_are_refused():
    with pytest.raises(ConfigError, match="kernels 'gpu'"):
        choose_decoder(tiny_model(0, torch.float32, CPU), kernels="gpu")
    with pytest.raises(ConfigError, match="numerics fast leaves the shapes to torch"):
        choose_decoder(tiny_model(0, torch.float32, CPU), kernels="native", numerics="fast")


def test_fast_is_torch_without_padding():
    fast = choose_decoder(tiny_model(0, torch.float32, CPU), numerics="fast")
    assert fast.numerics == "fast (torch, no promise)"
    assert [fast.padded_rows(rows, rows, 33) for rows in (1, 5, 33)] == [1, 5, 33]
    _, text = alone(fast, prompt(0, 9), 8)
    assert len(text) == 8


@needs_compiler
def test_threads_end_with_their_model():
    before = (
        len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else pytest.skip("counts Linux threads")
    )
    models = [choose_decoder(tiny_model(0, torch.float32, CPU), kernels="native", threads=3) for _ in range(3)]
    assert len(os.listdir("/proc/self/task")) == before + 6
    del models
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == before
