"""The row-wise kernels of a decoder in Triton: norm, rotation with the K/V write, gate.

One program computes one row, or a stretch of it, in one fixed reduction, so its bits are its own.
Roundings follow `engine.numerics` and the checkpoints' reference: float32 inside, one rounding per
named step. Counts that change from call to call are not specialised on and tensors are aligned, so
one compiled variant, hence one order of reduction, serves every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATE_WIDTH = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of each row (Zhang and Sennrich, 2019). x: [rows, width]; weight: [width]."""
    rows, width = x.shape
    assert x.is_contiguous() and x.data_ptr() % 16 == 0
    y = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](x, weight, y, EPS=eps, WIDTH=width, BLOCK=block, num_warps=8 if block > 2048 else 4)
    return y


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    cells: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys, write one layer's K/V. Returns scaled queries [rows, heads, head_dim].

    qkv: [rows, (heads + 2 * kv_heads) * head_dim]. positions, cells: [rows] int32; a row whose cell is
    negative writes nothing. cos, sin: [max_positions, head_dim / 2] float32 (Su et al., 2021; halves convention).
    keys, values: [kv_heads, pool cells, head_dim]. norms: weights [head_dim] of the RMSNorm of every head's
    queries and keys, before the rotation (Qwen3). The scale is head_dim**-0.5.
    """
    rows = qkv.shape[0]
    kv_heads, pool_cells, head_dim = keys.shape
    assert all(tensor.is_contiguous() for tensor in (qkv, positions, cells, cos, sin, keys, values))
    queries = qkv.new_empty(rows, heads, head_dim)
    q_norm, k_norm = norms or (qkv, qkv)  # not read
    block_heads, block = triton.next_power_of_2(heads + 2 * kv_heads), triton.next_power_of_2(head_dim // 2)
    _rotate_and_store[(rows,)](
        qkv,
        positions,
        cells,
        cos,
        sin,
        q_norm,
        k_norm,
        queries,
        keys,
        values,
        pool_cells,
        EPS=eps,
        SCALE=head_dim**-0.5,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_HEADS=block_heads,
        BLOCK=block,
        NORM=norms is not None,
        num_warps=8 if block_heads * block > 2048 else 4,
    )
    return queries


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [rows, 2 * width], gates first. Returns [rows, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    y = gate_up.new_empty(rows, width)
    _silu_gate[(rows, -(-width // _GATE_WIDTH))](gate_up, y, width, BLOCK=_GATE_WIDTH)
    return y


@triton.jit
def _rms_norm(x, weight, y, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    wide = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    mean_square = tl.div_rn(tl.sum(wide * wide, 0), WIDTH * 1.0)
    normal = tl.div_rn(wide, tl.sqrt_rn(mean_square + EPS)).to(y.dtype.element_ty)
    w = tl.load(weight + column, mask=real, other=0.0)
    tl.store(y + at, (normal.to(tl.float32) * w.to(tl.float32)).to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["pool_cells"])
def _rotate_and_store(
    qkv,
    positions,
    cells,
    cos,
    sin,
    q_norm,
    k_norm,
    queries,
    keys,
    values,
    pool_cells,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside, in_half = head < HEADS + 2 * KV_HEADS, dim < HALF
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + dim
    first = tl.load(source, mask=inside & in_half, other=0.0)
    second = tl.load(source + HALF, mask=inside & in_half, other=0.0)

    cell, position = tl.load(cells + row).to(tl.int64), tl.load(positions + row).to(tl.int64)
    value_at = ((head - HEADS - KV_HEADS) * pool_cells.to(tl.int64) + cell) * (2 * HALF) + dim
    is_value = inside & (head >= HEADS + KV_HEADS) & in_half & (cell >= 0)
    tl.store(values + value_at, first, mask=is_value)
    tl.store(values + value_at + HALF, second, mask=is_value)

    if NORM:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)
        root = tl.sqrt_rn(tl.div_rn(squares, 2.0 * HALF) + EPS)[:, None]
        first = _scaled(
            tl.div_rn(wide_first, root).to(first.dtype), _norm_weight(q_norm, k_norm, head, dim, HEADS, HALF)
        )
        last_half = _norm_weight(q_norm + HALF, k_norm + HALF, head, dim, HEADS, HALF)
        second = _scaled(tl.div_rn(wide_second, root).to(second.dtype), last_half)
    c = tl.load(cos + position * HALF + dim, mask=in_half, other=0.0)
    s = tl.load(sin + position * HALF + dim, mask=in_half, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    x, y = tl.fma(x, c, -(y * s)), tl.fma(y, c, x * s)

    query_at = (row * HEADS + head) * (2 * HALF) + dim
    is_query = (head < HEADS) & in_half
    tl.store(queries + query_at, (x * SCALE).to(queries.dtype.element_ty), mask=is_query)
    tl.store(queries + query_at + HALF, (y * SCALE).to(queries.dtype.element_ty), mask=is_query)
    key_at = ((head - HEADS) * pool_cells.to(tl.int64) + cell) * (2 * HALF) + dim
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS) & in_half & (cell >= 0)
    tl.store(keys + key_at, x.to(keys.dtype.element_ty), mask=is_key)
    tl.store(keys + key_at + HALF, y.to(keys.dtype.element_ty), mask=is_key)


@triton.jit
def _norm_weight(q_norm, k_norm, head, dim, HEADS: tl.constexpr, HALF: tl.constexpr):
    """[heads, half]: of the queries' norm for query heads, of the keys' for all others."""
    of_queries = tl.load(q_norm + dim, mask=dim < HALF, other=0.0)
    of_keys = tl.load(k_norm + dim, mask=dim < HALF, other=0.0)
    return tl.where(head < HEADS, of_queries, of_keys)


@triton.jit
def _scaled(x, weight):
    return (x.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _silu_gate(gate_up, y, width, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    real = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=real, other=0.0)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(y.dtype.element_ty)
    tl.store(y + row * width + column, _scaled(silu, up), mask=real)
