"""The schedule: requests in, one frozen plan per iteration out, tokens back in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.block_pool import BlockCount
from engine.config import SchedulerConfig
from engine.errors import EngineError, RequestRefused
from engine.motions import Draft, Motions, PrefersSwap
from engine.plan import Plan, Prefill
from engine.request import FINISHED, NONE, RUNNING, STILL, Request
from engine.rules import rule_set, smallest_pool, steady
from engine.sampling import GREEDY, Sampling


class Scheduler(Motions):
    """Batching over a paged pool, with preemption. Decides nothing itself: that is the rules' (`engine.rules`).

    keeps_tokens: for a runner that computes text. Without, requests are lengths, and plans have no rows.
    """

    def __init__(
        self, config: SchedulerConfig, prefers_swap: PrefersSwap | None = None, *, keeps_tokens: bool = True
    ) -> None:
        super().__init__(config, prefers_swap, keeps_tokens=keeps_tokens)
        self.requests: dict[str, Request] = {}  # every request whose tokens were not taken yet
        self._decide = rule_set(config)
        self._submitted = 0
        self._flowing = True  # whether who decodes got a token in the last iteration
        self._fresh: list[Request] = []  # who else got one
        self._laid_out: list[Request] = []

    def check(self, request_id: str, prompt_tokens: int, output_tokens: int) -> None:
        """Raise RequestRefused, by name, if such a request could not run in an empty pool."""
        if request_id in self.requests:
            raise RequestRefused(f"request {request_id!r}: the id is in use")
        if prompt_tokens < 1 or output_tokens < 1:
            raise RequestRefused(
                f"request {request_id!r}: needs at least one prompt token and one output token, "
                f"has {prompt_tokens} and {output_tokens}"
            )
        self._refuse_if_too_long(request_id, prompt_tokens, output_tokens)

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        output_tokens: int,
        sampling: Sampling = GREEDY,
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises RequestRefused."""
        length = len(prompt)
        self.check(request_id, length, output_tokens)
        tokens = list(prompt) if self.keeps_tokens else NONE
        request = Request(
            request_id, length, length + output_tokens, self._submitted, length, tokens, sampling, priority
        )
        self._submitted += 1
        self.requests[request_id] = request
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Decide one iteration and lay out its forward."""
        draft = self.decide()
        return Plan(
            **self._rows() if self.keeps_tokens else {},
            issued=draft.issued,
            positions=draft.positions,
            kept=draft.kept,
            copies=draft.copies,
            table_updates=draft.table_updates,
            prefills=draft.prefills,
            admitted=draft.admitted,
            evicted=draft.evicted,
            began=draft.began,
            paused=draft.paused,
        )

    def decide(self) -> Draft:
        """Decide one iteration, and sum up what it will do."""
        draft, held = Draft(), self.held
        self.draft, self.held = draft, []
        for request in held:
            if request.status is RUNNING:
                self.join(request)  # it lost one turn only
        self._decide(self)
        if draft.decodes:
            draft.issued = draft.positions = draft.kept = self.decoding
        fresh = []
        for row, start, stop in zip(draft.rows, draft.starts, draft.stops, strict=True):
            draft.issued += 1
            draft.positions += stop - start
            if row.status is RUNNING:  # not the row of a static batch that has ended already
                if stop == row.settled:
                    draft.kept += 1
                    fresh.append(row)
                if start < row.context:
                    rebuilt = max(0, min(stop, row.frontier) - start)
                    draft.prefills.append(Prefill(row.request_id, stop - start, rebuilt, row.recomputes))
        self._note_changes(held, fresh)
        return draft

    def apply(self, plan: Plan, sampled: Sequence[int] = ()) -> list[str]:
        """Move the state past `plan`: one sampled token per row. Returns who finished."""
        if self.keeps_tokens:
            for row, keeps, token in zip(self._laid_out, plan.keeps, sampled, strict=True):
                if keeps:
                    row.tokens.append(token)
        return [row.request_id for row in self.settle()]

    def settle(self) -> list[Request]:
        """Move the books past what was decided. Returns who finished."""
        draft = self.draft
        finished = self.tick() if draft.decodes else []
        for row, stop in zip(draft.rows, draft.stops, strict=True):
            if row.status is not RUNNING:
                continue
            self.unused -= stop - row.computed
            row.computed = stop
            if stop == row.settled:
                row.settled += 1
                if row.settled == row.length_limit:
                    finished.append(row)
                    self._retire(row)
                else:
                    self.join(row)
        if self.config.prefix_cache:
            for row in self._laid_out:
                if row.status is RUNNING:
                    self.learn(row)
        return finished

    def tick(self) -> list[Request]:
        """Everybody who decodes has got a token. Returns whose last it was."""
        pace = self.pace
        pace.now += 1
        self.unused -= self.decoding
        if pace.now not in self._end_at:
            return []
        finished = self.ending()
        for row in finished:
            self._retire(row)
        return finished

    def coast(self, most: int, free: list[int], unused: list[int]) -> list[Request]:
        """Up to `most` ticks in which who decodes grows where it must, until some end. Returns who.

        Less where the blocks run short. free, unused: blocks and positions after each tick, appended.
        """
        pace, blocks, decoding = self.pace, self.blocks, self.decoding
        assert isinstance(blocks, BlockCount)
        for _ in range(most):
            if pace.now in self._grow_at and not self.grow_all():
                break
            finished = self.tick() if pace.now + 1 in self._end_at else None
            if finished is None:
                pace.now += 1
                self.unused -= decoding
            free.append(blocks.left)
            unused.append(self.unused)
            if finished:
                return finished
        return []

    def glides(self) -> bool:
        """Whether all that can happen next is that requests decode, grow and finish. Only without tokens."""
        plain = self.decoding == len(self.running) and self.decoding > 0 and not self.held
        if self.keeps_tokens or not plain or not steady(self):
            return False
        self._fresh = []
        return True

    def abort(self, request_id: str) -> None:
        """Drop a request between iterations, wherever it stands; its blocks of either pool return at once."""
        self.drop(self._known(request_id))
        if not self.running:
            self.release_spent()
        del self.requests[request_id]

    def take(self, request_id: str) -> list[int]:
        """Hand over a finished request's generated tokens and forget it. All are 0 where nobody computed them."""
        request = self._known(request_id)
        if request.status is not FINISHED:
            raise EngineError(f"request {request_id!r} is {request.status.value}, not finished")
        del self.requests[request_id]
        return request.generated if self.keeps_tokens else [0] * (request.num_tokens - request.prompt_tokens)

    def _rows(self) -> dict[str, Any]:
        """The plan's columns, a row each: who decodes, then the others."""
        draft = self.draft
        decoding = [row for row in self.running if row.pace is not STILL] if draft.decodes else []
        stops = [len(row.tokens) for row in decoding]
        token_ids = [row.tokens[-1] for row in decoding]
        keeps = [True] * len(decoding)
        for row, start, stop in zip(draft.rows, draft.starts, draft.stops, strict=True):
            token_ids += row.tokens[start:stop]
            keeps.append(row.status is RUNNING and stop == len(row.tokens))
        rows = self._laid_out = decoding + draft.rows
        return {
            "request_ids": [row.request_id for row in rows],
            "slots": [row.slot for row in rows],
            "starts": [stop - 1 for stop in stops] + draft.starts,
            "stops": stops + draft.stops,
            "token_ids": token_ids,
            "samplings": [row.sampling for row in rows],
            "keeps": keeps,
        }

    def _note_changes(self, held: Sequence[Request], fresh: list[Request]) -> None:
        """Whose tokens begin to come with this iteration, and whose stop though they run.

        held: who lost its turn in the last one. fresh: who gets a token, but does not decode yet.
        """
        draft, before = self.draft, self._fresh
        self._fresh = fresh
        if draft.decodes and self._flowing and not (held or self.held):
            draft.began = [row.request_id for row in fresh]
            return
        began = [row for row in held if row.pace is not STILL]
        if draft.decodes:
            paused = [row for row in self.held if row.status is RUNNING and row not in held]
            if not self._flowing:
                began = [row for row in self.running if row.pace is not STILL and row not in before]
        else:
            paused = [row for row in (self.running if self._flowing else before) if row.pace is not STILL]
        self._flowing = draft.decodes
        draft.began = [row.request_id for row in began + fresh]
        draft.paused = [row.request_id for row in paused]

    def _retire(self, row: Request) -> None:
        """It has its last token."""
        self.leave(row)
        self.running.remove(row)
        if self.config.prefix_cache:
            self.learn(row)
        if self.config.batching == "static":
            row.status = FINISHED
            self.spent.append(row)
        else:
            self.release(row, FINISHED)
        if not self.running:
            self.release_spent()

    def _refuse_if_too_long(self, request_id: str, prompt_tokens: int, output_tokens: int) -> None:
        config, total = self.config, prompt_tokens + output_tokens
        if config.max_tokens is not None and total - 1 > config.max_tokens:
            raise RequestRefused(
                f"request {request_id!r}: {prompt_tokens} prompt + {output_tokens} output tokens feed {total - 1} "
                f"positions, max_tokens reserves {config.max_tokens}"
            )
        needed = smallest_pool(config, prompt_tokens, output_tokens)
        if needed > config.pool_blocks:
            pool = f"the pool of {config.pool_blocks} blocks of {config.block_size}"
            prompt = config.blocks_for(prompt_tokens)
            rest = f"its {output_tokens} output tokens"
            if config.max_tokens is not None:
                rest = f"the {config.max_tokens} positions that max_tokens reserves"
            if prompt > config.pool_blocks:
                why = f"its prompt of {prompt_tokens} tokens alone needs {prompt}, more than {pool}; with {rest} "
            else:
                why = f"its prompt of {prompt_tokens} tokens fits {pool}, but with {rest} it needs {needed}; "
            raise RequestRefused(f"request {request_id!r}: {why}the smallest pool that holds it is {needed} blocks")

    def _known(self, request_id: str) -> Request:
        try:
            return self.requests[request_id]
        except KeyError:
            raise EngineError(f"unknown request {request_id!r}: never submitted, aborted, or taken") from None
