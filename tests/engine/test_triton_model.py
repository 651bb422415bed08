"""The Triton kernels as a decoder: every claim, its graph of padded slots, its tokens. On a GPU, or interpreted."""

from __future__ import annotations

import gc
import sys
from weakref import ref

import numpy as np
import pytest
import torch

import engine.decoders
from engine.config import SchedulerConfig
from engine.core import Engine
from engine.decoders import choose_decoder
from engine.errors import ConfigError, KernelsUnavailable, NumericsError
from engine.kv_store import KVStore
from engine.model import Model
from engine.numerics import Tiles
from engine.runner import ModelRunner
from engine.weights import tiny_model
from tests.engine import claims
from tests.helpers import CPU, DTYPES, drain, random_model
from tests.triton_interpreter import DEVICE, MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

import triton

from engine import triton_model
from engine.triton_attention import SPLIT
from engine.triton_forward import device_batch, forward
from engine.triton_model import TritonModel
from tests.engine.test_triton_forward import EVERY_OPTION, PLAIN, TEXTS, batch_of

TABLES = np.arange(12, dtype=np.int32).reshape(3, 4)[::-1].copy()


@pytest.fixture(scope="module")
def decoder():
    return TritonModel(random_model(PLAIN, torch.float32, DEVICE))


@pytest.fixture
def captures(monkeypatch):
    """Grows with every graph that is captured."""
    noted, real = [], triton_model.captured

    def noting(step, device):
        noted.append(step)
        return real(step, device)

    monkeypatch.setattr(triton_model, "captured", noting)
    return noted


def store_of(decoder, pool_blocks=12, block_size=4):
    return KVStore(decoder.config, pool_blocks, block_size, decoder.dtype, decoder.device)


def test_every_claim():
    decoder = TritonModel(random_model(EVERY_OPTION, torch.bfloat16, DEVICE))
    prompts = [TEXTS[n][:length] for n, length in enumerate((6, 5, 7))]
    want, text = claims.alone(decoder, prompts[0], 4)
    claims.assert_same_in_batches(decoder, prompts, 4, want, sizes=(3,))
    claims.assert_same_in_every_slot(decoder, prompts, 2, want, slots=2)
    claims.assert_same_in_chunks(decoder, prompts[0] + text[:-1], want, sizes=(5,))
    claims.assert_same_through_pools(decoder, prompts, 4, shares=(0.5,))
    claims.assert_same_resumed_everywhere(decoder, prompts[0], 3, want)


def test_claims_in_float32(decoder):
    claims.assert_same_through_pools(decoder, [TEXTS[0][:6], TEXTS[1][:7]], 4, shares=(0.5,))


def test_replays_of_different_batches_do_not_mix(decoder, captures):
    """One, three and two of three slots decode in turn; each row as alone, without a graph."""
    store, alone = store_of(decoder), store_of(decoder)
    rows = [(0, 0, 0, 6), (1, 1, 0, 3), (2, 2, 0, 9)]
    for at in (store, alone):
        decoder.forward(batch_of(rows, TABLES), at)
    for running in ([(1, 1, 3, 4)], [(0, 0, 6, 7), (1, 1, 4, 5), (2, 2, 9, 10)], [(2, 2, 10, 11), (0, 0, 7, 8)]):
        got = decoder.forward(batch_of(running, TABLES), store).clone()
        assert got.shape == (len(running), decoder.config.vocab_size)
        for row, logits in zip(running, got, strict=True):
            there = device_batch(batch_of([row], TABLES), 5, DEVICE)
            assert torch.equal(forward(decoder._model, there, alone, decoder.shapes)[0], logits), row
    assert torch.equal(store.keys, alone.keys) and torch.equal(store.values, alone.values)  # padding writes nowhere
    assert len(captures) == 1
    assert decoder.padded_rows(1, 1, 3) == 3
    assert decoder.padded_rows(18, 3, 3) == 18


