"""Reads a Hugging Face folder: config.json and *.safetensors, with or without an index. No pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint import assemble, require_regular
from engine.config import ModelConfig, RopeScaling
from engine.errors import CheckpointError, ConfigError
from engine.model import Model

_INDEX = "model.safetensors.index.json"
_FAMILIES = {  # architecture -> what it adds to a Llama decoder
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
}


def load_folder(folder: Path, dtype: torch.dtype, device: torch.device) -> Model:
    """Load a checkpoint folder. Raises CheckpointError naming the file, key or tensor at fault."""
    config = read_config(_json(folder / "config.json"))
    files = weight_files(folder)
    handles: dict[Path, Any] = {}  # safetensors brings no types
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in files:
            require_regular(file)
            handle = handles[file] = cast(Any, safe_open(file, framework="pt"))
            for name in handle.keys():  # noqa: SIM118  # not a dict
                if name in where:
                    raise CheckpointError(f"tensor {name} is in both {where[name].name} and {file.name}")
                where[name] = file
                shapes[name] = tuple(handle.get_slice(name).get_shape())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or truncated: {error}") from None

    def read(name: str) -> Tensor:
        tensor: Tensor = handles[where[name]].get_tensor(name)
        return tensor

    return assemble(config, shapes, read, dtype, device)


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """A config.json as a ModelConfig. Raises CheckpointError for an architecture, option or value that is not known."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else "none"
    if not isinstance(name, str) or name not in _FAMILIES:
        raise CheckpointError(f"config.json: architecture {name!r} is not supported; known: {', '.join(_FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported; known: silu")
    for option in ("attention_bias", "mlp_bias"):
        if raw.get(option):
            raise CheckpointError(f"config.json: {option} is not supported")
    if raw.get("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(f"config.json: partial_rotary_factor {raw['partial_rotary_factor']!r} is not supported")
    rope = _table(raw, "rope_parameters")  # transformers 5 moved theta and scaling in here
    try:
        heads, hidden_size = _whole(raw, "num_attention_heads"), _whole(raw, "hidden_size")
        return ModelConfig(
            vocab_size=_whole(raw, "vocab_size"),
            hidden_size=hidden_size,
            layers=_whole(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=_whole(raw, "num_key_value_heads", heads),
            head_dim=_whole(raw, "head_dim", hidden_size // max(heads, 1)),
            intermediate_size=_whole(raw, "intermediate_size"),
            max_positions=_whole(raw, "max_position_embeddings"),
            rope_theta=_number(raw, "rope_theta", _number(rope, "rope_theta", 10_000.0)),
            rms_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope_scaling=_rope_scaling(_table(raw, "rope_scaling") or rope),
            sliding_window=_sliding_window(raw, name),
            tied_embedding=raw.get("tie_word_embeddings") is True,
            **_FAMILIES[name],
        )
    except ConfigError as error:
        raise CheckpointError(f"config.json: {error}") from None


def _value(raw: dict[str, Any], name: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
    """A key of those types; null is as good as left out. Raises CheckpointError."""
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise CheckpointError(f"config.json: {name} is missing")
    if type(value) not in kinds:  # not isinstance: true is no number
        raise CheckpointError(f"config.json: {name} is {str(value)[:40]!r}, not {what}")
    return value


def _whole(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    return cast(int, _value(raw, name, default, (int,), "a whole number"))


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    return float(_value(raw, name, default, (int, float), "a number"))


def _table(raw: dict[str, Any], name: str) -> dict[str, Any]:
    return cast(dict[str, Any], _value(raw, name, {}, (dict,), "a table"))


def _rope_scaling(raw: dict[str, Any]) -> RopeScaling | None:
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return None
    known = {"factor": _number(raw, "factor")}
    if kind == "llama3":
        known["low_freq_factor"] = _number(raw, "low_freq_factor")
        known["high_freq_factor"] = _number(raw, "high_freq_factor")
        known["original_positions"] = _whole(raw, "original_max_position_embeddings")
    return RopeScaling(kind, **known)  # type: ignore[arg-type]  # whole numbers are numbers


def _sliding_window(raw: dict[str, Any], family: str) -> int | None:
    """Mistral's window. Qwen's applies only where use_sliding_window says so, to some layers: refused then."""
    if family.startswith("Qwen"):
        if raw.get("use_sliding_window"):
            raise CheckpointError("config.json: use_sliding_window is not supported")
        return None
    return None if raw.get("sliding_window") is None else _whole(raw, "sliding_window")


def weight_files(folder: Path) -> list[Path]:
    """Those that its index names, or all there are, by name. Raises CheckpointError."""
    if (folder / _INDEX).is_file():
        weight_map = _json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / _INDEX}: weight_map is missing")
        names = sorted({str(name) for name in weight_map.values()})
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(f"{folder / _INDEX}: {outside[0]!r} is not a file of this folder")
        files = [folder / name for name in names]
        if missing := [file for file in files if not file.is_file()]:
            raise CheckpointError(f"{missing[0]}: named in the index, but not there")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle, which is not read" if pickles else ""
        raise CheckpointError(f"{folder}: no *.safetensors file{hint}")
    return files


def _json(path: Path) -> dict[str, Any]:
    require_regular(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return document
