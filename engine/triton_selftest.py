"""Start-up trial of the Triton kernels: which tile shapes of products agree here, and that a row keeps its bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from engine import triton_linear
from engine.config import ModelConfig
from engine.errors import NumericsError
from engine.triton_attention import SPLIT, paged_attention, plan_tiles, tile_queries
from engine.triton_linear import BASE, SHAPES, Shape, linear
from engine.triton_rows import rms_norm

_CONTEXTS = (1, 65, SPLIT, SPLIT + 1, 2 * SPLIT + 3)  # keys: below and beyond a chunk, at and beyond a split


@torch.inference_mode()
def choose_shapes(matrices: Iterable[tuple[str, Tensor]]) -> tuple[Shape, ...]:
    """The tile shapes, by rows, that give every row the same bits in every product with these matrices.

    matrices: (name for messages, [out, in]), all of one type; each shape is tried once. The base shape is
    always among them. Raises NumericsError if the base shape itself gives a row other bits in other company.
    """
    kept: list[Shape] = []
    tried: set[torch.Size] = set()
    for name, weight in matrices:
        if weight.shape in tried:
            continue
        base, *_ = kept or [SHAPES[weight.dtype][BASE]]
        kept = kept or [base, *(shape for shape in SHAPES[weight.dtype] if shape != base)]
        tried.add(weight.shape)
        x = _values(weight, 2 * max(shape.rows for shape in kept) + 5, weight.shape[1])
        want = linear(x, weight, (base,))
        for shape in tuple(kept):
            wrong = _differs(x, weight, shape, want)
            if wrong and shape == base:
                raise _error(f"linear {name} {tuple(weight.shape)}, {wrong},", weight)
            if wrong:
                kept.remove(shape)
    return tuple(sorted(kept, key=lambda shape: (shape.rows, shape.out)))


def _differs(x: Tensor, weight: Tensor, shape: Shape, want: Tensor) -> str | None:
    """Where `shape` gives rows of `x` other bits than `want`: all at once, one alone, some, in another order."""
    count = x.shape[0]
    some = sorted({1, shape.rows, shape.rows + 1})
    parts: dict[str, Sequence[int]] = {f"rows 0 to {n - 1} of {count}": range(n) for n in some}
    parts |= {f"row {count - 1} alone": range(count - 1, count), "all rows, last first": range(count - 1, -1, -1)}
    if weight.shape[1] > triton_linear.SLICE:  # so many rows that slices are not programs of their own
        many = shape.rows * -(-triton_linear.BUSY // -(-weight.shape[0] // shape.out))
        parts[f"{many} rows"] = [row % count for row in range(many)]
    for what, rows in {"all rows": range(count), **parts}.items():
        index = torch.tensor(rows, device=x.device)
        if not torch.equal(linear(x[index], weight, (shape,)), want[index]):
            return what
    return None


@torch.inference_mode()
def check_attention(config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Try a query alone, in prefills, by splits, and in other blocks. Raises NumericsError if its bits change."""
    longest = _CONTEXTS[-1]
    width = -(-longest // block_size)
    tables = torch.arange(2 * width, dtype=torch.int32, device=device).view(2, width)
    tables = torch.stack((tables, tables.flip(0, 1)))  # two ways to lay out two rows
    like = torch.empty(0, dtype=dtype, device=device)
    pools = [_pool(config, table[1], block_size, longest, like) for table in tables]
    q = _values(like, longest, config.heads * config.head_dim).view(longest, config.heads, config.head_dim)
    queries = tile_queries(config.heads // config.kv_heads, dtype)

    def last(start: int, stop: int, layout: int = 0, *, split: bool = False) -> Tensor:
        """The output of the last of positions start..stop-1 of row 1."""
        tiles = plan_tiles(np.array([start]), np.array([stop]), queries)
        tiles[:, 0] = 1
        keys, values = pools[layout]
        where = torch.from_numpy(tiles).to(device)
        out = paged_attention(
            q[start:stop],
            keys,
            values,
            tables[layout],
            where,
            block_size,
            window=config.sliding_window,
            split=split,
        )
        return out[-1]

    for stop in _CONTEXTS:
        want = last(stop - 1, stop)
        trials = {
            "decoded by splits": last(stop - 1, stop, split=True),
            "in other blocks": last(stop - 1, stop, 1),
            "in a chunk of a prefill": last(max(0, stop - 3), stop),
            "in a prefill of several tiles": last(max(0, stop - 2 * queries - 1), stop),
        }
        for what, got in trials.items():
            if not torch.equal(got, want):
                raise _error(f"attention over {stop} keys in blocks of {block_size}, {what},", like)


def _pool(config: ModelConfig, table: Tensor, block_size: int, positions: int, like: Tensor) -> list[Tensor]:
    """Keys and values of one row; every cell that is not the row's holds NaN."""
    at = torch.arange(positions, device=like.device)
    cells = table.long()[at // block_size] * block_size + at % block_size
    pool = []
    for _ in "kv":
        store = like.new_full((config.kv_heads, 2 * table.shape[0] * block_size, config.head_dim), torch.nan)
        own = _values(like, config.kv_heads * positions, config.head_dim)
        store[:, cells] = own.view(config.kv_heads, positions, config.head_dim)
        pool.append(store)
    return pool


@torch.inference_mode()
def check_rms_norm(weight: Tensor, eps: float) -> None:
    """Try a row alone and among others. Raises NumericsError if its bits change."""
    x = _values(weight, 70, weight.shape[0])
    whole = rms_norm(x, weight, eps)
    for row in (0, 1, 69):
        if not torch.equal(rms_norm(x[row : row + 1].clone(), weight, eps)[0], whole[row]):
            raise _error(f"rms_norm of width {weight.shape[0]}", weight)


def _values(like: Tensor, rows: int, columns: int) -> Tensor:
    """Ordinary activations, the same at every start."""
    values = np.random.default_rng(rows).standard_normal((rows, columns), dtype=np.float32)
    return torch.from_numpy(values).to(like.device, like.dtype)


def _error(what: str, like: Tensor) -> NumericsError:
    return NumericsError(
        f"numerics self-test: {what} gives a row other bits than alone ({like.dtype} on {like.device}, torch "
        f"{torch.__version__}, triton {triton.__version__}), so texts could not be proved identical on this device; "
        f"kernels = 'torch' or device = 'cpu' may do"
    )
