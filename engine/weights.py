"""The embedded model `tiny`: byte-level, seeded, the same bits on every machine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model import LayerWeights, Model, ModelWeights

TINY = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=192,
    max_positions=4096,
)
# Gain 1 keeps activations at unit variance, and greedy text then loops and ignores much of its
# context. At 2 most tokens of a text are distinct and a damaged K/V block changes it (docs/log.md).
_GAIN = 2.0


def tiny_model(seed: int, dtype: torch.dtype, device: torch.device) -> Model:
    """Build `tiny`. Uniform weights drawn as integers, so that no library's rounding enters."""
    draw = _Draw(seed)
    cfg, qkv_rows = TINY, (TINY.heads + 2 * TINY.kv_heads) * TINY.head_dim

    def matrix(rows: int, columns: int, gain: float = _GAIN) -> Tensor:
        return draw.uniform(rows, columns, gain * columns**-0.5).to(device, dtype)

    def ones() -> Tensor:
        return torch.ones(cfg.hidden_size, dtype=dtype, device=device)

    embedding = draw.uniform(cfg.vocab_size, cfg.hidden_size, 1.0).to(device, dtype)
    layers = [
        LayerWeights(
            attention_norm=ones(),
            qkv=matrix(qkv_rows, cfg.hidden_size),
            output=matrix(cfg.hidden_size, cfg.heads * cfg.head_dim),
            mlp_norm=ones(),
            gate_up=matrix(2 * cfg.intermediate_size, cfg.hidden_size),
            down=matrix(cfg.hidden_size, cfg.intermediate_size),
        )
        for _ in range(cfg.layers)
    ]
    lm_head = matrix(cfg.vocab_size, cfg.hidden_size, gain=1.0)
    return Model(cfg, ModelWeights(embedding, layers, ones(), lm_head))


class _Draw:
    """Uniform float32 of zero mean from PCG64's raw stream, which numpy promises to keep."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def uniform(self, rows: int, columns: int, deviation: float) -> Tensor:
        raw = self._bits.random_raw(rows * columns) >> np.uint64(40)  # 24 bits: exact in float32
        unit = (raw.astype(np.int64) - 2**23).astype(np.float32) / np.float32(2**23)
        return torch.from_numpy((unit * np.float32(3**0.5 * deviation)).reshape(rows, columns))
