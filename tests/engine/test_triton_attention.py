"""The attention kernel against dense attention in float64, and in company; on a GPU, or interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.config import ModelConfig
from engine.errors import KernelsUnavailable, NumericsError
from tests.helpers import DTYPES
from tests.triton_interpreter import DEVICE, MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from engine import triton_attention, triton_selftest
from engine.triton_attention import KEY_CHUNK, SPLIT, paged_attention, plan_tiles, tile_queries
from engine.triton_selftest import check_attention

# What one rounding of an output of a few units costs, and in bfloat16 that of the weights too.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Rows:
    """Requests by name, each with K/V and queries of its own, in a pool whose other cells hold NaN."""

    def __init__(self, rows, block_size, dtype, heads=2, kv_heads=1, head_dim=32, layout=0):
        self.rows, self.dtype, self.group = rows, dtype, heads // kv_heads
        self.block_size = block_size
        width = max(-(-stop // block_size) for _, _, stop in rows) + 1
        blocks = np.random.default_rng(layout).permutation(width * len(rows) + 3)[: width * len(rows)]
        self.tables = torch.from_numpy(blocks.reshape(len(rows), width).astype(np.int32))
        cells = (width * len(rows) + 3) * block_size
        self.keys, self.values = (torch.full((kv_heads, cells, head_dim), torch.nan, dtype=dtype) for _ in "kv")
        queries = []
        for table, (name, start, stop) in zip(self.tables, rows, strict=True):
            draw = np.random.default_rng(name)
            at = torch.arange(stop)
            where = table.long()[at // block_size] * block_size + at % block_size
            for store in (self.keys, self.values):
                own = draw.standard_normal((1000, kv_heads, head_dim), np.float32)[:stop].transpose(1, 0, 2)
                store[:, where] = torch.from_numpy(own).to(dtype)
            own = draw.standard_normal((1000, heads, head_dim), np.float32)[start:stop] * head_dim**-0.5
            queries.append(torch.from_numpy(own).to(dtype))
        self.queries = torch.cat(queries)

    def attend(self, window=None, split=False, padded_tiles=0, over_queries=False):
        """Outputs of every row, in order."""
        starts, stops = (np.array([row[i] for row in self.rows]) for i in (1, 2))
        tiles = plan_tiles(starts, stops, tile_queries(self.group, self.dtype), padded_tiles)
        tensors = (self.queries, self.keys, self.values, self.tables, torch.from_numpy(tiles))
        there = [tensor.to(DEVICE, copy=True) for tensor in tensors]
        target = there[0] if over_queries else None
        out = paged_attention(*there, self.block_size, window=window, split=split, out=target).cpu()
        return torch.split(out, (stops - starts).tolist())

    def dense(self, window=None):
        """The same over gathered keys, in float64."""
        outputs, first = [], 0
        for table, (_, start, stop) in zip(self.tables, self.rows, strict=True):
            at, query_at = torch.arange(stop), torch.arange(start, stop)[:, None]
            cells = table.long()[at // self.block_size] * self.block_size + at % self.block_size
            k, v = (x[:, cells].double().repeat_interleave(self.group, 0) for x in (self.keys, self.values))
            scores = torch.einsum("qhd,hkd->hqk", self.queries[first : first + stop - start].double(), k)
            hidden = at > query_at if window is None else (at > query_at) | (at <= query_at - window)
            outputs.append(torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
            first += stop - start
        return outputs


def assert_dense(rows, window=None, split=False):
    for got, want in zip(rows.attend(window, split), rows.dense(window), strict=True):
        # float32 sums of a few hundred products of unit normals; bfloat16 rounds weights and outputs to 8 bits
        torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[rows.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", range(1, 65))
def test_every_block_size_equals_dense_attention(block_size, dtype):
    assert_dense(Rows([(1, 0, 3), (2, KEY_CHUNK - 2, KEY_CHUNK + 2)], block_size, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "head_dim"), [(1, 16), (2, 32), (3, 64), (4, 128), (5, 48), (6, 80), (7, 96), (8, 112)]
)
def test_every_group_and_head_size_equals_dense_attention(group, head_dim, dtype):
    rows = [(1, 60, 72), (2, 0, 1)]
    assert_dense(Rows(rows, 16, dtype, heads=2 * group, kv_heads=2, head_dim=head_dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 5, 64, 300])
def test_a_window_equals_dense_attention_with_keys_left_out(window, dtype):
    assert_dense(Rows([(1, 125, 140), (2, 0, 9)], 16, dtype), window)
    assert_dense(Rows([(1, 600, 601), (2, 255, 256)], 16, dtype), window, split=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("position", "window"), [(0, None), (63, None), (SPLIT, None), (SPLIT + KEY_CHUNK + 5, None), (SPLIT + 5, 70)]
)
def test_a_query_keeps_its_bits_in_every_company(position, window, dtype):
    def own(rows, block_size=16, layout=0, **how):
        """The output of the last position of the first row."""
        return Rows(rows, block_size, dtype, layout=layout).attend(window, **how)[0][-1]

    me = (7, position, position + 1)
    alone = own([me])
    assert torch.equal(own([me], block_size=5, layout=3), alone), "in other blocks"
    assert torch.equal(own([me], split=True), alone), "a program per split"
    longer = [me, (8, 0, 1), (9, 330, 331)]
    assert torch.equal(own(longer, split=True, over_queries=True), alone), "a longer neighbour's splits"
    assert torch.equal(own([(7, max(0, position - 2), position + 1)]), alone), "at the end of a chunk"
    assert torch.equal(own([(7, max(0, position - 40), position + 1)], over_queries=True), alone), (
        "in a later tile of a prefill"
    )
    assert torch.equal(own([me, (8, 60, 75), (9, 130, 131)], layout=1, padded_tiles=9), alone), "among others"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_of_padding_get_zeros_and_disturb_nobody(dtype):
    rows = Rows([(1, 3, 4)], 4, dtype)
    want = rows.attend()[0]
    rows.queries = torch.cat((rows.queries, torch.full_like(rows.queries, torch.nan).repeat(3, 1, 1)))
    tiles = torch.from_numpy(plan_tiles(np.array([3]), np.array([4]), 2, padded_tiles=4))
    tensors = [x.to(DEVICE) for x in (rows.queries, rows.keys, rows.values, rows.tables, tiles)]
    for split in (False, True):
        out = paged_attention(*tensors, 4, split=split).cpu()
        assert torch.equal(out[:1], want)
        assert torch.equal(out[1:], torch.zeros_like(out[1:]))


def test_tiles_cover_every_position_once():
    starts, stops = np.array([5, 0, 31]), np.array([6, 9, 35])
    tiles = plan_tiles(starts, stops, 4, padded_tiles=7)
    assert tiles.tolist() == [
        [0, 0, 1, 5], [1, 1, 4, 0], [1, 5, 4, 4], [1, 9, 1, 8], [2, 10, 4, 31], [0, 0, 0, 0], [0, 0, 0, 0]
    ]  # fmt: skip


def test_a_group_that_no_tile_holds_is_refused():
    with pytest.raises(KernelsUnavailable, match=r"17 query heads per K/V head, .* at most 16 in torch.float32"):
        tile_queries(17, torch.float32)


CONFIG = ModelConfig(256, 32, 1, 2, 1, 16, 64, 4096)


def test_the_start_up_trial_passes_here():
    check_attention(CONFIG, 16, torch.bfloat16, DEVICE)


def test_splits_chosen_by_the_call_are_caught_at_start_up(monkeypatch):
    def planted(*args, split=False, **how):
        monkeypatch.setattr(triton_attention, "SPLIT", KEY_CHUNK if split else SPLIT)
        return paged_attention(*args, split=split, **how)

    monkeypatch.setattr(triton_selftest, "paged_attention", planted)
    with pytest.raises(NumericsError, match=r"attention over 256 keys in blocks of 16, decoded by splits, gives"):
        check_attention(CONFIG, 16, torch.bfloat16, DEVICE)


def test_a_chunk_length_chosen_by_the_call_is_caught_at_start_up(monkeypatch):
    def planted(queries, keys, values, tables, tiles, block_size, **how):
        monkeypatch.setattr(triton_attention, "KEY_CHUNK", 32 if queries.shape[0] > 1 else KEY_CHUNK)
        return paged_attention(queries, keys, values, tables, tiles, block_size, **how)

    monkeypatch.setattr(triton_selftest, "paged_attention", planted)
    with pytest.raises(NumericsError, match=r"attention over .* keys in blocks of 16, in a .*prefill.*, gives"):
        check_attention(CONFIG, 16, torch.bfloat16, DEVICE)
