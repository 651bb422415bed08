"""The decoder on the processor: packed weights and one C call per forward (engine/cpu).

Every sum runs in one fixed order, so a row's bits depend neither on its company nor on the thread count.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import ModelConfig
from engine.cpu_kernels import load_kernels
from engine.errors import KernelsUnavailable, NumericsError
from engine.kv_store import KVStore
from engine.model import LayerWeights, ModelWeights, rope_tables

# As in attention.h and matmul.h.
_MAX_GROUP, _MAX_HEAD_DIM, _PANEL, _K_MULTIPLE = 48, 256, 16, 32
_ALIGNMENT = 64

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64


class _LayerPointers(ctypes.Structure):
    _vectors_ = ("attention_norm", "mlp_norm", "qkv_bias", "q_norm", "k_norm")
    _matrices_ = ("qkv", "output", "gate_up", "down")
    _fields_ = [(name, _PTR) for name in (*_vectors_, *_matrices_)]


class _ModelPointers(ctypes.Structure):
    _sizes_ = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "window", "is_bf16")
    _fields_ = [
        *((name, _I64) for name in _sizes_),
        ("rms_eps", ctypes.c_float),
        *((name, _PTR) for name in ("layer", "norm", "rope_cos", "rope_sin", "lm_head", "embedding")),
    ]


class _BatchPointers(ctypes.Structure):
    _sizes_ = ("positions", "rows", "table_width", "block_size", "cells_per_head")
    _arrays_ = ("token_ids", "at", "cells", "starts", "stops", "tables", "keys", "values", "logits")
    _fields_ = [*((name, _I64) for name in _sizes_), *((name, _PTR) for name in _arrays_)]


class CpuModel:
    """A Decoder on packed weights. float32, or bfloat16 weights and K/V with float32 sums.

    Takes `weights` over: each layer is packed and dropped, so that no second copy stays. Raises
    KernelsUnavailable if the kernels cannot be built here or do not know the model's shape.
    """

    device = torch.device("cpu")

    def __init__(self, config: ModelConfig, weights: ModelWeights, threads: int) -> None:
        group = config.heads // config.kv_heads
        if group > _MAX_GROUP or config.head_dim > _MAX_HEAD_DIM:
            raise KernelsUnavailable(
                f"{group} query heads per K/V head of {config.head_dim}: the native kernels take up to "
                f"{_MAX_GROUP} of up to {_MAX_HEAD_DIM}"
            )
        self.config, self.dtype, self.threads = config, weights.embedding.dtype, threads
        self._kernels = load_kernels()
        self._is_bf16 = int(self.dtype == torch.bfloat16)
        self._vectors: list[Tensor] = []  # kept alive for the pointers into them
        self._arena = _Arena(sum(self._packed_bytes(rows, columns) for rows, columns in _matrix_shapes(config)))
        self._layers = (_LayerPointers * config.layers)()
        for layer in self._layers:
            self._pack_layer(weights.layers.pop(0), layer)
        self._rope = rope_tables(config, self.device)
        pointers = self._model_pointers(weights)
        self._handle = self._kernels.bb_create(ctypes.byref(pointers), threads)
        self._logits = torch.empty(0)

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._kernels.bb_destroy(handle)

    @property
    def weight_bytes(self) -> int:
        return self._arena.size + sum(vector.nbytes for vector in self._vectors)

    @property
    def matrix_bytes(self) -> int:
        return self._arena.size

    @property
    def numerics(self) -> str:
        unit = self._kernels.bb_unit(self._is_bf16).decode()
        return f"exact (native {unit})"

    def padded_rows(self, positions: int, rows: int, slots: int) -> int:
        return positions

    def prepare(self, store: KVStore, slots: int, block_size: int) -> None:
        pass

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        rows, vocab = len(batch.starts), self.config.vocab_size
        if self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, vocab)
        arrays = (batch.token_ids, batch.positions, batch.cells, batch.starts, batch.stops, batch.tables)
        pointers = _BatchPointers(
            len(batch.token_ids),
            rows,
            batch.tables.shape[1],
            batch.block_size,
            store.keys.shape[2],
            *(array.ctypes.data for array in arrays),
            store.keys.data_ptr(),
            store.values.data_ptr(),
            self._logits.data_ptr(),
        )
        self._kernels.bb_forward(self._handle, ctypes.byref(pointers))
        return self._logits[:rows]

    def greedy(self, logits: Tensor) -> tuple[list[int], list[float]]:
        rows = logits.shape[0]
        ids, best_two = np.empty(rows, np.int64), np.empty((rows, 2), np.float32)
        self._kernels.bb_top_two(
            self._handle, logits.data_ptr(), rows, logits.shape[1], ids.ctypes.data, best_two.ctypes.data
        )
        if not np.isfinite(best_two).all():
            raise NumericsError("logits are not finite: the weights or the K/V hold NaN or infinity")
        return ids.tolist(), (best_two[:, 0] - best_two[:, 1]).tolist()

    def _pack_layer(self, layer: LayerWeights, pointers: _LayerPointers) -> None:
        for name in _LayerPointers._vectors_:
            setattr(pointers, name, self._vector(getattr(layer, name)))
        for name in ("qkv", "output", "down"):
            setattr(pointers, name, self._pack(getattr(layer, name)))
        pointers.gate_up = self._pack(*layer.gate_up.chunk(2))

    def _model_pointers(self, weights: ModelWeights) -> _ModelPointers:
        cfg = self.config
        embedding = None
        if weights.embedding is not weights.lm_head:
            self._vectors.append(weights.embedding.contiguous())
            embedding = self._vectors[-1].data_ptr()
        return _ModelPointers(
            cfg.vocab_size,
            cfg.hidden_size,
            cfg.layers,
            cfg.heads,
            cfg.kv_heads,
            cfg.head_dim,
            cfg.intermediate_size,
            cfg.sliding_window or 0,
            self._is_bf16,
            cfg.rms_eps,
            ctypes.cast(self._layers, _PTR),
            self._vector(weights.norm),
            self._rope[0].data_ptr(),
            self._rope[1].data_ptr(),
            self._pack(weights.lm_head),
            embedding,
        )

    def _vector(self, tensor: Tensor | None) -> int | None:
        """Address of a float32 copy; exact, since every bfloat16 is a float32."""
        if tensor is None:
            return None
        self._vectors.append(tensor.float().contiguous())
        return self._vectors[-1].data_ptr()

    def _pack(self, *matrices: Tensor) -> int:
        """Pack matrices of one shape [out, in], panel by panel in turn. Returns the address."""
        rows, columns = matrices[0].shape
        size = self._packed_bytes(rows, columns)
        start = self._arena.take(size * len(matrices))
        for n, matrix in enumerate(matrices):
            source = matrix.contiguous()
            to = start + n * size // _panels(rows)
            self._kernels.bb_pack(source.data_ptr(), rows, columns, to, len(matrices), self._is_bf16)
        return start

    def _packed_bytes(self, rows: int, columns: int) -> int:
        padded = -(-columns // _K_MULTIPLE) * _K_MULTIPLE if self._is_bf16 else columns
        return _panels(rows) * _PANEL * padded * self.dtype.itemsize


def _panels(rows: int) -> int:
    return -(-rows // _PANEL)


def _matrix_shapes(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """[out, in] of every matrix that is packed; gate and up on their own."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    for _ in range(config.layers):
        yield from ((q + 2 * kv, hidden), (hidden, q), (inner, hidden), (inner, hidden), (hidden, inner))
    yield (config.vocab_size, hidden)


class _Arena:
    """One allocation for all packed weights, in huge pages where the system gives them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size + _ALIGNMENT)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._next = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._end = self._next + size

    def take(self, size: int) -> int:
        start, self._next = self._next, self._next + size
        assert self._next <= self._end, "more weights than were counted"
        return start
