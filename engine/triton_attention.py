"""Causal attention over paged K/V as one Triton kernel: ragged rows of prefill, decode and resume alike.

A query's bits depend on the query and its keys alone, by construction:

* Queries go in tiles of one request and one K/V head. A matrix instruction computes each row of its
  tile in the same way, so a query's place does not matter.
* Keys go in chunks of KEY_CHUNK at multiples of KEY_CHUNK, with a running softmax (Milakov and
  Gimelshein, 2018). A chunk that a query does not see leaves it as it was: its weights are exact
  zeros, its rescaling an exact one.
* Chunks form splits of SPLIT positions at multiples of SPLIT; each split starts afresh and is merged
  in order. Whether one program walks all splits or each has its own (FlashDecoding: Dao et al., 2023)
  is then the same arithmetic from the same compiled code, and the number of splits is nobody's choice.
* Only cells of the request itself are read, so what others left in the pool cannot matter.

Sums that could be contracted in more than one way are written as fused multiply-adds. Nothing here
waits for the device: the grid follows from padded counts, so calls can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import KernelsUnavailable

KEY_CHUNK = 64
SPLIT = 256
# (query, head) pairs per tile: Hopper's matrix instruction has 64 rows; in float32, 32 spill registers.
TILE_ROWS = {torch.bfloat16: 64, torch.float32: 16}
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # finite: inf - inf is not a number

Ints = np.ndarray[tuple[int, ...], np.dtype[Any]]


def tile_queries(group: int, dtype: torch.dtype) -> int:
    """Positions of one request per tile. group: query heads per K/V head. Raises KernelsUnavailable if none fits."""
    if group > TILE_ROWS[dtype]:
        raise KernelsUnavailable(
            f"{group} query heads per K/V head, attention in Triton takes at most {TILE_ROWS[dtype]} in {dtype}; "
            f"kernels = 'torch' runs this model"
        )
    return TILE_ROWS[dtype] // group


def plan_tiles(starts: Ints, stops: Ints, queries: int, padded_tiles: int = 0) -> Ints:
    """Cut rows into tiles of at most `queries` positions. starts, stops: [rows], the positions each row computes.

    Returns [tiles, 4]: row, first query in the batch, queries, position of the first. Filled up to
    `padded_tiles` with tiles of no queries, which the kernel leaves at once.
    """
    lengths = stops - starts
    per_row = -(-lengths // queries)
    row = np.repeat(np.arange(len(starts)), per_row)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * queries
    first = (np.cumsum(lengths) - lengths)[row] + offset
    tiles = np.zeros((max(len(row), padded_tiles), 4), dtype=np.int32)
    tiles[: len(row)] = np.stack((row, first, np.minimum(lengths[row] - offset, queries), starts[row] + offset), axis=1)
    return tiles


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    block_size: int,
    *,
    window: int | None = None,
    split: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attend over one layer's K/V. Returns `out`, [positions, heads, head_dim]; queries of no tile write nothing.

    queries: [positions, heads, head_dim], rotated and scaled. keys, values: [kv_heads, cells, head_dim];
    the cell of a position is `tables[row, position // block_size] * block_size + position % block_size`.
    tables: [rows, width] int32. tiles: [tiles, 4] int32, from `plan_tiles`.
    window: positions that a query sees, itself included; None for all before it.
    split: a program per split of the table's width instead of one for all; every tile then holds one
    query. For decode; the bits are the same.
    out: zeros if left out; may be `queries`, which each program reads before it writes.
    """
    heads, head_dim = queries.shape[1:]
    kv_heads, cells = keys.shape[:2]
    parts = -(-tables.shape[1] * block_size // SPLIT) if split else 1
    partial = (tiles.shape[0], heads, parts) if parts > 1 else (1, 1, 1)
    sums = queries.new_empty(*partial, head_dim, dtype=torch.float32)
    stats = queries.new_empty(*partial, 2, dtype=torch.float32)
    out = torch.zeros_like(queries) if out is None else out
    assert all(tensor.is_contiguous() for tensor in (queries, keys, values, tables, tiles, out))
    dim = max(16, triton.next_power_of_2(head_dim))
    sizes = {"HEADS": heads, "HEAD_DIM": head_dim, "DIM": dim, "WINDOW": window or 0, "SPLIT": SPLIT}
    _attend[(tiles.shape[0], kv_heads, parts)](
        queries,
        keys,
        values,
        tables,
        tiles,
        out,
        sums,
        stats,
        tables.stride(0),
        cells,
        GROUP=heads // kv_heads,
        BLOCK_SIZE=block_size,
        ROWS=TILE_ROWS[queries.dtype],
        CHUNK=KEY_CHUNK,
        num_warps=8 if dim > 64 else 4,  # what fits the registers
        num_stages=2,
        **sizes,
    )
    if parts > 1:
        _merge[(tiles.shape[0], heads)](tiles, out, sums, stats, parts, num_warps=1, **sizes)
    return out


@triton.jit(do_not_specialize=["table_stride", "cells"])
def _attend(
    queries,
    keys,
    values,
    tables,
    tiles,
    out,
    sums,
    stats,
    table_stride,
    cells,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    tile, kv_head, part, parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    row = tl.load(tiles + tile * 4)
    first_query = tl.load(tiles + tile * 4 + 1)
    count = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    if count == 0:
        return
    stop = position + count
    low = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0  # the first position that any query sees
    first_split, last_split = low // SPLIT, (stop - 1) // SPLIT
    if parts > 1:
        first_split, last_split = tl.maximum(first_split, part), tl.minimum(last_split, part)
    if first_split > last_split:  # nobody reads the split of this program
        return

    pair = tl.arange(0, ROWS)
    nth, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    dim = tl.arange(0, DIM)
    at = ((first_query + nth).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    real = (nth < count)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(queries + at, mask=real, other=0.0)
    query_at = position + tl.minimum(nth, count - 1)  # padding sees what the last query sees: never nothing
    pool = kv_head.to(tl.int64) * cells

    top = tl.full((ROWS,), _LOWEST, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    acc = tl.full((ROWS, DIM), 0.0, tl.float32)
    for split in range(first_split, last_split + 1):
        split_top = tl.full((ROWS,), _LOWEST, tl.float32)
        split_total = tl.full((ROWS,), 0.0, tl.float32)
        split_acc = tl.full((ROWS, DIM), 0.0, tl.float32)
        begin = tl.maximum(split * SPLIT, low // CHUNK * CHUNK)
        for start in range(begin, tl.minimum((split + 1) * SPLIT, stop), CHUNK):
            key_at = start + tl.arange(0, CHUNK)
            own = key_at < stop
            block = tl.load(tables + row.to(tl.int64) * table_stride + key_at // BLOCK_SIZE, mask=own, other=0)
            cell = pool + block.to(tl.int64) * BLOCK_SIZE + key_at % BLOCK_SIZE
            kv_at = cell[:, None] * HEAD_DIM + dim[None, :]
            there = own[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(keys + kv_at, mask=there, other=0.0)
            v = tl.load(values + kv_at, mask=there, other=0.0)
            seen = key_at[None, :] <= query_at[:, None]
            if WINDOW:
                seen = seen & (key_at[None, :] > query_at[:, None] - WINDOW)
            scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
            new_top = tl.maximum(split_top, tl.max(scores, 1))
            weights = tl.exp(scores - new_top[:, None])
            carry = tl.exp(split_top - new_top)
            split_total = tl.fma(split_total, carry, tl.sum(weights, 1))
            # A product of its own, added once, so that a chunk which is not seen adds an exact zero.
            mixed = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            split_acc = tl.fma(split_acc, carry[:, None], mixed)
            split_top = new_top
        new_top = tl.maximum(top, split_top)
        old, new = tl.exp(top - new_top), tl.exp(split_top - new_top)
        total = tl.fma(total, old, split_total * new)
        acc = tl.fma(acc, old[:, None], split_acc * new[:, None])
        top = new_top

    if parts == 1:
        tl.store(out + at, tl.div_rn(acc, total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        slot = (tile.to(tl.int64) * HEADS + head) * parts + part
        tl.store(sums + slot[:, None] * HEAD_DIM + dim[None, :], acc, mask=real)
        tl.store(stats + slot * 2, top, mask=nth < count)
        tl.store(stats + slot * 2 + 1, total, mask=nth < count)


@triton.jit(do_not_specialize=["parts"])
def _merge(
    tiles,
    out,
    sums,
    stats,
    parts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Merge the splits of one query and head, in order, as `_attend` does."""
    tile, head = tl.program_id(0), tl.program_id(1)
    query = tl.load(tiles + tile * 4 + 1)
    position = tl.load(tiles + tile * 4 + 3)
    if tl.load(tiles + tile * 4 + 2) == 0:
        return
    dim = tl.arange(0, DIM)
    low = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
    top = tl.full((1,), _LOWEST, tl.float32)
    total = tl.full((1,), 0.0, tl.float32)
    acc = tl.full((DIM,), 0.0, tl.float32)
    for split in range(low // SPLIT, position // SPLIT + 1):
        slot = (tile.to(tl.int64) * HEADS + head) * parts + split
        split_top, split_total = tl.load(stats + slot * 2), tl.load(stats + slot * 2 + 1)
        split_acc = tl.load(sums + slot * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
        new_top = tl.maximum(top, split_top)
        old, new = tl.exp(top - new_top), tl.exp(split_top - new_top)
        total = tl.fma(total, old, split_total * new)
        acc = tl.fma(acc, old, split_acc * new)
        top = new_top
    at = (query.to(tl.int64) * HEADS + head) * HEAD_DIM + dim
    tl.store(out + at, tl.div_rn(acc, total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)
