"""Writes the one set of weights in every form that a peer reads. Runs in the environment of transformers.

    python weights.py GGUF FOLDER [PROMPTS]

From a quantised GGUF file, dequantised once to float32: FOLDER/hf-DTYPE (config.json, model.safetensors, tokenizer)
and FOLDER/DTYPE.gguf for DTYPE float32 and bfloat16. All bfloat16 forms hold the float32 values rounded to nearest.
PROMPTS is a TOML file with an array `prompts` of texts, written as token ids to FOLDER/natural.json.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

DTYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}


def write_folder(source: Path, dtype: str, folder: Path) -> None:
    """A Hugging Face folder. The model is built anew, since one read from GGUF refuses to be saved."""
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def write_gguf(source: Path, dtype: str, target: Path) -> None:
    """A GGUF file with the same keys; matrices in `dtype`, vectors in float32, as llama.cpp's own converter does."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    written = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type"}
    for name, field in reader.fields.items():
        if name in written:
            continue
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if dtype == "float32" else gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        if dtype == "float32":
            writer.add_tensor(tensor.name, values)
        elif len(shape) == 1:
            rounded = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32)
            writer.add_tensor(tensor.name, rounded.numpy())
        else:
            writer.add_tensor(tensor.name, quantize(values, DTYPES[dtype]), raw_dtype=DTYPES[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for dtype in DTYPES:
        write_folder(source, dtype, folder / f"hf-{dtype}")
        write_gguf(source, dtype, folder / f"{dtype}.gguf")
    if len(sys.argv) > 3:
        prompts = tomllib.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))["prompts"]
        tokenizer = AutoTokenizer.from_pretrained(folder / "hf-float32")
        (folder / "natural.json").write_text(json.dumps([tokenizer.encode(text) for text in prompts]))


if __name__ == "__main__":
    main()
