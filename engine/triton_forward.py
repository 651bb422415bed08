"""The decoder's forward in Triton kernels: the same layers as `engine.model`, for CUDA devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, Ints
from engine.kv_store import KVStore
from engine.model import Model
from engine.triton_attention import paged_attention, plan_tiles
from engine.triton_linear import Shape, linear
from engine.triton_rows import rms_norm, rotate_and_store, silu_gate

_ALIGNED = 4  # int32 elements of 16 bytes: kernels are compiled anew for other alignments


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One ragged forward; int32 on the device. Padding has token 0, position 0, cell -1 and tiles of no queries."""

    block_size: int
    decode: bool  # every tile holds one query
    memory: Tensor  # in which all that follow lie
    token_ids: Tensor  # [padded]
    positions: Tensor  # [padded]
    cells: Tensor  # [padded] where each K/V goes
    last: Tensor  # [padded rows] batch row of each request's last position
    tiles: Tensor  # [padded tiles, 4], from `plan_tiles`
    tables: Tensor  # [padded rows, width]


def device_batch(
    batch: Batch, queries: int, device: torch.device, *, padded: int = 0, width: int = 0, into: Tensor | None = None
) -> DeviceBatch:
    """Bring one forward to the device. queries: positions per tile, from `tile_queries`.

    padded: positions, rows and tiles at least. width: blocks per table at least.
    into: the `memory` of an earlier batch of the same padded sizes, which this one overwrites.
    """
    count, rows = max(len(batch.token_ids), padded), max(len(batch.starts), padded)
    arrays = (
        _padded(batch.token_ids, count),
        _padded(batch.positions, count),
        _padded(batch.cells, count, fill=-1),
        _padded(np.cumsum(batch.stops - batch.starts) - 1, rows),
        plan_tiles(batch.starts, batch.stops, queries, padded),
        _padded(batch.tables, rows, max(batch.tables.shape[1], width)),
    )
    memory, views = upload(arrays, device, into)
    return DeviceBatch(batch.block_size, batch.decode, memory, *views)


def _padded(array: Ints, *shape: int, fill: int = 0) -> Ints:
    out = np.full(shape, fill, dtype=np.int32)
    out[tuple(slice(size) for size in array.shape)] = array
    return out


def upload(arrays: Sequence[Ints], device: torch.device, into: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Several int32 arrays in one copy that the host does not wait for. Returns the copy and each array's view of it.

    into: the copy of earlier arrays of the same sizes, to be overwritten.
    """
    starts = np.cumsum([0] + [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]).tolist()
    staged = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    host = staged.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.size] = array.reshape(-1)
    if into is None:
        into = torch.empty(starts[-1], dtype=torch.int32, device=device)
    into.copy_(staged, non_blocking=True)
    return into, [into[s : s + a.size].view(a.shape) for s, a in zip(starts, arrays, strict=False)]


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
