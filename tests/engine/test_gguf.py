"""GGUF files: the same weights as the Hugging Face folder, quantised ones dequantised, and real SmolLM2."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from batchbench.prompts import load_prompts
from engine.errors import CheckpointError
from engine.gguf_file import _gguf_name, load_gguf, open_gguf
from engine.gguf_tokenizer import gguf_tokenizer
from engine.hf_folder import load_folder
from engine.tokenizer import Tokenizer
from tests.engine.claims import assert_keeps_its_bits
from tests.engine.test_checkpoint import COMMON, FAMILIES, assert_agrees, load
from tests.helpers import CPU, assert_same_weights

WRITTEN = {"llama": "llama", "llama-mha-tied": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def pairs(matrix, heads):
    """The order in which GGUF keeps a Llama q or k matrix."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(path, reference, architecture, kind=gguf.GGMLQuantizationType.F32, leave_out=(), more=None):
    cfg = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_rope_freq_base((cfg.rope_parameters or {}).get("rope_theta", 10000.0))
    if getattr(cfg, "head_dim", None):
        writer.add_key_length(cfg.head_dim)
    if architecture == "llama" and getattr(cfg, "sliding_window", None):
        writer.add_sliding_window(cfg.sliding_window)
    if more is not None:
        more(writer)
    for name, parameter in reference.named_parameters():
        values = parameter.detach().numpy()
        if architecture == "llama" and name.endswith("q_proj.weight"):
            values = pairs(values, cfg.num_attention_heads)
        if architecture == "llama" and name.endswith("k_proj.weight"):
            values = pairs(values, cfg.num_key_value_heads)
        short = _gguf_name(name)
        if short in leave_out:
            continue
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(short, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(short, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build(family):
    model, config, options = FAMILIES[family]
    torch.manual_seed(0)
    return model(config(**(COMMON | options)))


@pytest.mark.parametrize("family", WRITTEN)
def test_a_gguf_file_is_the_same_model_as_its_folder(family, tmp_path):
    reference = build(family)
    reference.save_pretrained(tmp_path / "folder")
    a = load_folder(tmp_path / "folder", torch.float32, CPU)
    b = load_gguf(write(tmp_path / "x.gguf", reference, WRITTEN[family]), torch.float32, CPU)
    assert_same_weights(a, b)


def test_quantised_tensors_are_dequantised(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    torch.manual_seed(0)
    reference = LlamaForCausalLM(LlamaConfig(**(COMMON | {"hidden_size": 64, "intermediate_size": 96})))
    model = load_gguf(write(tmp_path / "x.gguf", reference, "llama", kind), torch.float32, CPU)
    down = reference.model.layers[1].mlp.down_proj.weight.detach().numpy()
    assert torch.equal(model.weights.layers[1].down, torch.from_numpy(dequantize(quantize(down, kind), kind)))


def test_what_is_wrong_with_a_file_is_named(tmp_path):
    reference = build("llama")
    path = write(tmp_path / "x.gguf", reference, "llama")
    with pytest.raises(CheckpointError, match=r"architecture 'gpt2' is not supported; known: llama, qwen2, qwen3"):
        load_gguf(write(tmp_path / "y.gguf", reference, "gpt2"), torch.float32, CPU)
    lacking = write(tmp_path / "z.gguf", reference, "llama", leave_out={"blk.1.ffn_up.weight"})
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight is missing.*\[80, 48\]"):
        load_gguf(lacking, torch.float32, CPU)
    with pytest.raises(CheckpointError, match="No such file"):
        load_gguf(tmp_path / "nope.gguf", torch.float32, CPU)
    data = path.read_bytes()
    for cut in (3, 100, len(data) // 2, len(data) - 100):
        (tmp_path / "cut.gguf").write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match="damaged or truncated"):
            load_gguf(tmp_path / "cut.gguf", torch.float32, CPU)
    (tmp_path / "junk.gguf").write_bytes(b"GGUF" + bytes(range(256)) * 10)
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        load_gguf(tmp_path / "junk.gguf", torch.float32, CPU)


# ---- real weights ----------------------------------------------------------------------------


def natural(path, count):
    """Token ids of the first shipped prompts: greedy text after random ids falls into loops."""
    tokenizer = Tokenizer(gguf_tokenizer(open_gguf(path)))
    return [tokenizer.encode(text) for text in load_prompts("natural")[:count]]


@pytest.mark.smollm2
def test_smollm2_agrees_with_transformers(smollm2):
    """Prefill of a natural prompt and 64 greedy tokens, float32."""
    reference = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    torch.set_num_threads(2)
    assert_agrees(reference, load(smollm2), natural(smollm2, 4)[3], block_size=16)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_smollm2_keeps_its_bits(smollm2, dtype):
    prompts = [text[: 40 if n == 0 else 5 + 9 * n] for n, text in enumerate(natural(smollm2, 7))]
    torch.set_num_threads(2)
    assert_keeps_its_bits(load(smollm2, dtype), prompts, 10, 200 - len(prompts[0]))
