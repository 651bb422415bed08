"""Turns a plan into one forward and its sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention import Ints, plan_walk
from engine.config import SchedulerConfig
from engine.errors import RequestRefused
from engine.kv_store import KVStore
from engine.model import Batch, Model
from engine.numerics import padded_rows
from engine.plan import Plan, TableUpdate
from engine.sampler import greedy


@dataclass(frozen=True, slots=True)
class RunOutput:
    token_ids: list[int]  # one per row of the plan
    logit_gaps: list[float]  # lead of each over the second best, in logits
    padded_tokens: int  # batch rows that carried no position


class Runner(Protocol):
    """Executes plans; the scheduler never sees what is behind it."""

    def check(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Raise RequestRefused if the model could not run this request."""
        ...

    def execute(self, plan: Plan) -> RunOutput:
        """Compute the plan's positions and sample one token per row."""
        ...


class TorchRunner:
    """The real forward. Keeps one block table per slot, brought up to date by each plan.

    track_writes: also keep, per cell, which request and position was written there last, so that
    the audit can compare K/V with text.
    """

    def __init__(self, model: Model, config: SchedulerConfig, *, track_writes: bool = False) -> None:
        self.model = model
        self.block_size = config.block_size
        self.store = KVStore(model.config, config.pool_blocks, config.block_size, model.dtype, model.device)
        longest = min(config.pool_blocks, config.blocks_for(model.config.max_positions))
        self.tables = np.zeros((config.slots, longest), dtype=np.int64)
        self.written: dict[int, tuple[str, int]] | None = {} if track_writes else None

    def check(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        model = self.model.config
        stranger = next((token for token in prompt if not 0 <= token < model.vocab_size), None)
        if stranger is not None:
            raise RequestRefused(
                f"request {request_id!r}: token id {stranger} is outside the model's vocabulary of {model.vocab_size}"
            )
        if len(prompt) + output_tokens > model.max_positions:
            raise RequestRefused(
                f"request {request_id!r}: {len(prompt)} prompt + {output_tokens} output tokens, "
                f"the model holds {model.max_positions}"
            )

    def execute(self, plan: Plan) -> RunOutput:
        token_ids, gaps = greedy(self.logits(plan))
        return RunOutput(token_ids, gaps, padded_rows(plan.positions) - plan.positions)

    def logits(self, plan: Plan) -> Tensor:
        """Run the plan's forward. Returns float32 [rows, vocab], each row's logits at its last position."""
        for update in plan.table_updates:
            self._update_table(update)
        return self.model.forward(self._batch(plan), self.store)[: len(plan.slots)]

    def _update_table(self, update: TableUpdate) -> None:
        self.tables[update.slot, update.first : update.first + len(update.blocks)] = update.blocks
        if self.written is not None:
            for block in update.blocks:  # a new owner: what the old one wrote there is void
                for cell in range(block * self.block_size, (block + 1) * self.block_size):
                    self.written.pop(cell, None)

    def _batch(self, plan: Plan) -> Batch:
        starts, stops = np.asarray(plan.starts, dtype=np.int64), np.asarray(plan.stops, dtype=np.int64)
        lengths = stops - starts
        ends = np.cumsum(lengths)
        padded = padded_rows(plan.positions)
        token_ids, positions = np.zeros(padded, dtype=np.int64), np.zeros(padded, dtype=np.int64)
        token_ids[: plan.positions] = plan.token_ids
        at = np.arange(plan.positions) + np.repeat(starts - (ends - lengths), lengths)
        positions[: plan.positions] = at
        last = np.zeros(padded_rows(len(lengths)), dtype=np.int64)
        last[: len(lengths)] = ends - 1

        width = int(stops.max() - 1) // self.block_size + 1
        tables = self.tables[np.asarray(plan.slots), :width]
        blocks = tables[np.repeat(np.arange(len(lengths)), lengths), at // self.block_size]
        cells = blocks * self.block_size + at % self.block_size
        if self.written is not None:
            owners = np.repeat(np.asarray(plan.request_ids, dtype=object), lengths)
            self.written.update(zip(cells.tolist(), zip(owners, at.tolist(), strict=True), strict=True))

        model, device = self.model.config, self.model.device
        walk = plan_walk(tables, starts, stops, self.block_size, model.heads // model.kv_heads, padded, device)

        def tensor(array: Ints) -> Tensor:
            return torch.from_numpy(array).to(device)

        return Batch(tensor(token_ids), tensor(positions), tensor(cells), tensor(last), walk)
