"""Converts a GGUF file to a Hugging Face folder, once: `python -m engine.gguf_to_folder GGUF FOLDER`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint import check_tensors, tensor_shapes
from engine.errors import CheckpointError
from engine.gguf_file import GgufFile, open_gguf
from engine.gguf_tokenizer import gguf_tokenizer
from engine.hf_folder import read_config

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def convert(gguf: Path, folder: Path) -> torch.dtype:
    """Write config.json, model.safetensors and tokenizer.json into a new folder, complete or not at all.

    Returns the type that the tensors were written in: the narrowest that holds what they dequantise to, bit for
    bit. Holds all tensors in memory. Raises CheckpointError, and writes nothing, where the folder is there already
    or would not say what the file says.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there already; move it away, or name another folder")
    file = open_gguf(gguf)
    check_tensors(file.config, file.shapes)
    tokenizer, config = gguf_tokenizer(file), _config_json(file)
    tensors = {name: file.read(name) for name in tensor_shapes(file.config)}
    dtype = narrowest_dtype(tensors.values())
    config["dtype"] = str(dtype).removeprefix("torch.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
            unfinished = Path(beside) / folder.name
            unfinished.mkdir()
            written, weights = unfinished / "config.json", unfinished / "model.safetensors"
            written.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            tokenizer.save(str(unfinished / "tokenizer.json"))
            whole = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
            save_file(whole, weights, metadata={"format": "pt"})
            weights.chmod(written.stat().st_mode)  # safetensors makes it readable to its owner alone
            unfinished.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return dtype


def narrowest_dtype(tensors: Collection[Tensor]) -> torch.dtype:
    """bfloat16 or float16 if every element of these float32 tensors is exactly representable in it, else float32."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(tensor.to(dtype).float(), tensor) for tensor in tensors):
            return dtype
    return torch.float32


def _config_json(file: GgufFile) -> dict[str, Any]:
    """The file's configuration in Hugging Face's words. Raises CheckpointError if they could not say all of it."""
    config = file.config
    windowed = file.architecture == "llama" and config.sliding_window is not None
    document: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if windowed else _ARCHITECTURES[file.architecture]],
        "model_type": "mistral" if windowed else file.architecture,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tied_embedding,
    }
    if windowed:
        document["sliding_window"] = config.sliding_window
    if config.rope_scaling is not None:
        document["rope_scaling"] = {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
    for role in ("bos", "eos"):
        token = file.field(f"tokenizer.ggml.{role}_token_id")
        if token is not None:
            document[f"{role}_token_id"] = int(token)
    read = read_config(document)
    for name in (field.name for field in fields(config)):
        if getattr(read, name) != getattr(config, name):
            raise CheckpointError(
                f"{file.path}: {name} is {getattr(config, name)}, which config.json of a "
                f"{document['model_type']} model cannot say"
            )
    return document


def main() -> None:
    """The command: what was written on standard output, an error as one line and exit code 1."""
    parser = argparse.ArgumentParser(description="Convert a GGUF file to a Hugging Face folder.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        dtype = convert(arguments.gguf, arguments.folder)
    except CheckpointError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{arguments.folder}: tensors in {dtype}, as the file dequantises, bit for bit; config.json; tokenizer.json")


if __name__ == "__main__":
    main()
