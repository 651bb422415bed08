"""From tensors under Hugging Face names to a model: every one expected, present and of its shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.model import LayerWeights, Model, ModelWeights

_IGNORED = (".rotary_emb.inv_freq",)  # a table that old checkpoints carry; it follows from the configuration

Read = Callable[[str], Tensor]


def require_regular(path: Path) -> None:
    """Raise CheckpointError for a pipe, a device or a folder, which would be waited for, or read, without end."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: is no regular file")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this configuration holds, with its shape ([out, in] for matrices)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
        if config.qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embedding:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def assemble(
    config: ModelConfig,
    found: Mapping[str, tuple[int, ...]],
    read: Read,
    dtype: torch.dtype,
    device: torch.device,
) -> Model:
    """Build the model. found: shape of every tensor in the checkpoint; read: one tensor by name.

    Raises CheckpointError for a missing, an extra or a misshapen tensor, by name, with both shapes.
    """
    check_tensors(config, found)

    def get(name: str) -> Tensor:
        tensor = read(name)
        if not tensor.is_floating_point():
            raise CheckpointError(f"tensor {name} is of {tensor.dtype}, expected floating point")
        tensor = tensor.to(device, dtype)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"tensor {name} holds values that are not finite in {dtype}")
        return tensor

    embedding = get("model.embed_tokens.weight")
    layers = [_layer(config, get, f"model.layers.{index}.") for index in range(config.layers)]
    lm_head = embedding if config.tied_embedding else get("lm_head.weight")
    return Model(config, ModelWeights(embedding, layers, get("model.norm.weight"), lm_head))


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless `found` is exactly what `config` needs."""
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"tensor {name} is missing, expected with shape {list(shape)}")
        if tuple(found[name]) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    redundant = {"lm_head.weight"} if config.tied_embedding else set()  # some writers store the tied copy too
    for name in sorted(found.keys() - expected.keys() - redundant):
        if not name.endswith(_IGNORED):
            raise CheckpointError(f"tensor {name} of shape {list(found[name])} is not part of this architecture")


def _layer(config: ModelConfig, get: Read, prefix: str) -> LayerWeights:
    def fused(*names: str) -> Tensor:
        return torch.cat([get(prefix + name) for name in names])

    def optional(wanted: bool, *names: str) -> Tensor | None:
        return fused(*names) if wanted else None

    return LayerWeights(
        attention_norm=get(prefix + "input_layernorm.weight"),
        qkv=fused(*(f"self_attn.{name}_proj.weight" for name in "qkv")),
        output=get(prefix + "self_attn.o_proj.weight"),
        mlp_norm=get(prefix + "post_attention_layernorm.weight"),
        gate_up=fused("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=get(prefix + "mlp.down_proj.weight"),
        qkv_bias=optional(config.qkv_bias, *(f"self_attn.{name}_proj.bias" for name in "qkv")),
        q_norm=optional(config.qk_norm, "self_attn.q_norm.weight"),
        k_norm=optional(config.qk_norm, "self_attn.k_norm.weight"),
    )
