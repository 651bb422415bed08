"""The decoder's forward in Triton kernels: the same layers as `engine.model`, for CUDA devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kv_store import KVStore
from engine.model import Model
from engine.triton_attention import Ints, Ints32, paged_attention, plan_tiles, tile_queries
from engine.triton_linear import Shape, linear
from engine.triton_rows import rms_norm, rotate_and_store, silu_gate

_ALIGNED = 4  # int32 elements of 16 bytes: kernels are compiled anew for other alignments


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One ragged forward; int32 on the device. Padding has token 0, position 0, cell -1 and tiles of no queries."""

    token_ids: Tensor  # [padded]
    positions: Tensor  # [padded]
    cells: Tensor  # [padded] where each K/V goes
    last: Tensor  # [padded rows] batch row of each request's last position
    tables: Tensor  # [rows, width]
    tiles: Tensor  # [padded tiles, 4], from `plan_tiles`
    block_size: int
    decode: bool  # every tile holds one query


def device_batch(
    model: Model,
    token_ids: Ints32,
    slots: Ints,
    starts: Ints,
    stops: Ints,
    tables: Ints32,
    block_size: int,
    padded: int = 0,
) -> DeviceBatch:
    """Lay out one forward: row i computes positions starts[i]..stops[i]-1 of slots[i], token_ids rows concatenated.

    tables: [slots, width], the block table of every slot. padded: positions, rows and tiles at least.
    """
    lengths = stops - starts
    ends = np.cumsum(lengths)
    count, rows = int(ends[-1]), len(slots)
    at = np.arange(count) + np.repeat(starts - (ends - lengths), lengths)
    tokens, positions = np.zeros((2, max(count, padded)), dtype=np.int32)
    cells = np.full(max(count, padded), -1, dtype=np.int32)
    last = np.zeros(max(rows, padded), dtype=np.int32)
    tokens[:count], positions[:count], last[:rows] = token_ids, at, ends - 1
    cells[:count] = tables[np.repeat(slots, lengths), at // block_size] * block_size + at % block_size
    queries = tile_queries(model.config.heads // model.config.kv_heads, model.dtype)
    tiles = plan_tiles(starts, stops, queries, padded)
    tiles[:, 0] = slots[tiles[:, 0]]
    names = ("token_ids", "positions", "cells", "last", "tables", "tiles")
    arrays = upload((tokens, positions, cells, last, tables, tiles), model.device)
    return DeviceBatch(
        **dict(zip(names, arrays, strict=True)), block_size=block_size, decode=bool((lengths == 1).all())
    )


def upload(arrays: Sequence[Ints32], device: torch.device) -> list[Tensor]:
    """Several int32 arrays in one copy that the host does not wait for; views of one tensor on the device."""
    starts = np.cumsum([0] + [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays])
    staged = torch.zeros(int(starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = staged.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.size] = array.reshape(-1)
    there = staged.to(device, non_blocking=True)
    return [there[s : s + a.size].view(a.shape) for s, a in zip(starts.tolist(), arrays, strict=False)]


@torch.inference_mode()
def forward(model: Model, batch: DeviceBatch, store: KVStore, shapes: Sequence[Shape]) -> Tensor:
    """Compute `batch`, write its K/V, return float32 logits [padded rows, vocab]. Waits for nothing on the device.

    shapes: of `triton_selftest.choose_shapes`.
    """
    cfg, weights = model.config, model.weights
    x = weights.embedding[batch.token_ids]
    for index, layer in enumerate(weights.layers):
        keys, values = store.keys[index], store.values[index]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        qkv = linear(rms_norm(x, layer.attention_norm, cfg.rms_eps), layer.qkv, shapes, bias=layer.qkv_bias)
        where = (batch.positions, batch.cells, model.rope_cos, model.rope_sin)
        q = rotate_and_store(qkv, *where, keys, values, cfg.heads, norms, cfg.rms_eps)
        seen = paged_attention(
            q,
            keys,
            values,
            batch.tables,
            batch.tiles,
            batch.block_size,
            window=cfg.sliding_window,
            split=batch.decode,
            out=q,
        )
        x = linear(seen.view(x.shape[0], -1), layer.output, shapes, residual=x)
        gated = silu_gate(linear(rms_norm(x, layer.mlp_norm, cfg.rms_eps), layer.gate_up, shapes))
        x = linear(gated, layer.down, shapes, residual=x)
    return linear(rms_norm(x[batch.last], weights.norm, cfg.rms_eps), weights.lm_head, shapes).float()


def captured(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """`step` as the replay of one CUDA graph; elsewhere `step` itself. Its inputs are read where they lay at capture.

    Each replay overwrites the tensor that earlier ones returned.
    """
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()  # compiles every kernel, which may not happen during capture
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
