"""Operations whose result for a row does not depend on the rows beside it.

BLAS libraries choose a kernel by the shape of the whole call, so a row's bits may change with
the number of rows. Here every matrix product is issued in one fixed shape: rows go through in
tiles of exactly ROW_TILE, the last one padded. Elementwise operations are limited to those that
are correctly rounded or whose vector loop and remainder loop agree (torch's `silu`, `sigmoid`
and `rsqrt` do not: their remainder elements are computed by other code).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 32  # rows per matrix product; GEMM throughput is flat from here up


def padded_rows(rows: int) -> int:
    """`rows` rounded up to a whole number of tiles."""
    return -(-rows // ROW_TILE) * ROW_TILE


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in tiles. x: [rows, in], rows a multiple of ROW_TILE; weight: [out, in]."""
    if x.shape[0] == ROW_TILE:
        return F.linear(x, weight)
    return torch.cat([F.linear(tile, weight) for tile in torch.split(x, ROW_TILE)])


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), computed in float32."""
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich, 2019), computed in float32."""
    wide = x.float()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + eps)).to(x.dtype) * weight
