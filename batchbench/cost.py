"""What an eviction costs, predicted: recompute against swap, with toy constants or a machine's measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

Strategy = Literal["recompute", "swap"]

# A toy model and link, for feeling the sizes; `calibrate` measures a machine's own.
MS_PER_TOKEN, BYTES_PER_TOKEN, BANDWIDTH_BYTES_PER_S = 0.1, 131_072, 25e9
VICTIM_TOKENS = 1000


def recompute_ms(tokens: int, ms_per_token: float = MS_PER_TOKEN) -> float:
    """Milliseconds to compute the K/V of `tokens` positions again, at a cost per position that does not grow."""
    _require_not_negative(tokens=tokens, ms_per_token=ms_per_token)
    return tokens * ms_per_token


def swap_ms(tokens: int, per_token_bytes: float, bandwidth_bytes_per_s: float, round_trip: bool = True) -> float:
    """Milliseconds to copy the K/V of `tokens` positions out, and back if `round_trip`.

    Raises ValueError unless the bandwidth is positive.
    """
    _require_not_negative(tokens=tokens, per_token_bytes=per_token_bytes)
    if not bandwidth_bytes_per_s > 0:
        raise ValueError(f"bandwidth_bytes_per_s is {bandwidth_bytes_per_s}, must be positive")
    one_way = tokens * per_token_bytes / bandwidth_bytes_per_s * 1e3
    return 2 * one_way if round_trip else one_way


def cheaper(
    tokens: int, per_token_bytes: float, bandwidth_bytes_per_s: float, ms_per_token: float = MS_PER_TOKEN
) -> Strategy:
    """`swap` if the round trip takes less than recomputing, else `recompute`."""
    swap = swap_ms(tokens, per_token_bytes, bandwidth_bytes_per_s)
    return "swap" if swap < recompute_ms(tokens, ms_per_token) else "recompute"


def flip_bandwidth_bytes_per_s(per_token_bytes: float, ms_per_token: float = MS_PER_TOKEN) -> float:
    """Bandwidth at which the choice flips, for any number of tokens: 2 x bytes per token / seconds per token."""
    _require_not_negative(per_token_bytes=per_token_bytes)
    if not ms_per_token > 0:
        raise ValueError(f"ms_per_token is {ms_per_token}, must be positive: recomputing for nothing never loses")
    return 2 * per_token_bytes / (ms_per_token / 1e3)


def pick_victim(seqs: Mapping[str, int]) -> str:
    """The name with the fewest cached tokens, so the cheapest to rebuild; the first in order among equals.

    Raises ValueError if there is none.
    """
    if not seqs:
        raise ValueError("no sequence to evict")
    return min(seqs, key=lambda name: (seqs[name], name))


def eviction_overhead(evictions: Iterable[tuple[int, str]]) -> float:
    """Milliseconds of a list of (tokens, strategy), with the toy constants. Raises ValueError for another strategy."""
    total = 0.0
    for tokens, strategy in evictions:
        if strategy == "recompute":
            total += recompute_ms(tokens)
        elif strategy == "swap":
            total += swap_ms(tokens, BYTES_PER_TOKEN, BANDWIDTH_BYTES_PER_S)
        else:
            raise ValueError(f"unknown strategy {strategy!r}; known: recompute, swap")
    return total


def bytes_per_token(layers: int, kv_heads: int, head_size: int, element_bytes: int) -> int:
    """Bytes of K and V that one position keeps: layers x 2 x kv heads x head size x bytes of an element."""
    sizes = {"layers": layers, "kv_heads": kv_heads, "head_size": head_size, "element_bytes": element_bytes}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, must be at least 1")
    return layers * 2 * kv_heads * head_size * element_bytes


def _require_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}, must not be negative")
