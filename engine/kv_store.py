"""K/V tensors of the whole pool, addressed by cell: `block_id * block_size + offset`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import ModelConfig


class KVStore:
    """Keys and values of every layer, allocated once.

    keys, values: [layers, kv_heads, pool_blocks * block_size, head_dim]. Heads come before
    cells so that one gather of cells is already the batch of matrices that attention multiplies.
    """

    def __init__(
        self,
        model: ModelConfig,
        pool_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (model.layers, model.kv_heads, pool_blocks * block_size, model.head_dim)
        # Zeros, not empty: a masked cell is multiplied by an exact 0, and 0 x garbage may be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one layer's K/V. cells: [positions]; keys, values: [positions, kv_heads, head_dim]."""
        self.keys[layer].index_copy_(1, cells, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, cells, values.transpose(0, 1))
