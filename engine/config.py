"""Frozen settings of the scheduler and of a decoder; validated where they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import ConfigError

RULES = ("batchbench", "vllm-v1", "sglang")
GATES = ("full-prompt", "first-chunk")
ADMISSIONS = ("incremental", "reserve-output", "reserve-max")
RECLAIMS = ("recompute", "swap", "cheaper")
BATCHINGS = ("continuous", "static")
_VICTIMS = {"batchbench": "youngest", "vllm-v1": "youngest", "sglang": "fewest-output"}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes and choices that the schedule depends on (docs/preemption.md).

    slots: rows a forward can have. pool_blocks: KV pool, in blocks of block_size positions.
    watermark_blocks: blocks that admission leaves free while others run.
    victim: name of a rule in `engine.policies.VICTIM_RULES`, or `package.module:function`; None: the rules' own.
    rules: whose schedule (`engine.rules`). token_budget: positions per iteration, None for no limit.
    admission_gate: of vllm-v1, what must fit before a request is admitted. admission: positions whose blocks an
    admission buys: those of its tokens, of all its output, or max_tokens. reclaim: what becomes of a victim's K/V.
    swap_blocks: host pool for it. prefix_cache: full blocks of equal content at equal positions are shared.
    batching: `static` admits a group only when the last one has ended. Raises ConfigError.
    """

    slots: int
    pool_blocks: int
    block_size: int
    watermark_blocks: int = 0
    victim: str | None = None
    rules: str = "batchbench"
    token_budget: int | None = None
    admission_gate: str = "full-prompt"
    admission: str = "incremental"
    max_tokens: int | None = None
    reclaim: str = "recompute"
    swap_blocks: int = 0
    prefix_cache: bool = False
    batching: str = "continuous"

    def __post_init__(self) -> None:
        for name in ("slots", "pool_blocks", "block_size", "token_budget", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        for name in ("watermark_blocks", "swap_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, must not be negative")
        for name, known in (
            ("rules", RULES),
            ("admission_gate", GATES),
            ("admission", ADMISSIONS),
            ("reclaim", RECLAIMS),
            ("batching", BATCHINGS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")
        if contradiction := self._contradiction():
            raise ConfigError(contradiction)

    def _contradiction(self) -> str | None:
        if self.rules != "batchbench":
            for name in ("admission", "batching"):
                if getattr(self, name) != SchedulerConfig.__dataclass_fields__[name].default:
                    return f"{name} = {getattr(self, name)!r} is of rules = 'batchbench'; {self.rules!r} has its own"
        if self.rules == "sglang" and (self.token_budget or 0) % self.block_size:
            return (
                f"token_budget is {self.token_budget}, under rules = 'sglang' it must be a multiple of block_size "
                f"({self.block_size}): chunks are whole pages"
            )
        if self.rules != "vllm-v1" and self.admission_gate != "full-prompt":
            return f"admission_gate = {self.admission_gate!r} is of rules = 'vllm-v1', not of {self.rules!r}"
        if (self.admission == "reserve-max") != (self.max_tokens is not None):
            return "admission = 'reserve-max' and max_tokens, the positions that it reserves, need each other"
        if self.reclaim == "recompute" and self.swap_blocks:
            return f"swap_blocks = {self.swap_blocks} would do nothing: reclaim is 'recompute', not 'swap' or 'cheaper'"
        if self.reclaim != "recompute" and not self.swap_blocks:
            return f"reclaim = {self.reclaim!r} with swap_blocks = 0: swapping needs a host pool"
        return None

    @property
    def victim_name(self) -> str:
        return self.victim or _VICTIMS[self.rules]

    @property
    def budget(self) -> int:
        """Positions that an iteration may compute."""
        return self.token_budget or self.slots + self.pool_blocks * self.block_size

    @property
    def whole_prefills(self) -> bool:
        """Every prompt is computed in one iteration."""
        return self.token_budget is None

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
