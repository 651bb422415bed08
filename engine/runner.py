"""Turns a plan into one forward and its sampled tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, Decoder, Ints, lay_out
from engine.config import SchedulerConfig
from engine.errors import RequestRefused
from engine.kv_store import KVStore
from engine.plan import Copy, Plan, RunnerState, RunOutput, TableUpdate, Write
from engine.sampler import sample


class ModelRunner:
    """The real forward. Keeps one block table per slot, brought up to date by each plan, and the swap pool.

    track_writes: also keep, per cell, which request, position and token was written there last, so that
    the audit can compare K/V with text. clock: seconds, for the time that copies take.
    """

    reads_tokens = True

    def __init__(
        self,
        model: Decoder,
        config: SchedulerConfig,
        *,
        track_writes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.block_size = config.block_size
        self.store = KVStore(model.config, config.pool_blocks, config.block_size, model.dtype, model.device)
        cpu, on_cuda = torch.device("cpu"), model.device.type == "cuda"
        self.host = KVStore(model.config, config.swap_blocks, config.block_size, model.dtype, cpu, pinned=on_cuda)
        self.clock = clock
        longest = min(config.pool_blocks, config.blocks_for(model.config.max_positions))
        self.tables = np.zeros((config.slots, longest), dtype=np.int32)
        self.track_writes = track_writes
        self._written: dict[int, Write] = {}
        self._latest: dict[int, Write] = {}
        self._host_written: dict[int, Write] = {}

    def check(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        model = self.model.config
        stranger = next((token for token in prompt if not 0 <= token < model.vocab_size), None)
        if stranger is not None:
            raise RequestRefused(
                f"request {request_id!r}: token id {stranger} is outside the model's vocabulary of {model.vocab_size}"
            )
        if len(prompt) + output_tokens - 1 > model.max_positions:  # the last token is never fed
            raise RequestRefused(
                f"request {request_id!r}: {len(prompt)} prompt + {output_tokens} output tokens feed "
                f"{len(prompt) + output_tokens - 1} positions, the model has {model.max_positions}"
            )

    def execute(self, plan: Plan) -> RunOutput:
        copy_s = self._copy(plan.copies) if plan.copies else 0.0
        if not plan.slots:  # an iteration that evicted, and nothing else
            self._note_moves(plan)
            return RunOutput([], [], 0, copy_s)
        logits = self.logits(plan)
        token_ids, gaps = self.model.greedy(logits)
        for row, how in enumerate(plan.samplings):
            if how.temperature and plan.keeps[row]:
                uniform = how.uniform(plan.request_ids[row], plan.stops[row])
                token_ids[row] = sample(logits[row].cpu().numpy(), how, uniform)
        computed = self.model.padded_rows(plan.positions, len(plan.slots), len(self.tables))
        return RunOutput(token_ids, gaps, computed - plan.positions, copy_s)

    def logits(self, plan: Plan) -> Tensor:
        """Run the plan's forward. Returns float32 [rows, vocab], each row's logits at its last position.

        Valid until the next call.
        """
        for update in plan.table_updates:
            self._update_table(update)
        batch = self._batch(plan)
        logits = self.model.forward(batch, self.store)
        if self.track_writes:
            self._note_moves(plan)
            self._note_writes(plan, batch)
        return logits

    def state(self) -> RunnerState:
        return RunnerState(self.tables.tolist(), self._written, self._latest, self.track_writes)

    def _copy(self, copies: Sequence[Copy]) -> float:
        """Swap blocks out and in, in order: a block may be filled again by a later copy or by the forward."""
        begin = self.clock()
        for out, blocks, host_blocks in copies:
            if out:
                self.store.copy_blocks(blocks, self.host, host_blocks)
            else:
                self.host.copy_blocks(host_blocks, self.store, blocks)
        if self.store.keys.is_cuda:
            torch.cuda.synchronize(self.store.keys.device)
        return self.clock() - begin

    def _update_table(self, update: TableUpdate) -> None:
        self.tables[update.slot, update.first : update.first + len(update.blocks)] = update.blocks

    def _note_moves(self, plan: Plan) -> None:
        """What copies moved, and what a new owner makes void."""
        self._latest = {}
        for copy in plan.copies:
            if copy.out:
                self._move_notes(self._written, copy.blocks, self._host_written, copy.host_blocks)
        for update in plan.table_updates:
            for block in () if update.shared else update.blocks:
                for cell in self._cells(block):
                    self._written.pop(cell, None)
        for copy in plan.copies:
            if not copy.out:
                self._move_notes(self._host_written, copy.host_blocks, self._written, copy.blocks)

    def _note_writes(self, plan: Plan, batch: Batch) -> None:
        rows = zip(plan.request_ids, plan.starts, plan.stops, strict=True)
        places = [(name, position) for name, start, stop in rows for position in range(start, stop)]
        writes = [Write(*place, token) for place, token in zip(places, plan.token_ids, strict=True)]
        self._latest = dict(zip(batch.cells.tolist(), writes, strict=True))
        self._written.update(self._latest)

    def _move_notes(
        self, source: dict[int, Write], blocks: Sequence[int], into: dict[int, Write], to: Sequence[int]
    ) -> None:
        for block, target in zip(blocks, to, strict=True):
            for cell, there in zip(self._cells(block), self._cells(target), strict=True):
                into.pop(there, None)
                if cell in source:
                    into[there] = source[cell]

    def _cells(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def _batch(self, plan: Plan) -> Batch:
        width = (max(plan.stops) - 1) // self.block_size + 1
        tables: Ints = np.ascontiguousarray(self.tables[np.asarray(plan.slots), :width])
        return lay_out(plan.token_ids, plan.starts, plan.stops, tables, self.block_size, len(self.tables))
