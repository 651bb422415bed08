"""Causal attention over paged K/V, one code path and one shape for prefill and decode.

Queries are cut into tiles of a few positions of one request, keys into chunks of KEY_CHUNK
positions that start at multiples of KEY_CHUNK. A tile walks its chunks with a running softmax
(Milakov and Gimelshein, 2018), so every product has one fixed shape. A masked key contributes an
exact zero and a wholly masked chunk changes nothing, which is why a query's bits depend neither
on its neighbours in the tile nor on how many chunks the longest request needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kv_store import KVStore

KEY_CHUNK = 32

Ints = np.ndarray[tuple[int, ...], np.dtype[np.integer[Any]]]


@dataclass(frozen=True, slots=True)
class Tiling:
    """queries: positions of one request per tile. group: query heads per K/V head.

    window: positions that a query sees, itself included; None for all before it.
    """

    queries: int
    group: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of the walk: the first `tiles` tiles read these cells."""

    tiles: int
    cells: Tensor  # [tiles * KEY_CHUNK]
    masked: Tensor  # [tiles, tiling.queries * tiling.group, KEY_CHUNK], True where a key is not to be seen


@dataclass(frozen=True, slots=True)
class Walk:
    """Where every query and key of one forward lies; shared by all layers."""

    tiling: Tiling
    gather: Tensor  # [tiles * tiling.queries] row of the batch that each query place reads
    scatter: Tensor  # [padded positions] query place of each batch row
    chunks: tuple[Chunk, ...]


def plan_walk(
    tables: Ints,
    starts: Ints,
    stops: Ints,
    block_size: int,
    tiling: Tiling,
    padded: int,
    device: torch.device,
) -> Walk:
    """Lay out one forward. tables: [rows, blocks]; starts, stops: [rows], the positions of each row.

    padded: rows of the batch after padding.
    """
    lengths, queries = stops - starts, tiling.queries
    per_row = -(-lengths // queries)
    row = np.repeat(np.arange(len(starts)), per_row)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    chunk_count = (np.minimum(starts[row] + (nth + 1) * queries, stops[row]) - 1) // KEY_CHUNK + 1
    order = np.argsort(-chunk_count, kind="stable")  # longest first: each chunk's tiles are a prefix
    row, nth, chunk_count = row[order], nth[order], chunk_count[order]

    offset = nth[:, None] * queries + np.arange(queries)  # [tiles, queries] into the row
    real = offset < lengths[row][:, None]
    batch_row = np.where(real, (np.cumsum(lengths) - lengths)[row][:, None] + offset, 0)
    query_at = np.where(real, starts[row][:, None] + offset, 0)
    scatter = np.zeros(padded, dtype=np.int64)
    scatter[batch_row[real]] = np.flatnonzero(real)

    chunks = []
    for c in range(int(chunk_count[0])):
        tiles = int(np.searchsorted(-chunk_count, -c, side="left"))  # those with more than c chunks
        key_at = c * KEY_CHUNK + np.arange(KEY_CHUNK)
        blocks = tables[row[:tiles]][:, np.minimum(key_at // block_size, tables.shape[1] - 1)]
        cells = blocks * block_size + key_at % block_size
        masked = key_at > query_at[:tiles, :, None]
        if tiling.window is not None:
            masked |= key_at <= query_at[:tiles, :, None] - tiling.window
        masked = masked.repeat(tiling.group, axis=1)
        chunks.append(Chunk(tiles, _to(cells.reshape(-1), device), _to(masked, device)))
    return Walk(tiling, _to(batch_row.reshape(-1), device), _to(scatter, device), tuple(chunks))


def paged_attention(queries: Tensor, store: KVStore, layer: int, walk: Walk) -> Tensor:
    """queries: [padded, heads, head_dim], already scaled. Returns [padded, heads * head_dim]."""
    keys, values = store.keys[layer], store.values[layer]
    kv_heads, head_dim = keys.shape[0], keys.shape[2]
    shape = (-1, walk.tiling.queries, kv_heads, walk.tiling.group, head_dim)
    q = queries[walk.gather].float().view(shape)
    tiles = q.shape[0]
    q = q.permute(2, 0, 1, 3, 4).reshape(kv_heads, tiles, -1, head_dim)  # [kv_heads, tiles, queries, head_dim]

    # Finite: with a window a query's first chunk may be masked whole, and inf - inf is not a number.
    top = torch.full(q.shape[:-1], torch.finfo(torch.float32).min, device=q.device).unsqueeze(-1)
    total = torch.zeros_like(top)
    out = torch.zeros_like(q)
    for chunk in walk.chunks:
        n = chunk.tiles
        k = keys.index_select(1, chunk.cells).float().view(kv_heads, n, KEY_CHUNK, head_dim)
        v = values.index_select(1, chunk.cells).float().view(kv_heads, n, KEY_CHUNK, head_dim)
        scores = torch.matmul(q[:, :n], k.transpose(-1, -2)).masked_fill_(chunk.masked, -torch.inf)
        new_top = torch.maximum(top[:, :n], scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - new_top)
        carry = torch.exp(top[:, :n] - new_top)
        total[:, :n] = total[:, :n] * carry + weights.sum(dim=-1, keepdim=True)
        out[:, :n] = out[:, :n] * carry + torch.matmul(weights, v)
        top[:, :n] = new_top
    out = (out / total).view(kv_heads, tiles, walk.tiling.queries, -1, head_dim)
    places = out.permute(1, 2, 0, 3, 4).reshape(len(walk.gather), -1)
    return places[walk.scatter].to(queries.dtype)


def _to(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
