"""Frozen settings of the scheduler and of a decoder; validated where they are built."""

from __future__ import annotations

import math
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
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts.

    kind `linear`: all divided by factor (Chen et al., 2023). kind `llama3`: those whose wavelength
    exceeds original_positions / low_freq_factor divided by factor, those below original_positions /
    high_freq_factor kept, those between blended (Llama 3.1 model card).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ConfigError(f"rope scaling {self.kind!r} is not supported; known: linear, llama3")
        if not 1 <= self.factor < math.inf:
            raise ConfigError(f"rope scaling factor is {self.factor}, must be at least 1")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf or self.original_positions < 1:
            raise ConfigError(
                f"rope scaling low_freq_factor {self.low_freq_factor}, high_freq_factor {self.high_freq_factor}, "
                f"original positions {self.original_positions}: must be above 0, the first below the second"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family decoder. Sizes are in elements, `max_positions` in tokens.

    sliding_window: positions that a query sees, itself included; None for all before it.
    """

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
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm of each head's queries and keys, before the rotation
    tied_embedding: bool = False  # the embedding is the output matrix too

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size")
        for name in (*sizes, "max_positions"):
            most = 10_000 if name == "layers" else 2**31 - 1  # far beyond any model: a damaged file, not a wish
            if not 1 <= getattr(self, name) <= most:
                bound = "at least 1" if getattr(self, name) < 1 else f"at most {most}"
                raise ConfigError(f"{name} is {getattr(self, name)}, must be {bound}")
        for name in ("rope_theta", "rms_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be a number above 0")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, rotary embeddings need an even one")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window is {self.sliding_window}, must be at least 1")

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one position keeps: layers x 2 x kv_heads x head_dim."""
        return self.layers * 2 * self.kv_heads * self.head_dim
