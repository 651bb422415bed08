"""Products in Triton: right, each row's bits its own, and the start-up trial; on a GPU, or interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import NumericsError
from tests.helpers import DTYPES
from tests.triton_interpreter import DEVICE, MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from engine import triton_linear, triton_selftest
from engine.triton_linear import BASE, SHAPES, SLICE, linear
from engine.triton_selftest import choose_shapes


def draw(dtype, *shape):
    values = np.random.default_rng(shape).standard_normal(shape, np.float32)
    return torch.from_numpy(values).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(1, SLICE + 52), (17, 64), (17, 100), (130, 100)])
def test_product_bias_and_residual_are_those_of_float64(rows, inner, dtype):
    x, weight = draw(dtype, rows, inner), draw(dtype, 70, inner)
    bias, residual = draw(dtype, 70), draw(dtype, rows, 70)
    got = linear(x, weight, SHAPES[dtype], bias=bias, residual=residual)
    want = x.double() @ weight.double().T + bias.double() + residual.double()
    # float32 sums of `inner` products of unit normals, then one rounding to the type
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=2e-7 * inner)
    plain = linear(x, weight, SHAPES[dtype])
    torch.testing.assert_close(
        plain.double(), x.double() @ weight.double().T, rtol=torch.finfo(dtype).eps, atol=2e-7 * inner
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_as_programs_give_the_bits_of_slices_in_turn(dtype, monkeypatch):
    monkeypatch.setattr(triton_linear, "SLICE", 128)
    x, weight, bias, residual = draw(dtype, 5, 300), draw(dtype, 33, 300), draw(dtype, 33), draw(dtype, 5, 33)
    for ends in ({}, {"bias": bias}, {"bias": bias, "residual": residual}):
        monkeypatch.setattr(triton_linear, "BUSY", 10**9)
        apart = linear(x, weight, SHAPES[dtype], **ends)
        monkeypatch.setattr(triton_linear, "BUSY", 0)
        assert torch.equal(linear(x, weight, SHAPES[dtype], **ends), apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_keeps_its_bits_at_every_place_and_row_count(dtype):
    base = (SHAPES[dtype][BASE],)
    x, weight = draw(dtype, 70, 100), draw(dtype, 40, 100)
    whole = linear(x, weight, base)
    for row in (0, 1, 15, 63, 64, 69):
        assert torch.equal(linear(x[row : row + 1], weight, base)[0], whole[row])
    assert torch.equal(linear(x.flip(0).contiguous(), weight, base), whole.flip(0))


def test_rows_that_hold_nan_disturb_nobody():
    x, weight = draw(torch.float32, 3, 64), draw(torch.float32, 40, 64)
    want = linear(x, weight, SHAPES[torch.float32])
    x[1] = torch.nan
    got = linear(x, weight, SHAPES[torch.float32])
    assert torch.equal(got[[0, 2]], want[[0, 2]])
    assert got[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_trial_keeps_shapes_in_order_of_rows(dtype):
    shapes = choose_shapes([("a", draw(dtype, 24, 40)), ("again", draw(dtype, 24, 40)), ("b", draw(dtype, 8, 64))])
    assert SHAPES[dtype][BASE] in shapes
    assert [shape.rows for shape in shapes] == sorted(shape.rows for shape in shapes)
    if DEVICE.type == "cpu":
        assert shapes == SHAPES[dtype]  # in the interpreter every product is one chain along `in`


def test_slices_chosen_by_the_number_of_rows_are_refused(monkeypatch):
    def planted(x, *args, **ends):
        monkeypatch.setattr(triton_linear, "SLICE", 32 if x.shape[0] == 1 else 64)
        return linear(x, *args, **ends)

    monkeypatch.setattr(triton_selftest, "linear", planted)
    with pytest.raises(NumericsError, match=r"linear a \(24, 80\), rows 0 to 0 of .*, gives a row other bits"):
        choose_shapes([("a", draw(torch.float32, 24, 80))])


def test_the_trial_compares_slices_apart_with_slices_in_turn(monkeypatch):
    counts = []

    def noted(x, *args, **ends):
        counts.append(x.shape[0])
        return linear(x, *args, **ends)

    monkeypatch.setattr(triton_selftest, "linear", noted)
    monkeypatch.setattr(triton_linear, "SLICE", 32)
    monkeypatch.setattr(triton_linear, "BUSY", 3)
    assert len(choose_shapes([("a", draw(torch.float32, 24, 80))])) > 1
    assert {3 * shape.rows for shape in SHAPES[torch.float32]} <= set(counts)


interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="plants its bug in the interpreter: run where no GPU is")


def plant(monkeypatch, spoil):
    """Products in the interpreter pass through `spoil`, which sees them as [columns of w, rows of x]."""
    from triton.runtime.interpreter import InterpreterBuilder

    whole = InterpreterBuilder.create_dot

    def dot(builder, a, b, start, *how):
        out = whole(builder, a, b, start, *how)
        spoil(out.data)
        return out

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@interpreted
def test_a_shape_that_sums_in_another_order_is_left_out(monkeypatch):
    def spoil(product):
        if product.shape[1] == SHAPES[torch.float32][0].rows:
            product *= np.float32(1 + 2**-23)

    plant(monkeypatch, spoil)
    assert choose_shapes([("a", draw(torch.float32, 24, 40))]) == SHAPES[torch.float32][1:]


@interpreted
def test_a_shape_that_fails_for_one_matrix_alone_is_left_out(monkeypatch):
    last = SHAPES[torch.float32][-1]
    seen = []

    def spoil(product):
        seen.append(product.shape)
        if product.shape[1] == last.rows and abs(product).max() > 100:
            product *= np.float32(1 + 2**-23)

    plant(monkeypatch, spoil)
    large = draw(torch.float32, 20, 40) * 100
    assert choose_shapes([("a", draw(torch.float32, 24, 40)), ("b", large)]) == SHAPES[torch.float32][:-1]


@interpreted
def test_a_tile_whose_rows_differ_is_refused_by_name(monkeypatch):
    def spoil(product):
        product[:, 3] *= np.float32(1 + 2**-23)

    plant(monkeypatch, spoil)
    with pytest.raises(NumericsError, match=r"linear layers.0.qkv \(24, 40\), .* gives a row other bits than alone"):
        choose_shapes([("layers.0.qkv", draw(torch.float32, 24, 40))])
