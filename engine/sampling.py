"""How a request's tokens are chosen, and the randomness that chooses them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature: 0 takes the best token; otherwise logits are divided by it.

    top_k: only that many of the best tokens; 0 for all. top_p: of these, only the most probable whose
    probabilities just reach it (Holtzman et al., 2020). seed: of the randomness. Raises ConfigError.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature is {self.temperature}, must be a number of at least 0")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}, must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}, must be above 0 and at most 1")

    def uniform(self, request_id: str, position: int) -> float:
        """A number in [0, 1) that depends on seed, request and position alone: not on batch, slot or eviction."""
        key = f"{self.seed}\0{position}\0{request_id}".encode()
        return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) / 2**53


GREEDY = Sampling()
