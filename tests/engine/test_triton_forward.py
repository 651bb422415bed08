"""The whole forward in Triton kernels against that of torch, and its independence of company. Or interpreted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.checkpoint import assemble, tensor_shapes
from engine.config import SchedulerConfig
from engine.model import Model
from engine.plan import Plan, TableUpdate
from engine.runner import TorchRunner
from engine.weights import TINY, tiny_model
from tests.helpers import DTYPES, prompt
from tests.triton_interpreter import DEVICE, MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from engine.kv_store import KVStore
from engine.triton_forward import captured, device_batch, forward, upload
from engine.triton_linear import SHAPES

BLOCK_SIZE, SLOTS = 4, 3
TEXTS = [prompt(n, 14) for n in range(SLOTS)]
EVERY_OPTION = dataclasses.replace(
    TINY, layers=2, heads=3, kv_heads=1, head_dim=24, sliding_window=5, qkv_bias=True, qk_norm=True
)


def models():
    for dtype in DTYPES:
        tiny = tiny_model(0, dtype, DEVICE)
        config, weights = (
            dataclasses.replace(TINY, layers=2),
            dataclasses.replace(tiny.weights, layers=tiny.weights.layers[:2]),
        )
        yield pytest.param(Model(config, weights), id=f"tiny-{dtype}")
    draw = np.random.default_rng(0)
    found = tensor_shapes(EVERY_OPTION)
    tensors = {name: torch.from_numpy(draw.standard_normal(shape, np.float32)) for name, shape in found.items()}
    tensors |= {name: 0.2 * tensor for name, tensor in tensors.items() if tensor.ndim == 2}
    yield pytest.param(assemble(EVERY_OPTION, found, tensors.__getitem__, torch.float32, DEVICE), id="every option")


MODELS = list(models())


class Company:
    """Rows of TEXTS in slots, forwarded by the kernels over one pool."""

    def __init__(self, model, layout=0):
        self.model = model
        blocks = np.random.default_rng(layout).permutation(SLOTS * 4).astype(np.int32)
        self.tables = blocks.reshape(SLOTS, 4)
        self.store = KVStore(model.config, SLOTS * 4, BLOCK_SIZE, model.dtype, DEVICE)

    def logits(self, rows, padded=0):
        """rows: (slot, text, start, stop). Returns each row's logits."""
        slots, starts, stops = (np.array([row[i] for row in rows]) for i in (0, 2, 3))
        tokens = np.concatenate([TEXTS[text][start:stop] for _, text, start, stop in rows]).astype(np.int32)
        batch = device_batch(self.model, tokens, slots, starts, stops, self.tables, BLOCK_SIZE, padded)
        return forward(self.model, batch, self.store, SHAPES[self.model.dtype])[: len(rows)].cpu()


@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_those_of_the_torch_forward(model):
    config = SchedulerConfig(SLOTS, SLOTS * 4, BLOCK_SIZE)
    runner, company = TorchRunner(model, config), Company(model)
    updates = [TableUpdate(slot, 0, table.tolist()) for slot, table in enumerate(company.tables)]
    for rows in ([(0, 0, 0, 11), (2, 1, 0, 3)], [(0, 0, 11, 12), (1, 2, 0, 5), (2, 1, 3, 4)]):
        slots, _, starts, stops = zip(*rows, strict=True)
        tokens = [token for _, text, start, stop in rows for token in TEXTS[text][start:stop]]
        plan = Plan(["r"] * len(rows), slots, starts, stops, tokens, updates, (), ())
        want, got = runner.logits(plan).cpu(), company.logits(rows)
        # float32: other orders of its sums. bfloat16: roundings in other places, a few 2^-8 of logits of a few units.
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 if model.dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("model", MODELS[1:])
def test_logits_are_the_same_bits_in_every_company(model):
    alone = Company(model)
    alone.logits([(0, 0, 0, 10)])
    want = alone.logits([(0, 0, 10, 11)])[0]

    crowd = Company(model, layout=1)
    crowd.logits([(2, 1, 0, 6), (1, 0, 0, 4)])
    crowd.logits([(1, 0, 4, 10), (2, 1, 6, 7)])
    assert torch.equal(crowd.logits([(0, 2, 0, 1), (2, 1, 7, 8), (1, 0, 10, 11)])[2], want), "decoded in company"
    resumed = Company(model, layout=2).logits([(1, 2, 0, 9), (2, 0, 0, 11)])[1]
    assert torch.equal(resumed, want), "resumed by one prefill"
    assert torch.equal(alone.logits([(0, 0, 10, 11)], padded=5)[0], want), "padded"


def test_uploaded_arrays_are_aligned_views_of_one_tensor():
    arrays = [np.arange(n, dtype=np.int32).reshape(shape) for n, shape in ((3, (3,)), (8, (2, 4)), (1, (1,)))]
    views = upload(arrays, DEVICE)
    for array, view in zip(arrays, views, strict=True):
        assert torch.equal(view.cpu(), torch.from_numpy(array))
        assert view.data_ptr() % 16 == 0
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1


def test_a_captured_step_reads_its_inputs_anew():
    x = torch.ones(4, device=DEVICE)
    step = captured(lambda: x + 1, DEVICE)
    assert step().tolist() == [2.0] * 4
    x.fill_(5)
    assert step().tolist() == [6.0] * 4
