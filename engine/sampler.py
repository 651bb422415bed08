"""From logits to tokens. A row is worked on alone, so its token does not depend on the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import NumericsError
from engine.sampling import Sampling

Vector = np.ndarray[tuple[int], np.dtype[Any]]


def greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """The best token of each row, the lowest id among equals, and its lead over the second best.

    logits: [rows, vocab] float32. Raises NumericsError if a row's best logits are not finite.
    """
    ids = logits.argmax(dim=-1, keepdim=True).int()
    best_two = torch.topk(logits, 2, dim=-1).values
    # The bits of both in one tensor, so that a device is waited for once.
    found = torch.cat((ids, best_two.view(torch.int32)), dim=1).cpu().numpy()
    best, second = found[:, 1:].view(np.float32).T
    if not (np.isfinite(best) & np.isfinite(second)).all():
        raise NumericsError("logits are not finite: the weights or the K/V hold NaN or infinity")
    return found[:, 0].tolist(), (best - second).tolist()


def sample(logits: Vector, how: Sampling, uniform: float) -> int:
    """One token by inverse transform: the first, best first, at which the kept probabilities sum past `uniform`.

    logits: [vocab] float32. how: temperature above 0. Among equal logits the lowest id comes first.
    """
    logits = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # next to no temperature: all but the best weigh nothing
        weights = np.exp((logits - logits.max()) / how.temperature)
    ids = _candidates(logits, weights, how)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    if how.top_k:
        ids = ids[: how.top_k]
    sums = np.cumsum(weights[ids])
    if how.top_p < 1:
        bound = how.top_p * (sums[-1] if how.top_k else weights.sum())
        sums = sums[: np.searchsorted(sums, bound) + 1]
    place = np.searchsorted(sums, uniform * sums[-1], side="right")
    return int(ids[min(place, len(sums) - 1)])


def _candidates(logits: Vector, weights: Vector, how: Sampling) -> Vector:
    """Ids, ascending, that may be kept: spares sorting a whole vocabulary."""
    if how.top_k:
        top_k = min(how.top_k, len(logits))
        return np.flatnonzero(logits >= np.partition(logits, -top_k)[-top_k])
    if how.top_p < 1:  # all others together weigh less than what top_p cuts
        return np.flatnonzero(weights >= (1 - how.top_p) / len(weights) * weights.sum())
    return np.arange(len(logits))
