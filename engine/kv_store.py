"""K/V tensors of the whole pool, addressed by cell: `block_id * block_size + offset`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig


class KVStore:
    """Keys and values of every layer, allocated once.

    keys, values: [layers, kv_heads, pool_blocks * block_size, head_dim]. Heads come before
    cells so that one gather of cells is already the batch of matrices that attention multiplies.
    pinned: memory of the host that a device copies from and to at full speed.
    """

    def __init__(
        self,
        model: ModelConfig,
        pool_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pinned: bool = False,
    ) -> None:
        shape = (model.layers, model.kv_heads, pool_blocks * block_size, model.head_dim)
        self.block_size = block_size
        # Zeros, not empty: a masked cell is multiplied by an exact 0, and 0 x garbage may be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
        self.values = torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one layer's K/V. cells: [positions]; keys, values: [positions, kv_heads, head_dim]."""
        self.keys[layer].index_copy_(1, cells, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, cells, values.transpose(0, 1))

    def copy_blocks(self, blocks: Sequence[int], target: KVStore, target_blocks: Sequence[int]) -> None:
        """Copy whole blocks of every layer into another store, on whichever device it is; as many there as here."""
        for here, there in ((self.keys, target.keys), (self.values, target.values)):
            # [layers, kv_heads, blocks, block_size, head_dim]: views, so that the writes below reach the store
            source, into = (t.view(*t.shape[:2], -1, self.block_size, t.shape[3]) for t in (here, there))
            chosen = source.index_select(2, torch.tensor(blocks, device=source.device))
            index = torch.tensor(target_blocks, device=into.device)
            into.index_copy_(2, index, chosen.to(into.device))
