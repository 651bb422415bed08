"""From logits to tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import NumericsError


def greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """The best token of each row, the lowest id among equals, and its lead over the second best.

    logits: [rows, vocab] float32. Raises NumericsError if a row's best logits are not finite.
    """
    best_two = torch.topk(logits, 2, dim=-1).values
    if not torch.isfinite(best_two).all():
        raise NumericsError("logits are not finite: the weights or the K/V hold NaN or infinity")
    return logits.argmax(dim=-1).tolist(), (best_two[:, 0] - best_two[:, 1]).tolist()
