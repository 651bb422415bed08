"""What a sweep will need at the least, computed before anything is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from batchbench.protocol import RequestSpec


def floor_iterations(
    requests: Sequence[RequestSpec], slots: int, block_size: int, pool_blocks: int, *, shared: bool = False
) -> int:
    """Iterations that no schedule can undercut, evictions or not.

    The largest of three bounds: the longest output, since a request gets one token an iteration;
    all rows over the slots; and, since a token of a context of n positions needs ceil(n / block_size)
    blocks while it is computed, the sum of those block-iterations over the pool. The last does not bind where
    requests may share blocks (`shared`: a prefix cache).
    """
    rows = sum(request.output_tokens for request in requests)
    block_iterations = sum(
        _blocks_up_to(request.prompt_tokens + request.output_tokens - 1, block_size)
        - _blocks_up_to(request.prompt_tokens - 1, block_size)
        for request in requests
    )
    longest = max((request.output_tokens for request in requests), default=0)
    return max(longest, -(-rows // slots), 0 if shared else -(-block_iterations // pool_blocks))


def floor_positions(requests: Sequence[RequestSpec]) -> int:
    """Positions that a run computes if nothing is computed twice; the last token is never fed."""
    return sum(request.prompt_tokens + request.output_tokens - 1 for request in requests)


def read_bandwidth_bytes_per_s(size_bytes: int, repeats: int = 9) -> float:
    """Best of several timed sums over that many bytes of float32, in whatever memory or cache they fit."""
    array = np.ones(max(size_bytes // 4, 2**16), dtype=np.float32)
    array.sum()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        array.sum()
        best = min(best, time.perf_counter() - start)
    return array.nbytes / best


def _blocks_up_to(positions: int, block_size: int) -> int:
    """Sum of ceil(n / block_size) for n = 1..positions, in closed form."""
    full, rest = divmod(positions, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)
