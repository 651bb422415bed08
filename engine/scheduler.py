"""The schedule: requests in, one frozen plan per iteration out, tokens back in."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import SchedulerConfig
from engine.errors import EngineError, RequestRefused
from engine.motions import Draft, Motions, PrefersSwap
from engine.plan import Plan, Prefill
from engine.request import Request, Status
from engine.rules import rule_set, smallest_pool
from engine.sampling import GREEDY, Sampling


class Scheduler(Motions):
    """Batching over a paged pool, with preemption. Decides nothing itself: that is the rules' (`engine.rules`)."""

    def __init__(self, config: SchedulerConfig, prefers_swap: PrefersSwap | None = None) -> None:
        super().__init__(config, prefers_swap)
        self.requests: dict[str, Request] = {}  # every request whose tokens were not taken yet
        self._decide = rule_set(config)
        self._submitted = 0

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        output_tokens: int,
        sampling: Sampling = GREEDY,
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises RequestRefused, by name, if it could not run in an empty pool."""
        if request_id in self.requests:
            raise RequestRefused(f"request {request_id!r}: the id is in use")
        if not prompt or output_tokens < 1:
            raise RequestRefused(
                f"request {request_id!r}: needs at least one prompt token and one output token, "
                f"has {len(prompt)} and {output_tokens}"
            )
        self._refuse_if_too_long(request_id, len(prompt), output_tokens)
        limit = len(prompt) + output_tokens
        request = Request(request_id, list(prompt), len(prompt), limit, self._submitted, sampling, priority)
        self._submitted += 1
        self.requests[request_id] = request
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Decide one iteration and lay out its forward."""
        draft = self.draft = Draft()
        self._decide(self)
        rows, starts, stops, decodes = draft.rows, draft.starts, draft.stops, draft.decodes
        token_ids = [row.tokens[-1] for row in rows[:decodes]]
        keeps = [True] * decodes
        prefills = []
        for row, start, stop in zip(rows[decodes:], starts[decodes:], stops[decodes:], strict=True):
            keeps.append(len(row.tokens) == stop)
            if start >= row.context:
                token_ids.append(row.tokens[start])
                continue
            token_ids.extend(row.tokens[start:stop])
            if row.status is Status.RUNNING:  # not the row of a static batch that has ended already
                rebuilt = max(0, min(stop, row.frontier) - start)
                prefills.append(Prefill(row.request_id, stop - start, rebuilt, row.recomputes))
        return Plan(
            request_ids=[row.request_id for row in rows],
            slots=[row.slot for row in rows],  # type: ignore[misc]  # a row's request has a slot
            starts=starts,
            stops=stops,
            token_ids=token_ids,
            samplings=[row.sampling for row in rows],
            keeps=keeps,
            copies=draft.copies,
            table_updates=draft.table_updates,
            prefills=prefills,
            admitted=draft.admitted,
            evicted=draft.evicted,
        )

    def apply(self, plan: Plan, sampled: Sequence[int]) -> list[str]:
        """Move the state past `plan`: one sampled token per row. Returns who finished."""
        finished = []
        learns = self.config.prefix_cache
        for row, stop, keeps, token in zip(self.draft.rows, plan.stops, plan.keeps, sampled, strict=True):
            row.num_computed = stop  # as it was, for who has finished and is forwarded on
            if learns:
                self.learn(row)
            if keeps:
                row.tokens.append(token)
                if stop + 1 == row.length_limit:
                    finished.append(row)
        for row in finished:
            self.running.remove(row)
            if self.config.batching == "static":
                row.status = Status.FINISHED
                self.spent.append(row)
            else:
                self.release(row, Status.FINISHED)
        if not self.running:
            self.release_spent()
        return [row.request_id for row in finished]

    def abort(self, request_id: str) -> None:
        """Drop a request between iterations, wherever it stands; its blocks of either pool return at once."""
        self.drop(self._known(request_id))
        if not self.running:
            self.release_spent()
        del self.requests[request_id]

    def take(self, request_id: str) -> list[int]:
        """Hand over a finished request's generated tokens and forget it."""
        request = self._known(request_id)
        if request.status is not Status.FINISHED:
            raise EngineError(f"request {request_id!r} is {request.status.value}, not finished")
        del self.requests[request_id]
        return request.generated

    def _refuse_if_too_long(self, request_id: str, prompt_tokens: int, output_tokens: int) -> None:
        config, total = self.config, prompt_tokens + output_tokens
        if config.max_tokens is not None and total - 1 > config.max_tokens:
            raise RequestRefused(
                f"request {request_id!r}: {prompt_tokens} prompt + {output_tokens} output tokens feed {total - 1} "
                f"positions, max_tokens reserves {config.max_tokens}"
            )
        needed = smallest_pool(config, prompt_tokens, output_tokens)
        if needed > config.pool_blocks:
            raise RequestRefused(
                f"request {request_id!r}: {prompt_tokens} prompt + {output_tokens} output tokens need "
                f"{needed} blocks of {config.block_size}, the pool has {config.pool_blocks}; "
                f"the smallest pool that holds it is {needed} blocks"
            )

    def _known(self, request_id: str) -> Request:
        try:
            return self.requests[request_id]
        except KeyError:
            raise EngineError(f"unknown request {request_id!r}: never submitted, aborted, or taken") from None
