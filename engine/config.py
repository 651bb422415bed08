"""Frozen settings of the scheduler and of a decoder; validated where they are built."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes that the schedule depends on.

    slots: rows a forward can have. pool_blocks: KV pool, in blocks of block_size positions.
    watermark_blocks: blocks that admission leaves free while others run.
    victim: name of a rule in `engine.policies.VICTIM_RULES`.
    """

    slots: int
    pool_blocks: int
    block_size: int
    watermark_blocks: int = 0
    victim: str = "youngest"

    def __post_init__(self) -> None:
        for name in ("slots", "pool_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.watermark_blocks < 0:
            raise ConfigError(f"watermark_blocks is {self.watermark_blocks}, must not be negative")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the K/V of `tokens` positions."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family decoder. Sizes are in elements, `max_positions` in tokens."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, rotary embeddings need an even one")

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one position keeps: layers x 2 x kv_heads x head_dim."""
        return self.layers * 2 * self.kv_heads * self.head_dim
