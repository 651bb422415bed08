"""Paged attention against plain attention in float64, and its independence of company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention import KEY_CHUNK, Tiling, paged_attention, plan_walk
from engine.config import ModelConfig
from engine.kv_store import KVStore
from engine.numerics import padded_rows
from tests.helpers import CPU, tiny

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
CONFIG = ModelConfig(256, 64, 1, HEADS, KV_HEADS, HEAD_DIM, 64, 4096)


def run(rows, block_size, dtype=torch.float32, seed=0):
    """rows: (start, stop) per request. Returns outputs, queries and each request's contiguous K/V."""
    rng = np.random.default_rng(seed)
    blocks_each = [-(-stop // block_size) for _, stop in rows]
    pool = int(sum(blocks_each)) + 3
    store = KVStore(CONFIG, pool, block_size, dtype, CPU)
    order = rng.permutation(pool)
    tables = np.zeros((len(rows), max(blocks_each)), dtype=np.int64)
    keys, values, taken = [], [], 0
    for i, (_, stop) in enumerate(rows):
        tables[i, : blocks_each[i]] = order[taken : taken + blocks_each[i]]
        taken += blocks_each[i]
        # K/V of a request depends on the request alone, so that company can change around it.
        own = np.random.default_rng(1000 + i)
        k, v = (
            torch.from_numpy(own.standard_normal((stop, KV_HEADS, HEAD_DIM), np.float32)).to(dtype) for _ in range(2)
        )
        at = np.arange(stop)
        cells = torch.from_numpy(tables[i][at // block_size] * block_size + at % block_size)
        store.write(0, cells, k, v)
        keys.append(k)
        values.append(v)
    starts, stops = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    lengths = stops - starts
    tiles = tiny(kernels="torch").tiles
    padded = padded_rows(int(lengths.sum()), tiles.rows)
    queries = torch.zeros(padded, HEADS, HEAD_DIM, dtype=dtype)
    at = 0
    for i, (start, stop) in enumerate(rows):
        own = np.random.default_rng(2000 + i).standard_normal((stop, HEADS, HEAD_DIM), np.float32)
        queries[at : at + stop - start] = torch.from_numpy(own[start:]).to(dtype)
        at += stop - start
    walk = plan_walk(tables, starts, stops, block_size, Tiling(tiles.queries, HEADS // KV_HEADS), padded, CPU)
    return paged_attention(queries, store, 0, walk), queries, keys, values


def plain(query, keys, values):
    """softmax(q k) v of one position over all given keys, in float64. query: [heads, head_dim]."""
    group = HEADS // KV_HEADS
    k = keys.double().repeat_interleave(group, dim=1)
    v = values.double().repeat_interleave(group, dim=1)
    weights = torch.einsum("hd,khd->hk", query.double(), k).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, v).reshape(-1)


@pytest.mark.parametrize("block_size", [*range(1, 18), 31, 32, 33, 64, 100])
def test_paged_equals_plain_for_every_block_size(block_size):
    rows = [(0, 5), (70, 71), (0, 40), (33, 60), (31, 32), (32, 33), (0, 1)]
    out, queries, keys, values = run(rows, block_size)
    at = 0
    for i, (start, stop) in enumerate(rows):
        for position in range(start, stop):
            want = plain(queries[at], keys[i][: position + 1], values[i][: position + 1])
            # float32 sums of up to 71 products of unit normals: a few 1e-6 of rounding
            torch.testing.assert_close(out[at].double(), want, rtol=1e-5, atol=1e-5)
            at += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 1, 7, 8, 31, 32, 33, 63, 64, 100])
def test_a_query_has_the_same_bits_alone_in_a_prefill_and_in_company(position, dtype):
    alone = run([(position, position + 1)], 4, dtype)[0][0]
    whole = run([(0, position + 1)], 4, dtype)[0][position]
    tail = run([(max(0, position - 3), position + 1)], 16, dtype)[0][min(3, position)]
    company = [(position, position + 1), (0, 90), *((n, n + 1) for n in range(60))]
    crowded = run(company, 7, dtype, seed=5)[0][0]
    assert torch.equal(alone, whole)
    assert torch.equal(alone, tail)
    assert torch.equal(alone, crowded)


def test_a_tile_and_a_chunk_are_crossed_by_these_tests():
    assert tiny(kernels="torch").tiles.queries < 40 and KEY_CHUNK < 71
