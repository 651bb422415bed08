"""One ragged forward in plain arrays, and what a runner needs of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from engine.config import ModelConfig
from engine.kv_store import KVStore

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Positions of all rows, row after row; int32 and contiguous."""

    token_ids: Ints  # [positions]
    positions: Ints  # [positions] absolute position of each token in its request
    cells: Ints  # [positions] where each K/V goes
    starts: Ints  # [rows] first position that each row computes
    stops: Ints  # [rows] one past its last
    tables: Ints  # [rows, blocks] block ids of each row's request
    block_size: int
    slots: int  # rows that a forward of this engine can have

    @property
    def decode(self) -> bool:
        """Every row computes one position."""
        return len(self.token_ids) == len(self.starts)


def lay_out(
    token_ids: ArrayLike, starts: ArrayLike, stops: ArrayLike, tables: Ints, block_size: int, slots: int
) -> Batch:
    """The batch in which row i computes positions starts[i]..stops[i]-1; what follows from that is worked out here.

    token_ids: [positions], rows concatenated. starts, stops: [rows]. tables: [rows, blocks].
    """
    begins, ends = np.asarray(starts, dtype=np.int32), np.asarray(stops, dtype=np.int32)
    lengths = ends - begins
    row = np.repeat(np.arange(len(lengths)), lengths)  # of each position
    firsts = np.cumsum(lengths) - lengths
    positions = (np.arange(len(row)) + (begins - firsts)[row]).astype(np.int32)
    cells = tables[row, positions // block_size] * block_size + positions % block_size
    tokens = np.asarray(token_ids, dtype=np.int32)
    return Batch(tokens, positions, cells.astype(np.int32), begins, ends, tables, block_size, slots)


class Decoder(Protocol):
    """A model that runs batches. Stateless: K/V lives in the store that is passed in."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied embedding counts once."""
        ...

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the weights that every forward reads whole."""
        ...

    @property
    def numerics(self) -> str:
        """What is promised of the bits, and what computes them."""
        ...

    def padded_rows(self, positions: int, rows: int, slots: int) -> int:
        """Positions that a forward computes, padding included, for `positions` of `rows` requests in `slots`."""
        ...

    def prepare(self, store: KVStore, slots: int, block_size: int) -> None:
        """Do now what would make the first forwards over `store` slow. May be left out."""
        ...

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        """Compute the batch, write its K/V. Returns float32 [rows, vocab], each row's logits at its last position.

        Valid until the next forward.
        """
        ...

    def greedy(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Best token per row and its lead over the second best; NumericsError if logits are not finite."""
        ...
