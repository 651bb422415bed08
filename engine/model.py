"""A Llama-family decoder: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention import Tiling, paged_attention, plan_walk
from engine.batch import Batch
from engine.config import ModelConfig, RopeScaling
from engine.kv_store import KVStore
from engine.numerics import FAST, Tiles, linear, padded_rows, rms_norm, silu
from engine.sampler import greedy


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are [out, in], as `torch.nn.functional.linear` takes them."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    output: Tensor  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    qkv_bias: Tensor | None = None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Every matrix that multiplies activations, with a name for messages."""
        for index, layer in enumerate(self.layers):
            for name in ("qkv", "output", "gate_up", "down"):
                yield f"layers.{index}.{name}", getattr(layer, name)
        yield "lm_head", self.lm_head

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied embedding counts once."""
        vectors = ("attention_norm", "mlp_norm", "qkv_bias", "q_norm", "k_norm")
        found: Iterator[Tensor | None] = (getattr(layer, name) for layer in self.layers for name in vectors)
        small = self.norm.nbytes + sum(vector.nbytes for vector in found if vector is not None)
        embedding = 0 if self.embedding is self.lm_head else self.embedding.nbytes
        return embedding + small + sum(matrix.nbytes for _, matrix in self.matrices())


class Model:
    """A Decoder of torch operations: every device, no compiler.

    tiles: shapes in which products are issued; those of `selftest.choose_tiles` keep a row's bits.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, tiles: Tiles = Tiles()) -> None:  # noqa: B008
        self.config = config
        self.weights = weights
        self.tiles = tiles
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        cos, sin = rope_tables(config, self.device)
        self.rope_cos, self.rope_sin = cos.unsqueeze(1), sin.unsqueeze(1)

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    @property
    def matrix_bytes(self) -> int:
        return sum(matrix.nbytes for _, matrix in self.weights.matrices())

    @property
    def numerics(self) -> str:
        if self.tiles == FAST:
            return "fast (torch, no promise)"
        return f"exact (torch, tiles of {self.tiles.rows} rows, {self.tiles.queries} queries)"

    def padded_rows(self, positions: int, rows: int, slots: int) -> int:
        return padded_rows(positions, self.tiles.rows)

    def prepare(self, store: KVStore, slots: int, block_size: int) -> None:
        pass

    def greedy(self, logits: Tensor) -> tuple[list[int], list[float]]:
        return greedy(logits)

    @torch.inference_mode()
    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        cfg, weights, tile = self.config, self.weights, self.tiles.rows
        real, padded = len(batch.token_ids), padded_rows(len(batch.token_ids), tile)
        starts, stops = batch.starts.astype(np.int64), batch.stops.astype(np.int64)
        tiling = Tiling(self.tiles.queries, cfg.heads // cfg.kv_heads, cfg.sliding_window)
        walk = plan_walk(batch.tables, starts, stops, batch.block_size, tiling, padded, self.device)
        cells = self._indices(batch.cells, real)
        positions = self._indices(batch.positions, padded)
        last = self._indices(np.cumsum(stops - starts) - 1, padded_rows(len(starts), tile))
        cos, sin = self.rope_cos[positions], self.rope_sin[positions]
        x = weights.embedding[self._indices(batch.token_ids, padded)]
        for index, layer in enumerate(weights.layers):
            q, k, v = self._qkv(x, layer)
            store.write(index, cells, _rotate(k, cos, sin)[:real], v[:real])
            q = _rotate(q, cos, sin) * cfg.head_dim**-0.5
            x = x + linear(paged_attention(q, store, index, walk), layer.output, tile)
            gate, up = linear(rms_norm(x, layer.mlp_norm, cfg.rms_eps), layer.gate_up, tile).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down, tile)
        logits = linear(rms_norm(x[last], weights.norm, cfg.rms_eps), weights.lm_head, tile)
        return logits[: len(starts)].float()

    def _indices(self, array: np.ndarray[tuple[int, ...], np.dtype[Any]], size: int) -> Tensor:
        """[size] int64 on the device, zeros after the array's end."""
        padded = np.zeros(size, dtype=np.int64)
        padded[: len(array)] = array
        return torch.from_numpy(padded).to(self.device)

    def _qkv(self, x: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim], not yet rotated."""
        cfg = self.config
        qkv = linear(rms_norm(x, layer.attention_norm, cfg.rms_eps), layer.qkv, self.tiles.rows)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        heads = qkv.view(x.shape[0], -1, cfg.head_dim)
        q, k, v = torch.split(heads, [cfg.heads, cfg.kv_heads, cfg.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, cfg.rms_eps), rms_norm(k, layer.k_norm, cfg.rms_eps)
        return q, k, v


def rope_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_positions, head_dim / 2] (Su et al., 2021), float32 from float64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = _scaled(config.rope_theta**-exponents, config.rope_scaling)
    angles = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def _scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Frequencies [head_dim / 2] under the scaling's rule."""
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    turns = scaling.original_positions * frequencies / (2 * torch.pi)  # of the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(stretched, frequencies, kept.clamp(0, 1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention of Llama checkpoints. x: [rows, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