def test_every_store_has_a_graph_of_its_own_and_the_longer_text_a_wider_one(decoder, captures):
    first, second = store_of(decoder), store_of(decoder)
    step = batch_of([(0, 0, 0, 1)], TABLES)
    want = decoder.forward(step, first).clone()
    assert torch.equal(decoder.forward(step, second), want) and torch.equal(second.keys, first.keys)
    assert len(captures) == 2
    assert torch.equal(decoder.forward(step, first), want)
    assert len(captures) == 2
    wide = np.tile(TABLES, SPLIT // 16 + 1)  # more than one split of attention
    assert torch.equal(decoder.forward(batch_of([(0, 0, 0, 1)], wide), first), want)
    assert len(captures) == 3
    assert torch.equal(decoder.forward(step, first), want)
    assert len(captures) == 3


def test_a_graph_goes_with_its_engine(decoder):
    gc.collect()
    gc.disable()  # a graph in a reference cycle would hold the pool for longer than the engine
    try:
        before = len(decoder._graphs)
        config = SchedulerConfig(2, 12, 4)
        runner = ModelRunner(decoder, config)
        one = Engine(config, runner)
        one.submit("it", TEXTS[0][:5], 3)
        steps = drain(one)
        assert [step.padded_tokens for step in steps] == [0, 1, 1]
        store, graph = ref(runner.store), ref(decoder._graphs[runner.store])
        del runner, one
        assert store() is None and graph() is None
        assert len(decoder._graphs) == before
    finally:
        gc.enable()


def test_prepared_is_captured_and_writes_nothing(decoder, captures):
    store = store_of(decoder)
    decoder.prepare(store, 3, 4)
    assert not store.keys.any() and not store.values.any()
    decoder.forward(batch_of([(1, 1, 0, 1)], TABLES), store)
    assert len(captures) == 1


def test_a_block_size_is_tried_before_it_is_used(decoder, monkeypatch):
    def fails(config, block_size, dtype, device):
        raise NumericsError(f"attention in blocks of {block_size}")

    monkeypatch.setattr(triton_model, "_check_attention_once", fails)
    with pytest.raises(NumericsError, match="attention in blocks of 4"):
        decoder.forward(batch_of([(0, 0, 0, 1)], TABLES), store_of(decoder))


def test_greedy_takes_the_lowest_id_among_equals_and_refuses_what_is_not_finite(decoder):
    logits = torch.zeros(3, 60, device=DEVICE)
    logits[0, [7, 50]], logits[1, [59, 3]] = 2.5, torch.tensor([4.0, 1.5], device=DEVICE)
    assert decoder.greedy(logits) == ([7, 59, 0], [0.0, 2.5, 0.0])
    for bad in (torch.nan, torch.inf):
        logits[1, 20] = bad
        with pytest.raises(NumericsError, match="logits are not finite"):
            decoder.greedy(logits)


def test_it_says_what_it_is(decoder):
    model = random_model(PLAIN, torch.float32, DEVICE)
    assert (decoder.weight_bytes, decoder.matrix_bytes) == (model.weight_bytes, model.matrix_bytes)
    assert decoder.numerics == f"exact (triton, {len(decoder.shapes)} shapes)"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_processor_without_the_interpreter_is_refused(dtype, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(KernelsUnavailable, match="^the Triton kernels run on a CUDA device, not on cpu$"):
        choose_decoder(tiny_model(0, dtype, CPU), kernels="triton")


def test_fast_triton_is_refused():
    with pytest.raises(ConfigError, match="numerics fast leaves the shapes to torch; kernels 'triton'"):
        choose_decoder(random_model(PLAIN, torch.float32, DEVICE), kernels="triton", numerics="fast")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A model that says it is on one, which is all that the choice goes by; its start-up checks are left out."""
    model = tiny_model(0, torch.float32, CPU)
    model.device = torch.device("cuda")
    monkeypatch.setattr(engine.decoders, "choose_tiles", lambda model: Tiles())
    monkeypatch.setattr(engine.decoders, "check_decoder", lambda decoder: None)
    return model


def test_a_gpu_gets_the_triton_kernels(on_a_gpu, monkeypatch):
    monkeypatch.setattr(triton_model, "TritonModel", lambda model: ("triton", model))
    assert choose_decoder(on_a_gpu) == ("triton", on_a_gpu)
    with pytest.raises(KernelsUnavailable, match="the native kernels run on the processor, not on cuda"):
        choose_decoder(on_a_gpu, kernels="native")


def test_without_triton_a_gpu_gets_torch_and_a_warning(on_a_gpu, monkeypatch):
    monkeypatch.delitem(sys.modules, "engine.triton_model")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(
        UserWarning, match=r"triton kernels are not available, .*Triton cannot be imported .*pip install"
    ):
        assert type(choose_decoder(on_a_gpu)) is Model
    with pytest.raises(KernelsUnavailable, match="Triton cannot be imported"):
        choose_decoder(on_a_gpu, kernels="triton")
