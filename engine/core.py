"""The engine: submit requests, step until no work is left, take their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.audit import audit
from engine.config import SchedulerConfig
from engine.errors import EngineError, NoProgress
from engine.motions import PrefersSwap
from engine.plan import Admission, Eviction, Plan, Prefill, Runner, RunOutput
from engine.sampling import GREEDY, Sampling
from engine.scheduler import Scheduler
from engine.stretch import Stretch, Until, decide_one, glide


@dataclass(slots=True)
class Step:
    """What one iteration did. All sizes are exact counts."""

    issued_tokens: int  # rows forwarded
    collected_tokens: int  # tokens that requests kept
    forward_tokens: int  # positions computed, padding left out
    padded_tokens: int  # batch rows that carried no position
    prefill_rows: int  # rows that computed a prompt or a resumed context
    recomputed_tokens: int  # positions of resumed rows
    rebuilt_tokens: int  # positions whose K/V had been computed before
    recovered_tokens: int  # positions that resumes found in the prefix cache
    shared_tokens: int  # positions that others' work had put there
    swapped_out_tokens: int  # positions copied to the swap pool
    swapped_in_tokens: int  # and back
    copy_s: float  # seconds that the copies took
    prefills: Sequence[Prefill]
    admitted: Sequence[Admission]
    evicted: Sequence[Eviction]
    finished: Sequence[str]
    began: Sequence[str]  # who got a token, and none in the iteration before
    paused: Sequence[str]  # who ran and got none, but got one in the iteration before
    running: int  # after the iteration
    waiting: int
    free_blocks: int
    unused_tokens: int  # positions that running requests' blocks have room for and do not hold yet


@dataclass(frozen=True, slots=True)
class Output:
    token_ids: list[int]  # generated, prompt left out
    logit_gaps: list[float]  # lead of the best token over the second best at each; the best is what greedy takes


class Engine:
    """Scheduler and runner, joined: decide, execute, apply.

    with_audit: check every invariant after every iteration (AuditError on a breach).
    prefers_swap: with reclaim = "cheaper", which victims are swapped. Counters are totals since construction and
    are never reset by an eviction.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        *,
        with_audit: bool = False,
        prefers_swap: PrefersSwap | None = None,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, prefers_swap, keeps_tokens=runner.reads_tokens)
        self.runner = runner
        self.with_audit = with_audit
        self.issued_tokens = self.collected_tokens = 0
        self.prefill_rows = self.forward_tokens = self.padded_tokens = 0
        self.recomputed_tokens = self.rebuilt_tokens = 0
        self._gaps: dict[str, list[float]] = {}
        # Between two tokens every rule set evicts each row once at most, and then fills what one context needs.
        self._patience = config.slots + 2 * -(-config.pool_blocks * config.block_size // config.budget)
        self._idle = 0  # iterations since a request got a token
        self._failed = False

    @property
    def recompute_fraction(self) -> float:
        """recomputed_tokens / forward_tokens; 0.0 before anything was forwarded."""
        return self.recomputed_tokens / self.forward_tokens if self.forward_tokens else 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        output_tokens: int,
        sampling: Sampling = GREEDY,
        priority: int = 0,
    ) -> None:
        """Queue a request of token ids. Raises RequestRefused; the engine is then as before."""
        self.runner.check(request_id, prompt, output_tokens)
        self.scheduler.submit(request_id, prompt, output_tokens, sampling, priority)

    def check(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Raise RequestRefused if `submit` would."""
        self.runner.check(request_id, prompt, output_tokens)
        self.scheduler.check(request_id, len(prompt), output_tokens)

    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it stands; its blocks and slot are free at once."""
        self.scheduler.abort(request_id)
        self._gaps.pop(request_id, None)

    def take(self, request_id: str) -> Output:
        """Hand over a finished request's tokens, once."""
        return Output(self.scheduler.take(request_id), self._gaps.pop(request_id, []))

    def step(self) -> Step:
        """Run one iteration. Raises NoProgress if work is left and nothing could run.

        After any error the engine is spent: the iteration is half done, and every later step raises.
        """
        self._require_whole()
        self._failed = True
        step = self._iterate()
        if self.with_audit:
            audit(self.scheduler, self.runner.state())
        self._failed = False
        return step

    def advance(self, until: Until) -> Stretch | None:
        """Many iterations at once, by a runner that computes nothing; who finishes is forgotten, with its tokens of 0.

        None if there is text to compute: then `step`. Raises NoProgress.
        """
        if self.scheduler.keeps_tokens:
            return None
        self._require_whole()
        self._failed, stretch = True, Stretch()
        while until.goes_on(stretch) and self.has_work:
            if glide(self.scheduler, stretch, until):
                self._idle = 0
            if self.with_audit:
                audit(self.scheduler)
            if until.goes_on(stretch) and self.has_work:
                decide_one(self.scheduler, stretch, until)
                moved = bool(stretch.issued_tokens[-1] or self.scheduler.draft.evicted)
                self._note_progress(stretch.collected_tokens[-1], moved)
        self._failed = False
        return stretch

    def _iterate(self) -> Step:
        """Decide, execute, apply."""
        plan = self.scheduler.schedule()
        self._note_progress(plan.kept, bool(plan.issued or plan.evicted))
        out = self.runner.execute(plan)
        for request_id, keeps, gap in zip(plan.request_ids, plan.keeps, out.logit_gaps, strict=True):
            if keeps:
                self._gaps.setdefault(request_id, []).append(gap)
        return self._count(plan, out, self.scheduler.apply(plan, out.token_ids))

    def _require_whole(self) -> None:
        if self._failed:
            raise EngineError("an earlier iteration failed; build a new engine")

    def _note_progress(self, kept: int, moved: bool) -> None:
        """Raise NoProgress if nothing could run, or if long enough nobody got a token."""
        if not moved:
            raise NoProgress(
                f"no row to forward: {len(self.scheduler.waiting)} waiting, "
                f"{len(self.scheduler.blocks)} of {self.config.pool_blocks} blocks free"
            )
        self._idle = 0 if kept else self._idle + 1
        if self._idle > self._patience:
            raise NoProgress(
                f"no request got a token in {self._idle} iterations under rules {self.config.rules!r}, victim "
                f"{self.config.victim_name!r}: what is computed is thrown away as fast"
            )

    def _count(self, plan: Plan, out: RunOutput, finished: Sequence[str]) -> Step:
        step = Step(
            issued_tokens=plan.issued,
            collected_tokens=plan.kept,
            forward_tokens=plan.positions,
            padded_tokens=out.padded_tokens,
            prefill_rows=len(plan.prefills),
            recomputed_tokens=sum([p.positions for p in plan.prefills if p.resumed]),
            rebuilt_tokens=sum([p.rebuilt_tokens for p in plan.prefills]),
            recovered_tokens=sum([a.recovered_tokens for a in plan.admitted]),
            shared_tokens=sum([a.shared_tokens for a in plan.admitted]),
            swapped_out_tokens=sum([e.cached_tokens for e in plan.evicted if e.reclaim == "swap"]),
            swapped_in_tokens=sum([a.swapped_tokens for a in plan.admitted]),
            copy_s=out.copy_s,
            prefills=plan.prefills,
            admitted=plan.admitted,
            evicted=plan.evicted,
            finished=finished,
            began=plan.began,
            paused=plan.paused,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_blocks=len(self.scheduler.blocks),
            unused_tokens=self.scheduler.unused,
        )
        self.issued_tokens += step.issued_tokens
        self.collected_tokens += step.collected_tokens
        self.forward_tokens += step.forward_tokens
        self.padded_tokens += step.padded_tokens
        self.prefill_rows += step.prefill_rows
        self.recomputed_tokens += step.recomputed_tokens
        self.rebuilt_tokens += step.rebuilt_tokens
        return step
