"""Reads a GGUF file of the Llama, Qwen2 or Qwen3 architecture, dequantised to float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from engine.checkpoint import assemble, require_regular, tensor_shapes
from engine.config import ModelConfig, RopeScaling
from engine.errors import CheckpointError, ConfigError
from engine.model import Model

_FAMILIES: dict[str, dict[str, bool]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
_NAMES = {  # Hugging Face name of a layer's tensor, or of one outside the layers -> GGUF name
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file of a known architecture. shapes: of every tensor, under its Hugging Face name where it has one."""

    path: Path
    reader: GGUFReader
    architecture: str  # "llama" (Mistral too), "qwen2" or "qwen3"
    config: ModelConfig
    tensors: Mapping[str, ReaderTensor]  # under their GGUF names
    shapes: Mapping[str, tuple[int, ...]]

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default` where the file does not have it."""
        return _field(self.reader, key, default)

    def read(self, name: str) -> Tensor:
        """One tensor, float32, by its Hugging Face name."""
        values = _values(self.path, self.tensors[_gguf_name(name)])
        if self.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _halves(values, self.config.heads if name.endswith("q_proj.weight") else self.config.kv_heads)
        return torch.from_numpy(values)


def load_gguf(path: Path, dtype: torch.dtype, device: torch.device) -> Model:
    """Load a GGUF file. Raises CheckpointError naming the key or tensor at fault, by its GGUF name where it has one."""
    file = open_gguf(path)
    return assemble(file.config, file.shapes, file.read, dtype, device)


def open_gguf(path: Path) -> GgufFile:
    """Read all but the tensors' values. Raises CheckpointError naming the key at fault."""
    reader = _open(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = _field(reader, "general.architecture")
    if architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise CheckpointError(f"{path}: architecture {architecture!r} is not supported; known: {known}")
    if "rope_freqs.weight" in tensors:
        raise CheckpointError(f"{path}: rope_freqs.weight is not supported; use the Hugging Face folder")
    try:
        config = _config(reader, architecture, tensors)
    except CheckpointError:
        raise
    except (ValueError, TypeError, OverflowError) as error:  # ConfigError; a value of another type
        raise CheckpointError(f"{path}: {error}") from None
    names = {_gguf_name(name): name for name in tensor_shapes(config)}
    shapes = {names.get(name, name): tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}
    return GgufFile(path, reader, architecture, config, tensors, shapes)


def _open(path: Path) -> GGUFReader:
    require_regular(path)
    try:
        return GGUFReader(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path}: damaged or truncated: {error}") from None


def _field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    try:
        return default if field is None else field.contents()
    except (ValueError, TypeError, IndexError) as error:  # no UTF-8, a type that it is not
        raise CheckpointError(f"{reader.data.filename}: {key} is damaged: {error}") from None


def _config(reader: GGUFReader, architecture: str, tensors: dict[str, ReaderTensor]) -> ModelConfig:
    def get(key: str, default: Any = None) -> Any:
        value = _field(reader, f"{architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"{architecture}.{key} is missing")
        return value

    if "token_embd.weight" not in tensors:
        raise ConfigError("tensor token_embd.weight is missing")
    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    window = int(get("attention.sliding_window", 0))
    kind = get("rope.scaling.type", "none")
    return ModelConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        layers=int(get("block_count")),
        heads=heads,
        kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=int(get("attention.key_length", hidden // max(heads, 1))),
        intermediate_size=int(get("feed_forward_length")),
        max_positions=int(get("context_length")),
        rope_theta=_widened(get("rope.freq_base", 10_000.0)),
        rms_eps=_widened(get("attention.layer_norm_rms_epsilon")),
        rope_scaling=None if kind == "none" else RopeScaling(str(kind), float(get("rope.scaling.factor"))),
        sliding_window=window or None,
        tied_embedding="output.weight" not in tensors,
        **_FAMILIES[architecture],
    )


def _widened(value: float) -> float:
    """A float32 of the file as the decimal it was written from: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    index, inner = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{_NAMES[inner]}.{kind}"


def _values(path: Path, tensor: ReaderTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
        return np.array(values, dtype=np.float32).reshape(tuple(int(n) for n in reversed(tensor.shape)))
    except (ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: tensor {tensor.name} of type {tensor.tensor_type.name}: {error}") from None


def _halves(matrix: np.ndarray[Any, np.dtype[np.float32]], heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Undo GGUF's order of a Llama q or k matrix: pairs side by side -> first halves, then second halves."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
