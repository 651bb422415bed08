"""The decoder on a CUDA device: Triton kernels, with every iteration that only decodes as one CUDA graph."""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import triton
from torch import Tensor

from engine.batch import Batch
from engine.errors import KernelsUnavailable
from engine.kv_store import KVStore
from engine.model import Model
from engine.sampler import greedy
from engine.triton_attention import SPLIT, tile_queries
from engine.triton_forward import captured, device_batch, forward
from engine.triton_linear import Shape
from engine.triton_selftest import check_attention, check_rms_norm, choose_shapes


class TritonModel:
    """A Decoder in Triton kernels. float32, or bfloat16 weights and K/V with float32 sums.

    Raises KernelsUnavailable if the kernels do not run on the model's device or do not know its shape,
    NumericsError if the trial finds that they do not keep a row's bits; attention is tried per block size.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton launches on the current one
        elif not triton.knobs.runtime.interpret:
            raise KernelsUnavailable(f"the Triton kernels run on a CUDA device, not on {self.device}")
        self._queries = tile_queries(self.config.heads // self.config.kv_heads, self.dtype)
        self.shapes = choose_shapes(model.weights.matrices())
        check_rms_norm(model.weights.norm, self.config.rms_eps)
        self._graphs: WeakKeyDictionary[KVStore, _DecodeGraph] = WeakKeyDictionary()

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    @property
    def matrix_bytes(self) -> int:
        return self._model.matrix_bytes

    @property
    def numerics(self) -> str:
        return f"exact (triton, {len(self.shapes)} shapes)"

    def padded_rows(self, positions: int, rows: int, slots: int) -> int:
        return slots if positions == rows else positions

    def prepare(self, store: KVStore, slots: int, block_size: int) -> None:
        """Try attention in blocks of this size, and capture the graph with one row that writes no K/V."""
        zero = np.zeros(1, dtype=np.int32)
        self.forward(Batch(zero, zero, zero - 1, zero, zero + 1, zero[None], block_size, slots), store)

    @torch.inference_mode()
    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        _check_attention_once(self.config, batch.block_size, self.dtype, self.device)
        if not batch.decode:
            inputs = device_batch(batch, self._queries, self.device)
            return forward(self._model, inputs, store, self.shapes)
        graph = self._graphs.get(store)
        if graph is None or not graph.holds(batch):
            self._graphs.pop(store, None)  # its memory first
            graph = self._graphs[store] = _DecodeGraph(self._model, self.shapes, self._queries, batch, store)
        return graph.run(batch)

    def greedy(self, logits: Tensor) -> tuple[list[int], list[float]]:
        return greedy(logits)


_check_attention_once = cache(check_attention)  # of weights nothing enters


class _DecodeGraph:
    """The forward of one position in each of an engine's slots, captured once; slots not running are padding.

    A longer row than the tables hold needs a new graph. So that few do, tables are as wide as the next power of
    two of attention's splits; programs for splits that no row has end at once.
    """

    def __init__(self, model: Model, shapes: tuple[Shape, ...], queries: int, batch: Batch, store: KVStore) -> None:
        self.slots, self.queries, self.device = batch.slots, queries, model.device
        per_split = -(-SPLIT // batch.block_size)
        splits = -(-batch.tables.shape[1] // per_split)
        self.width = per_split * 2 ** (splits - 1).bit_length()
        self.inputs = inputs = device_batch(batch, queries, self.device, padded=self.slots, width=self.width)
        held = ref(store)  # weak: a graph must not keep the pool of an engine that is gone

        def step() -> Tensor:
            store = held()
            assert store is not None, "a graph outlived its store"
            return forward(model, inputs, store, shapes)

        self.replay = captured(step, self.device)

    def holds(self, batch: Batch) -> bool:
        same = (batch.slots, batch.block_size) == (self.slots, self.inputs.block_size)
        return same and batch.tables.shape[1] <= self.width

    def run(self, batch: Batch) -> Tensor:
        """Logits of the batch's rows. Overwritten by the next run."""
        assert len(batch.starts) <= self.slots, f"{len(batch.starts)} rows in {self.slots} slots"
        device_batch(batch, self.queries, self.device, padded=self.slots, width=self.width, into=self.inputs.memory)
        return self.replay()[: len(batch.starts)]
