"""Norm, rotation with the K/V write, and gate in Triton against the same steps in torch. On a GPU or interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import NumericsError
from engine.numerics import rms_norm as torch_rms_norm
from engine.numerics import silu as torch_silu
from tests.helpers import DTYPES
from tests.triton_interpreter import DEVICE, MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from engine import triton_selftest
from engine.triton_rows import rms_norm, rotate_and_store, silu_gate
from engine.triton_selftest import check_rms_norm

HEADS, KV_HEADS = 3, 2


def draw(dtype, *shape):
    values = np.random.default_rng(shape).standard_normal(shape, np.float32)
    return torch.from_numpy(values).to(DEVICE, dtype)


def assert_rounded_alike(got, want, dtype):
    # Another order of a float32 sum, a fused multiply-add: one last bit of float32, or of bfloat16 after its rounding.
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 100, 576])
def test_rms_norm_equals_that_of_torch(width, dtype):
    x, weight = draw(dtype, 4, width), draw(dtype, width)
    assert_rounded_alike(rms_norm(x, weight, 1e-5), torch_rms_norm(x, weight, 1e-5), dtype)


def test_the_start_up_trial_of_the_norm_passes_here():
    check_rms_norm(draw(torch.bfloat16, 100), 1e-5)


def test_a_norm_that_depends_on_company_is_caught_at_start_up(monkeypatch):
    def planted(x, weight, eps):
        return rms_norm(x, weight, eps) * (1 + 2**-23 * (x.shape[0] > 1))

    monkeypatch.setattr(triton_selftest, "rms_norm", planted)
    with pytest.raises(NumericsError, match=r"rms_norm of width 48 gives a row other bits than alone"):
        check_rms_norm(draw(torch.float32, 48), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_equals_that_of_torch(dtype):
    x = 4 * draw(dtype, 3, 2 * 1100)
    gate, up = x.chunk(2, dim=-1)
    assert_rounded_alike(silu_gate(x), torch_silu(gate) * up, dtype)


def rotated(x, cos, sin):
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 48, 80])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rotation_scale_and_write_equal_those_of_torch(with_norms, head_dim, dtype):
    positions = torch.tensor([5, 0, 90, 7], dtype=torch.int32, device=DEVICE)
    cells = torch.tensor([3, 11, -1, 0], dtype=torch.int32, device=DEVICE)
    qkv = draw(dtype, 4, (HEADS + 2 * KV_HEADS) * head_dim)
    angles = torch.arange(100, device=DEVICE)[:, None] / torch.arange(1, head_dim // 2 + 1, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    keys, values = (torch.full((KV_HEADS, 12, head_dim), 9.0, dtype=dtype, device=DEVICE) for _ in "kv")
    norms = (draw(dtype, head_dim), draw(dtype, head_dim) + 1) if with_norms else None
    got = rotate_and_store(qkv, positions, cells, cos, sin, keys, values, HEADS, norms, 1e-6)

    q, k, v = torch.split(qkv.view(4, -1, head_dim), [HEADS, KV_HEADS, KV_HEADS], dim=1)
    if norms is not None:
        q, k = torch_rms_norm(q, norms[0], 1e-6), torch_rms_norm(k, norms[1], 1e-6)
    c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
    assert_rounded_alike(got, (rotated(q, c, s) * head_dim**-0.5).to(dtype), dtype)
    for row, cell in ((0, 3), (1, 11), (3, 0)):
        assert_rounded_alike(keys[:, cell], rotated(k, c, s).to(dtype)[row], dtype)
        assert torch.equal(values[:, cell], v[row])
    untouched = [cell for cell in range(12) if cell not in (3, 11, 0)]  # a negative cell is nobody's
    assert (keys[:, untouched] == 9).all() and (values[:, untouched] == 9).all()
