"""From logits to tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """The best token of each row and its lead over the second best. logits: [rows, vocab] float32."""
    best_two = torch.topk(logits, 2, dim=-1).values
    return logits.argmax(dim=-1).tolist(), (best_two[:, 0] - best_two[:, 1]).tolist()
