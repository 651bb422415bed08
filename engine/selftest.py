"""Start-up check that this machine keeps the promise: a row's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.attention import KEY_CHUNK, Tiling, paged_attention, plan_walk
from engine.batch import Decoder, lay_out
from engine.errors import NumericsError
from engine.kv_store import KVStore
from engine.model import Model
from engine.numerics import Tiles, linear, padded_rows, rms_norm, silu

# Tried in this order; the first that keeps every row's bits is used. Sizes beyond 32 are for processors
# and thread counts whose matrix kernels cut smaller tiles into unequal strips.
ROW_TILES = (32, 48, 64, 72, 96, 144, 192, 288, 384)
QUERY_TILES = (8, 12, 16, 24, 48)


@torch.inference_mode()
def choose_tiles(model: Model) -> Tiles:
    """Tiles in which every operation, in the shapes that `model` uses, keeps a row's bits on this machine.

    Raises NumericsError naming the first operation and shape for which no tile does.
    """
    _check_elementwise(model)
    rows = _first_that_holds(ROW_TILES, lambda tile: _check_linears(model, tile))
    queries = _first_that_holds(QUERY_TILES, lambda tile: _check_attention(model, tile))
    return Tiles(rows, queries)


def _first_that_holds(candidates: tuple[int, ...], check: Callable[[int], None]) -> int:
    first_error = None
    for candidate in candidates:
        try:
            check(candidate)
            return candidate
        except NumericsError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _check_linears(model: Model, tile: int) -> None:
    """A row alone among zeros, among other rows, and at every place of every tile of a longer call."""
    seen: set[torch.Size] = set()
    for name, weight in model.weights.matrices():
        if weight.shape in seen:
            continue
        seen.add(weight.shape)
        what = f"linear {name} {tuple(weight.shape)} in tiles of {tile} rows"
        rows = _values(model, tile, weight.shape[1])
        alone = torch.zeros_like(rows)
        alone[0] = rows[0]
        want = linear(alone, weight, tile)[0]
        _require(model, f"{what}, among other rows", linear(rows, weight, tile)[0], want)
        repeated = rows[:1].repeat(3 * tile, 1)
        _require(model, f"{what}, repeated in three tiles", linear(repeated, weight, tile), want)


def _check_elementwise(model: Model) -> None:
    cfg = model.config
    norm_row, mlp_row = _values(model, 1, cfg.hidden_size), _values(model, 1, cfg.intermediate_size)
    norm_weight = model.weights.norm
    want_norm = rms_norm(norm_row.repeat(8, 1), norm_weight, cfg.rms_eps)[0]
    want_silu = silu(mlp_row.repeat(8, 1))[0]
    for rows in (32, 96, 1056):
        got = rms_norm(norm_row.repeat(rows, 1), norm_weight, cfg.rms_eps)
        _require(model, f"rms_norm of {rows} rows", got, want_norm)
        _require(model, f"silu of {rows} rows", silu(mlp_row.repeat(rows, 1)), want_silu)
    if cfg.qk_norm:
        weight, head = model.weights.norm[: cfg.head_dim], norm_row[:, : cfg.head_dim]
        want_head = rms_norm(head.repeat(8, 1), weight, cfg.rms_eps)[0]
        for rows in (32, 1056):
            got = rms_norm(head.repeat(rows, 1), weight, cfg.rms_eps)
            _require(model, f"rms_norm of {rows} heads", got, want_head)


def _check_attention(model: Model, tile: int) -> None:
    """One query and its keys: alone, at every place of a prefill's tile, and among other requests."""
    cfg = model.config
    tiling = Tiling(tile, cfg.heads // cfg.kv_heads)
    query = _values(model, 1, cfg.heads * cfg.head_dim).view(1, cfg.heads, cfg.head_dim)
    for keys in (KEY_CHUNK // 2, KEY_CHUNK, 2 * KEY_CHUNK + 3):
        store = KVStore(cfg, 1, keys, model.dtype, model.device)
        store.keys.copy_(_values(model, store.keys.numel(), 1).view_as(store.keys))
        store.values.copy_(_values(model, store.values.numel(), 1).view_as(store.values))
        what = f"attention over {keys} keys in tiles of {tile} queries"

        def last_query(rows: list[tuple[int, int]], store: KVStore = store, keys: int = keys) -> Tensor:
            """The output of the last position of the last row; all rows read the same block."""
            starts, stops = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
            positions = int((stops - starts).sum())
            padded = padded_rows(positions, tile)
            tables = np.zeros((len(rows), 1), dtype=np.int64)
            walk = plan_walk(tables, starts, stops, keys, tiling, padded, model.device)
            return paged_attention(query.expand(padded, -1, -1), store, 0, walk)[positions - 1]

        want = last_query([(keys - 1, keys)])
        for start in range(max(0, keys - tile), keys):
            _require(model, f"{what}, prefill against decode", last_query([(start, keys)]), want)
        _require(model, f"{what}, prefill against decode", last_query([(0, keys)]), want)
        for others in (1, 2, 7, 31, 100):
            company = [(n % keys, n % keys + 1) for n in range(others)] + [(keys - 1, keys)]
            _require(model, f"{what}, among {others} others", last_query(company), want)


@torch.inference_mode()
def check_decoder(decoder: Decoder) -> None:
    """Texts through whole forwards: decoded alone, prefilled, resumed, in company, at another place of the pool.

    Each crosses a chunk of keys, of 32 or of 64, and a request of its company is longer than a chunk more.
    Raises NumericsError naming the first way of computing it that gives other bits.
    """
    for chunk in (32, 64):
        _check_text(decoder, chunk + 8, 2 * chunk + 8)


def _check_text(decoder: Decoder, length: int, longest: int) -> None:
    cfg, block_size = decoder.config, 4
    longest = min(longest, cfg.max_positions)
    length = min(length, longest)
    decodes_from, width = max(1, length - 7), -(-longest // block_size)
    text = [n * 7919 % cfg.vocab_size for n in range(longest)]

    def last_logits(*rows: tuple[int, int, int], store: KVStore) -> Tensor:
        """Of the last row. rows: (first block, start, stop), each computing that part of the text."""
        token_ids = [token for _, start, stop in rows for token in text[start:stop]]
        _, starts, stops = zip(*rows, strict=True)
        blocks = -(-max(stops) // block_size)
        tables = np.array([range(block, block + blocks) for block, _, _ in rows], dtype=np.int32)
        batch = lay_out(token_ids, starts, stops, tables, block_size, slots=len(rows))
        return decoder.forward(batch, store)[-1].clone()

    def store() -> KVStore:
        return KVStore(cfg, 66 + 3 * width, block_size, decoder.dtype, decoder.device)

    decoded = store()
    last_logits((0, 0, decodes_from), store=decoded)
    for at in range(decodes_from, length):
        want = last_logits((0, at, at + 1), store=decoded)
    if not torch.isfinite(want).all():  # not equal to itself either
        raise NumericsError(
            f"numerics self-test: the model's logits are not finite in {decoder.dtype}: its weights are too large"
        )
    resumed = store()
    last_logits((6, 0, length // 2), store=resumed)
    company = [(66, 0, longest), *((2 * n, 0, 1 + n % min(7, length)) for n in range(1, 32))]
    among = {  # about 115, 150 and 220 positions: kernels that are chosen by their number all have their turn
        f"among {n} others": last_logits(*company[:n], (66 + width, 0, length), store=store()) for n in (4, 15, 32)
    }
    ways = {
        "one prefill": last_logits((0, 0, length), store=store()),
        "a resumed prefill": last_logits((6, length // 2, length), store=resumed),
    } | among
    for way, got in ways.items():
        if not torch.equal(got, want):
            raise NumericsError(
                f"numerics self-test: {way} gives other bits than decoding alone ({decoder.numerics}, {decoder.dtype} "
                f"on {decoder.device}), so texts could not be proved identical here; another choice of engine.kernels "
                f"or engine.threads may do"
            )


def _values(model: Model, rows: int, columns: int) -> Tensor:
    """Ordinary activations, the same at every start."""
    values = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    return torch.from_numpy(values).to(model.device, model.dtype)


def _require(model: Model, what: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want.expand_as(got)):
        raise NumericsError(
            f"numerics self-test: {what} gives a row other bits in other company ({model.dtype} on "
            f"{model.device}, torch {torch.__version__}, {torch.get_num_threads()} threads), so texts could not be "
            f"proved identical on this machine; another thread count (engine.threads), or MKL_CBWR=AVX2,STRICT in "
            f"the environment, may help"
        )
