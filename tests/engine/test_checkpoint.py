"""Real checkpoints: parity with Hugging Face transformers, and every way a folder can be wrong."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.config import SchedulerConfig
from engine.core import Engine
from engine.decoders import choose_decoder
from engine.errors import CheckpointError
from engine.gguf_file import load_gguf
from engine.hf_folder import load_folder
from tests.engine.claims import assert_keeps_its_bits
from tests.helpers import CPU, DTYPES, KERNELS, LogitsRunner, drain, prompt

COMMON = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # the usual 0.02 gives logits so flat that any text would do
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-mha-tied": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-wide-heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 24}),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_scaling": LLAMA3}),
    "llama-linear-rope": (LlamaForCausalLM, LlamaConfig, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 9}),
    "mistral-no-window": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """(transformers' model, its folder)."""
    build, config, options = FAMILIES[request.param]
    torch.manual_seed(0)
    reference = build(config(**(COMMON | options), attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith((".bias", "norm.weight")):  # zeros and ones would hide a missing one
                parameter.add_(0.3 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, folder


def load(path, dtype=torch.float32, kernels="auto"):
    """A folder or a GGUF file, its promise checked."""
    model = (load_gguf if path.suffix == ".gguf" else load_folder)(path, dtype, CPU)
    return choose_decoder(model, kernels=kernels, threads=torch.get_num_threads())


def run(model, prompts, output, slots=4, pool_blocks=200, block_size=4):
    config = SchedulerConfig(slots, pool_blocks, block_size)
    engine = Engine(config, LogitsRunner(model, config), with_audit=True)
    for number, tokens in enumerate(prompts):
        engine.submit(f"r{number}", tokens, output)
    drain(engine)
    return engine


def assert_agrees(reference, model, tokens, block_size=4):
    """Prefill and 64 greedy tokens: the same text as transformers', every logit within the bound."""
    engine = run(model, [tokens], 64, block_size=block_size)
    text = engine.take("r0").token_ids
    with torch.no_grad():
        want = reference(torch.tensor([tokens + text[:-1]])).logits[0]
    assert want[len(tokens) - 1 :].argmax(-1).tolist() == text
    for (_, stop), logits in engine.runner.seen.items():
        # two float32 implementations that sum in different orders
        torch.testing.assert_close(logits, want[stop - 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_prefill_and_64_greedy_tokens_agree_with_transformers(checkpoint, kernels):
    reference, folder = checkpoint
    assert_agrees(reference, load(folder, kernels=kernels), prompt(0, 70))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_company_or_eviction(checkpoint, dtype, kernels):
    _, folder = checkpoint
    # 200 tokens of text; torch takes ten times as long and is resumed at fewer
    long_output = 160 if kernels == "native" else 24
    prompts = [prompt(n, 40 if n == 0 else 3 + 11 * n % 50) for n in range(7)]
    assert_keeps_its_bits(load(folder, dtype, kernels), prompts, 16, long_output)


def test_a_sharded_checkpoint_is_the_same_model(tmp_path):
    torch.manual_seed(0)
    reference = LlamaForCausalLM(LlamaConfig(**COMMON))
    reference.save_pretrained(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (load_folder(tmp_path / name, torch.float32, CPU).weights for name in ("one", "many"))
    for (name, a), (_, b) in zip(one.matrices(), many.matrices(), strict=True):
        assert torch.equal(a, b), name


# ---- what can be wrong -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**COMMON)).save_pretrained(tmp_path)
    return tmp_path


def rewrite_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "DROP"}))


def rewrite_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_folder(folder, torch.float32, CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported; known: Llama"),
        ({"architectures": "DROP"}, "architecture 'none' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_size": "DROP"}, "hidden_size is missing"),
        ({"architectures": "LlamaForCausalLM"}, "architecture 'none' is not supported"),
        ({"architectures": [["x"]]}, r"architecture \['x'\] is not supported"),
        ({"architectures": {"a": 1}}, "architecture 'none' is not supported"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not a whole number"),
        ({"hidden_size": 48.5}, "hidden_size is '48.5', not a whole number"),
        ({"hidden_size": float("inf")}, "hidden_size is 'inf', not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is 'True', not a whole number"),
        ({"num_hidden_layers": 10**9}, "layers is 1000000000, must be at most 10000"),
        ({"num_attention_heads": 0}, "heads is 0, must be at least 1"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"max_position_embeddings": 0}, "max_positions is 0, must be at least 1"),
        ({"rms_norm_eps": float("nan")}, "rms_eps is nan, must be a number above 0"),
        ({"rope_scaling": [4]}, r"rope_scaling is '\[4\]', not a table"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor is '4', not a number"),
        ({"num_key_value_heads": 3}, "heads .4. is not a multiple of kv_heads .3."),
        ({"num_hidden_layers": 0}, "layers is 0, must be at least 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"intermediate_size": 96}, r"mlp.gate_proj.weight has shape \[80, 48\], expected \[96, 48\]"),
        ({"num_hidden_layers": 3}, r"model.layers.2.input_layernorm.weight is missing, expected with shape \[48\]"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.* is not part of this architecture"),
    ],
)
def test_a_wrong_configuration_is_named(folder, change, message):
    rewrite_config(folder, **change)
    refused(folder, message)


def test_a_missing_and_an_extra_tensor_are_named(folder):
    rewrite_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, r"tensor model.layers.1.mlp.up_proj.weight is missing, expected with shape \[80, 48\]")
    rewrite_tensors(folder, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(80, 48)}))
    rewrite_tensors(folder, lambda t: t.update({"lora.A": torch.zeros(3, 3)}))
    refused(folder, r"tensor lora.A of shape \[3, 3\] is not part of this architecture")


def test_weights_that_are_no_numbers_are_refused(folder):
    rewrite_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}))
    refused(folder, "tensor model.norm.weight is of torch.int32, expected floating point")
    rewrite_tensors(folder, lambda t: t.update({"model.norm.weight": torch.full((48,), torch.nan)}))
    refused(folder, "tensor model.norm.weight holds values that are not finite in torch.float32")


def test_truncated_missing_and_pickled_files(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(folder, "model.safetensors: damaged or truncated")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"no \*.safetensors file; pytorch_model.bin is a pickle, which is not read")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json: not valid JSON")
    (folder / "config.json").write_text("[" * 100_000)
    refused(folder, "config.json: not valid JSON: maximum recursion depth")
    (folder / "config.json").unlink()
    refused(folder, "config.json: No such file or directory")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, "'../elsewhere.safetensors' is not a file of this folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors: named in the index, but not there"),
        ({}, "weight_map is missing"),
    ],
)
def test_a_bad_index(folder, index, message):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, message)
