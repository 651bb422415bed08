"""Start-up check that this machine keeps the promise: a row's bits do not depend on its company."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.attention import KEY_CHUNK, QUERY_TILE, paged_attention, plan_walk
from engine.errors import NumericsError
from engine.kv_store import KVStore
from engine.model import Model
from engine.numerics import ROW_TILE, linear, padded_rows, rms_norm, silu


@torch.inference_mode()
def self_test(model: Model) -> None:
    """Try every operation in the shapes that `model` uses. Raises NumericsError naming the first that breaks."""
    _check_linears(model)
    _check_elementwise(model)
    for keys in (KEY_CHUNK // 2, KEY_CHUNK, 2 * KEY_CHUNK + 3):
        _check_attention(model, keys)


def _check_linears(model: Model) -> None:
    """A row alone among zeros, among other rows, and at every place of every tile of a longer call."""
    seen: set[torch.Size] = set()
    for name, weight in model.weights.matrices():
        if weight.shape in seen:
            continue
        seen.add(weight.shape)
        what = f"linear {name} {tuple(weight.shape)}"
        rows = _values(model, ROW_TILE, weight.shape[1])
        alone = torch.zeros_like(rows)
        alone[0] = rows[0]
        want = linear(alone, weight)[0]
        _require(model, f"{what}, among other rows", linear(rows, weight)[0], want)
        _require(model, f"{what}, repeated in three tiles", linear(rows[:1].repeat(3 * ROW_TILE, 1), weight), want)


def _check_elementwise(model: Model) -> None:
    cfg = model.config
    norm_row, mlp_row = _values(model, 1, cfg.hidden_size), _values(model, 1, cfg.intermediate_size)
    norm_weight = model.weights.norm
    want_norm = rms_norm(norm_row.repeat(ROW_TILE, 1), norm_weight, cfg.rms_eps)[0]
    want_silu = silu(mlp_row.repeat(ROW_TILE, 1))[0]
    for rows in (ROW_TILE, 3 * ROW_TILE, 33 * ROW_TILE):
        _require(
            model, f"rms_norm of {rows} rows", rms_norm(norm_row.repeat(rows, 1), norm_weight, cfg.rms_eps), want_norm
        )
        _require(model, f"silu of {rows} rows", silu(mlp_row.repeat(rows, 1)), want_silu)


def _check_attention(model: Model, keys: int) -> None:
    """The last query of `keys` positions: alone, in a tile, and among other requests of other lengths."""
    cfg = model.config
    store = KVStore(cfg, 1, keys, model.dtype, model.device)
    store.keys.copy_(_values(model, store.keys.numel(), 1).view_as(store.keys))
    store.values.copy_(_values(model, store.values.numel(), 1).view_as(store.values))
    query = _values(model, 1, cfg.heads * cfg.head_dim).view(1, cfg.heads, cfg.head_dim)

    def last_query(rows: list[tuple[int, int]]) -> Tensor:
        starts, stops = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
        positions = int((stops - starts).sum())
        padded = padded_rows(positions)
        tables = np.zeros((len(rows), 1), dtype=np.int64)  # all read the same block
        walk = plan_walk(tables, starts, stops, keys, cfg.heads // cfg.kv_heads, padded, model.device)
        return paged_attention(query.expand(padded, -1, -1), store, 0, walk)[positions - 1]

    want = last_query([(keys - 1, keys)])
    prefill = last_query([(0, keys)])
    _require(model, f"attention over {keys} keys, prefill against decode", prefill, want)
    for others in (1, 2, QUERY_TILE - 1, 31, 100):
        company = [(n % keys, n % keys + 1) for n in range(others)] + [(keys - 1, keys)]
        _require(model, f"attention over {keys} keys among {others} others", last_query(company), want)


def _values(model: Model, rows: int, columns: int) -> Tensor:
    """Ordinary activations, the same at every start."""
    values = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    return torch.from_numpy(values).to(model.device, model.dtype)


def _require(model: Model, what: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want.expand_as(got)):
        raise NumericsError(
            f"numerics self-test: {what} gives a row other bits in other company ({model.dtype} on "
            f"{model.device}, torch {torch.__version__}, {torch.get_num_threads()} threads); "
            f"texts could not be proved identical on this machine"
        )
