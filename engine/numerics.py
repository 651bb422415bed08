"""Operations whose result for a row does not depend on the rows beside it.

BLAS libraries choose a kernel by the shape of the whole call, so a row's bits may change with
the number of rows. Here every matrix product is issued in one fixed shape: rows go through in
tiles, the last one padded. Within a tile a row's place may still matter, where the library cuts
the tile into strips of unequal kernels; which tile sizes are free of that depends on the
processor and on the number of threads, so `selftest.choose_tiles` finds one at start-up.

Elementwise operations are limited to those that are correctly rounded or whose vector loop and
remainder loop agree (torch's `silu`, `sigmoid` and `rsqrt` do not: their remainder elements are
computed by other code).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """rows: batch rows per matrix product; 0 for all there are.

    queries: positions of one request per attention product.
    """

    rows: int = 32
    queries: int = 8


FAST = Tiles(rows=0)
"""No promise: a product has as many rows as the batch, and the library picks its kernel by that number."""


def padded_rows(rows: int, tile: int) -> int:
    """`rows` rounded up to a whole number of tiles; tile 0 leaves them as they are."""
    return -(-rows // tile) * tile if tile else rows


def linear(x: Tensor, weight: Tensor, tile: int) -> Tensor:
    """x @ weight.T in tiles of that many rows, or whole if 0.

    x: [rows, in], rows a multiple of tile; weight: [out, in].
    """
    if tile in (0, x.shape[0]):
        return F.linear(x, weight)
    return torch.cat([F.linear(rows, weight) for rows in torch.split(x, tile)])


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), computed in float32."""
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich, 2019), computed in float32."""
    wide = x.float()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + eps)).to(x.dtype) * weight
