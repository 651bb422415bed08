"""Turns a plan into one forward and its sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from engine.batch import Batch, Decoder, Ints, lay_out
from engine.config import SchedulerConfig
from engine.errors import RequestRefused
from engine.kv_store import KVStore
from engine.plan import Plan, RunnerState, TableUpdate
from engine.sampler import sample


@dataclass(frozen=True, slots=True)
class RunOutput:
    token_ids: list[int]  # one per row of the plan
    logit_gaps: list[float]  # lead of the best token over the second best in each row, in logits
    padded_tokens: int  # batch rows that carried no position


class Runner(Protocol):
    """Executes plans; the scheduler never sees what is behind it."""

    def check(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Raise RequestRefused if the model could not run this request."""
        ...

    def execute(self, plan: Plan) -> RunOutput:
        """Compute the plan's positions and sample one token per row."""
        ...

    def state(self) -> RunnerState | None:
        """What the audit may look at."""
        ...


class ModelRunner:
    """The real forward. Keeps one block table per slot, brought up to date by each plan.

    track_writes: also keep, per cell, which request and position was written there last, so that
    the audit can compare K/V with text.
    """

    def __init__(self, model: Decoder, config: SchedulerConfig, *, track_writes: bool = False) -> None:
        self.model = model
        self.block_size = config.block_size
        self.store = KVStore(model.config, config.pool_blocks, config.block_size, model.dtype, model.device)
        longest = min(config.pool_blocks, config.blocks_for(model.config.max_positions))
        self.tables = np.zeros((config.slots, longest), dtype=np.int32)
        self.track_writes = track_writes
        self._written: dict[int, tuple[str, int]] = {}
        self._latest: dict[int, tuple[str, int]] = {}

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
        logits = self.logits(plan)
        token_ids, gaps = self.model.greedy(logits)
        for row, how in enumerate(plan.samplings):
            if how.temperature:
                uniform = how.uniform(plan.request_ids[row], plan.stops[row])
                token_ids[row] = sample(logits[row].cpu().numpy(), how, uniform)
        computed = self.model.padded_rows(plan.positions, len(plan.slots), len(self.tables))
        return RunOutput(token_ids, gaps, computed - plan.positions)

    def logits(self, plan: Plan) -> Tensor:
        """Run the plan's forward. Returns float32 [rows, vocab], each row's logits at its last position.

        Valid until the next call.
        """
        for update in plan.table_updates:
            self._update_table(update)
        batch = self._batch(plan)
        logits = self.model.forward(batch, self.store)
        if self.track_writes:
            self._note_writes(plan, batch)
        return logits

    def state(self) -> RunnerState:
        return RunnerState(self.tables.tolist(), self._written, self._latest, self.track_writes)

    def _update_table(self, update: TableUpdate) -> None:
        self.tables[update.slot, update.first : update.first + len(update.blocks)] = update.blocks

    def _note_writes(self, plan: Plan, batch: Batch) -> None:
        for update in plan.table_updates:  # a new owner: what the old one wrote there is void
            for block in update.blocks:
                for cell in range(block * self.block_size, (block + 1) * self.block_size):
                    self._written.pop(cell, None)
        rows = zip(plan.request_ids, plan.starts, plan.stops, strict=True)
        writers = [(name, position) for name, start, stop in rows for position in range(start, stop)]
        self._latest = dict(zip(batch.cells.tolist(), writers, strict=True))
        self._written.update(self._latest)

    def _batch(self, plan: Plan) -> Batch:
        width = (max(plan.stops) - 1) // self.block_size + 1
        tables: Ints = np.ascontiguousarray(self.tables[np.asarray(plan.slots), :width])
        return lay_out(plan.token_ids, plan.starts, plan.stops, tables, self.block_size, len(self.tables))
