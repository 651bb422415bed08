"""The decoder against a plain one written separately: no pages, no tiles, float64."""

from __future__ import annotations

import hashlib

import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.weights import TINY, tiny_model
from tests.helpers import CPU, KERNELS, drain, prompt, real_engine


def plain_logits(model, token_ids):
    """All positions' logits, straight from the equations, in float64."""
    cfg, w = model.config, model.weights
    n, half = len(token_ids), cfg.head_dim // 2
    x = w.embedding.double()[torch.tensor(token_ids)]

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + cfg.rms_eps).sqrt() * weight.double()

    angle = torch.arange(n, dtype=torch.float64)[:, None] * cfg.rope_theta ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    rotation = torch.polar(torch.ones_like(angle), angle)[:, None]  # [n, 1, half], as complex numbers

    def rope(x):
        turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * rotation
        return torch.cat([turned.real, turned.imag], -1)

    causal = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
    for layer in w.layers:
        qkv = (norm(x, layer.attention_norm) @ layer.qkv.double().T).view(n, -1, cfg.head_dim)
        q, k, v = qkv.split([cfg.heads, cfg.kv_heads, cfg.kv_heads], 1)
        k, v = (t.repeat_interleave(cfg.heads // cfg.kv_heads, 1) for t in (rope(k), v))
        scores = torch.einsum("qhd,khd->hqk", rope(q), k) / cfg.head_dim**0.5 + causal
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        x = x + mixed @ layer.output.double().T
        gate, up = (norm(x, layer.mlp_norm) @ layer.gate_up.double().T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.double().T
    return norm(x, w.norm) @ w.lm_head.double().T


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_paged_decoder_equals_a_plain_one_at_every_position(kernels):
    model = tiny_model(0, torch.float32, CPU)
    engine = real_engine(slots=2, pool_blocks=40, block_size=3, kernels=kernels)
    engine.submit("a", prompt(1, 37), 40)
    engine.submit("b", prompt(2, 5), 9)
    drain(engine)
    text = prompt(1, 37) + engine.take("a").token_ids
    want = plain_logits(model, text[:-1])
    for (request_id, stop), logits in engine.runner.seen.items():
        if request_id == "a":
            # float32 against float64 through three layers at gain 2: observed 3e-5, logits reach 6
            torch.testing.assert_close(logits.double(), want[stop - 1], rtol=0, atol=5e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_bfloat16_follows_float32_loosely(kernels):
    """Not a promise, a check that the dtype path computes the same function."""
    tokens = prompt(3, 12)
    engines = {dtype: real_engine(1, 8, dtype=dtype, kernels=kernels) for dtype in (torch.float32, torch.bfloat16)}
    for engine in engines.values():
        engine.submit("r", tokens, 1)
        engine.step()
    wide, narrow = (engine.runner.seen["r", 12] for engine in engines.values())
    # bfloat16 keeps 8 bits: a few percent through three layers
    assert (wide - narrow).norm() < 0.2 * wide.norm()


def test_tiny_has_the_same_weights_on_every_machine():
    """The draw is integer arithmetic and one correctly rounded product per weight: equal bits, or a bug."""
    digest = hashlib.sha256()
    weights = tiny_model(0, torch.float32, CPU).weights
    for tensor in (weights.embedding, *(matrix for _, matrix in weights.matrices())):
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == "a96408e05e33d3faa1fffe8aa7299005a6ebfd91a5f0fb1ace29b9596e8a6ed9"


def test_seeds_give_different_weights():
    a, b = (tiny_model(seed, torch.float32, CPU).weights for seed in (0, 1))
    assert not torch.equal(a.lm_head, b.lm_head)


@pytest.mark.parametrize(
    ("change", "message"), [({"kv_heads": 3}, "heads .4. is not a multiple"), ({"head_dim": 15}, "head_dim is 15")]
)
def test_impossible_shapes_are_refused(change, message):
    shape = {name: getattr(TINY, name) for name in TINY.__slots__}
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**(shape | change))


def test_prompts_the_model_cannot_run_are_refused_by_name():
    engine = real_engine(1, 4096, block_size=16)
    with pytest.raises(ValueError, match="'r': token id 256 is outside the model's vocabulary of 256"):
        engine.submit("r", [1, 256], 1)
    with pytest.raises(ValueError, match="'r': 4096 prompt . 2 output tokens feed 4097 positions, the model has 4096"):
        engine.submit("r", [1] * 4096, 2)
    assert not engine.has_work
    engine.submit("r", [1] * 4096, 1)
