"""Matrix products in Triton whose rows keep their bits whatever rows stand beside them.

`x @ w.T` is summed over `in` in one order, whatever the number of rows: slices of SLICE columns, each
accumulated in float32 from zero by a chain of dots, then added in order. Where the tiles of a product
would leave the device idle, its slices run as programs of their own and a second kernel adds their sums:
the same additions in the same order.

`linear` takes one tile shape, or several that a trial on this device has found to agree
(`triton_selftest.choose_shapes`). What several rely on: the weights stand on the left, so for bfloat16
on Hopper every shape is a chain of wgmma.m64nNk16 that differs in N alone, and the sum of 16 products
within an instruction is taken not to depend on N; for float32 every shape is one chain of fused
multiply-adds along `in`. The vendor promises neither, hence the trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SLICE = 2048
BUSY = 132  # programs that keep a device busy: the multiprocessors of an H100 or H200
_WIDTH = 256  # columns per program of `_add_slices`


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile: rows of x, rows of w (`out`), columns of both per step (`inner`); warps and stages of its kernel."""

    rows: int
    out: int
    inner: int
    warps: int
    stages: int


# By rows; the more rows, the less a product is bound by reading weights. BASE alone serves every row
# count where the trial finds that they differ.
SHAPES = {
    torch.bfloat16: (
        Shape(16, 64, 128, 4, 4),
        Shape(64, 64, 128, 4, 3),
        Shape(128, 64, 64, 4, 4),
        Shape(128, 128, 64, 8, 4),
    ),
    torch.float32: (Shape(16, 32, 32, 4, 3), Shape(32, 64, 32, 4, 3), Shape(64, 128, 16, 8, 3)),
}
BASE = 1


def linear(
    x: Tensor, weight: Tensor, shapes: Sequence[Shape], *, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias + residual, summed in float32 and rounded once. Returns [rows, out] of x's type.

    x: [rows, in]; weight: [out, in]; bias: [out]; residual: [rows, out].
    shapes: the first that holds all rows is used, else the last.
    """
    (rows, inner), out = x.shape, weight.shape[0]
    assert all(tensor.is_contiguous() for tensor in (x, weight, bias, residual) if tensor is not None)
    shape = next((shape for shape in shapes if shape.rows >= rows), shapes[-1])
    tiles = -(-rows // shape.rows), -(-out // shape.out)
    slices = -(-inner // SLICE) if tiles[0] * tiles[1] < BUSY else 1
    y = x.new_empty(rows, out)
    sums = x.new_empty((slices, rows, out) if slices > 1 else 1, dtype=torch.float32)
    ends = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
    bias, residual = weight if bias is None else bias, weight if residual is None else residual  # not read
    _linear[(*tiles, slices)](
        x,
        weight,
        bias,
        residual,
        y,
        sums,
        rows,
        out,
        inner,
        ROWS=shape.rows,
        OUT=shape.out,
        INNER=shape.inner,
        SLICE=SLICE,
        WHOLE=inner % shape.inner == 0,
        SPLIT=slices > 1,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **ends,
    )
    if slices > 1:
        _add_slices[(rows, -(-out // _WIDTH))](sums, bias, residual, y, rows, out, slices, WIDTH=_WIDTH, **ends)
    return y


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    residual,
    y,
    sums,
    rows,
    out,
    inner,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    INNER: tl.constexpr,
    SLICE: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUT + tl.arange(0, OUT)
    step = tl.arange(0, INNER)
    # Rows and columns past the end read the last one again; nothing of them is written.
    w_at = tl.minimum(column, out - 1).to(tl.int64)[:, None] * inner + step[None, :]
    x_at = tl.minimum(row, rows - 1).to(tl.int64)[None, :] * inner + step[:, None]
    first, last = 0, inner
    if SPLIT:
        first = tl.program_id(2) * SLICE
        last = tl.minimum(first + SLICE, inner)
    total = tl.full((OUT, ROWS), 0.0, tl.float32)
    for begin in range(first, last, SLICE):
        acc = tl.full((OUT, ROWS), 0.0, tl.float32)
        for k in range(begin, tl.minimum(begin + SLICE, inner), INNER):
            if WHOLE:
                a = tl.load(weight + w_at + k)
                b = tl.load(x + x_at + k)
            else:
                a = tl.load(weight + w_at + k, mask=(step < inner - k)[None, :], other=0.0)
                b = tl.load(x + x_at + k, mask=(step < inner - k)[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        total += acc

    there = (column < out)[:, None] & (row < rows)[None, :]
    y_at = row.to(tl.int64)[None, :] * out + column[:, None]
    if SPLIT:
        tl.store(sums + tl.program_id(2).to(tl.int64) * rows * out + y_at, total, mask=there)
    else:
        if HAS_BIAS:
            total += tl.load(bias + column, mask=column < out, other=0.0).to(tl.float32)[:, None]
        if HAS_RESIDUAL:
            total += tl.load(residual + y_at, mask=there, other=0.0).to(tl.float32)
        tl.store(y + y_at, total.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _add_slices(
    sums,
    bias,
    residual,
    y,
    rows,
    out,
    slices,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """What `_linear` does after a slice and at the end, for sums that lie in memory."""
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = column < out
    at = tl.program_id(0).to(tl.int64) * out + column
    total = tl.full((WIDTH,), 0.0, tl.float32)
    for index in range(slices):
        total += tl.load(sums + tl.cast(index, tl.int64) * rows * out + at, mask=there, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there)
