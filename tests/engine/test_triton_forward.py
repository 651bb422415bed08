"""The whole forward in Triton kernels against that of torch, and how batches reach the device. Or interpreted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.config import ModelConfig
from engine.kv_store import KVStore
from tests.helpers import prompt, random_model
from tests.triton_interpreter import DEVICE, MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from engine.triton_attention import tile_queries
from engine.triton_forward import captured, device_batch, forward, upload
from engine.triton_linear import SHAPES

BLOCK_SIZE, SLOTS = 4, 3
TEXTS = [[token % 60 for token in prompt(n, 14)] for n in range(SLOTS)]
# Few and equal sizes of matrices: the interpreter takes a millisecond per program.
PLAIN = ModelConfig(60, 32, 1, 3, 1, 12, 30, 512)
EVERY_OPTION = dataclasses.replace(PLAIN, layers=2, sliding_window=5, qkv_bias=True, qk_norm=True)


def batch_of(rows, tables, block_size=BLOCK_SIZE, slots=SLOTS):
    """rows: (slot, text, start, stop). tables: [slots, width]."""
    spots = [(slot, text, at) for slot, text, start, stop in rows for at in range(start, stop)]
    own = np.array([tables[slot] for slot, *_ in rows])
    cells = [tables[slot][at // block_size] * block_size + at % block_size for slot, _, at in spots]
    starts, stops = [row[2] for row in rows], [row[3] for row in rows]
    columns = ([TEXTS[text][at] for _, text, at in spots], [at for *_, at in spots], cells, starts, stops)
    return Batch(*(np.array(column, dtype=np.int32) for column in columns), own, block_size, slots)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(PLAIN, torch.float32), (EVERY_OPTION, torch.float32), (EVERY_OPTION, torch.bfloat16)],
    ids=["plain", "every option", "every option, bfloat16"],
)
def test_logits_equal_those_of_the_torch_forward(config, dtype):
    model = random_model(config, dtype, DEVICE)
    blocks = np.random.default_rng(0).permutation(SLOTS * 4).astype(np.int32)
    tables = blocks.reshape(SLOTS, 4)
    stores = [KVStore(model.config, SLOTS * 4, BLOCK_SIZE, model.dtype, DEVICE) for _ in range(2)]
    queries = tile_queries(model.config.heads // model.config.kv_heads, model.dtype)
    for rows in ([(0, 0, 0, 11), (2, 1, 0, 3)], [(0, 0, 11, 12), (1, 2, 0, 5), (2, 1, 3, 4)]):
        batch = batch_of(rows, tables)
        want = model.forward(batch, stores[0])
        there = device_batch(batch, queries, DEVICE, padded=9)
        got = forward(model, there, stores[1], SHAPES[model.dtype])[: len(rows)]
        # float32: other orders of its sums. bfloat16: roundings in other places, a few 2^-8 of logits of a few units.
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 if model.dtype == torch.float32 else 0.2)


def test_uploaded_arrays_are_aligned_views_of_one_tensor_that_the_next_upload_overwrites():
    arrays = [np.arange(n, dtype=np.int32).reshape(shape) for n, shape in ((3, (3,)), (8, (2, 4)), (1, (1,)))]
    memory, views = upload(arrays, DEVICE)
    for array, view in zip(arrays, views, strict=True):
        assert torch.equal(view.cpu(), torch.from_numpy(array))
        assert view.data_ptr() % 16 == 0
        assert view.untyped_storage().data_ptr() == memory.data_ptr()
    upload([array + 100 for array in arrays], DEVICE, memory)
    assert [view.flatten().tolist() for view in views] == [[100, 101, 102], list(range(100, 108)), [100]]


def test_a_captured_step_reads_its_inputs_anew():
    x = torch.ones(4, device=DEVICE)
    step = captured(lambda: x + 1, DEVICE)
    assert step().tolist() == [2.0] * 4
    x.fill_(5)
    assert step().tolist() == [6.0] * 4
