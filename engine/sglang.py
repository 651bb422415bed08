"""SGLang's schedule: prompts before decodes, admission by an estimate of the output to come, retraction."""

from __future__ import annotations

from engine.motions import Motions
from engine.request import ABORTED, RUNNING, Request


class SGLang:
    """SGLang 0.5.5's scheduler (managers/scheduler.py, schedule_policy.py, schedule_batch.py), FCFS, not overlapped.

    Prefill comes first: an iteration computes prompts, or else decodes. A request is admitted if its context and all
    its output to come are less than what is free, less `new_token_ratio` of the output that the running still want.
    The ratio starts at 0.7, falls by a 600th of the way to 0.098 with each decode, and is estimated anew when the pool
    runs out: then requests with the fewest output tokens are retracted to the queue's tail until a page per grower is
    there. One prompt at a time is chunked, in whole pages. Where nobody decodes or can be admitted it idles for a turn
    and starts again at 0.7; here that turn is left out.

    `full` is its batch_is_full: after a request that did not fit, or with all slots taken, nobody is admitted. The
    flag belongs to the list of those that decode (`listed`), so it falls when a decode drops members from the list
    (`stale`: finished, and listed until then), when a prefill loses members as it joins, and when it joins an empty
    list. What differs: a chunked prompt that finds no room waits while the others decode; output is not clipped at
    4,096 tokens in the estimates; the cache is this engine's, which remembers what a victim had decoded; watermarks
    apply; an aborted request counts as finished; and the other admission that SGLang has for requests that ignore the
    end of text with its cache off is not here.
    """

    INITIAL_RATIO, MINIMUM_RATIO, DECAY_STEPS, RETRACT_STEPS, PREFILL_TOKENS = 0.7, 0.7 * 0.14, 600, 20, 16384

    def __init__(self) -> None:
        self.ratio = self.INITIAL_RATIO
        self.chunked: Request | None = None
        self.full = self.prefilled = self.queued = False
        self.listed = self.stale = self.running = 0

    def __call__(self, m: Motions) -> None:
        self._join(m)
        self._prefill(m)
        self.prefilled = bool(m.draft.rows)
        if not self.prefilled:
            self._decode(m)
            if not m.decoding and not m.draft.evicted:
                self._idle()
                self._prefill(m)
                self.prefilled = True
        m.draft.decodes = not self.prefilled
        self.running, self.queued = len(m.running), bool(m.waiting)

    def _join(self, m: Motions) -> None:
        """The last batch joins the list of those that decode."""
        finished = self.running - len(m.running)
        if self.chunked and self.chunked.status is ABORTED:
            finished -= 1  # it was in no list of those that decode
        if self.chunked and (self.chunked.status is not RUNNING or self.chunked.num_tokens > self.chunked.context):
            self.chunked = None
        if not self.prefilled:
            self.stale += finished
        elif finished or self.chunked or not self.listed:
            self.full = False
        if not m.running and not self.queued:
            self._idle()

    def _idle(self) -> None:
        self.ratio, self.full, self.stale = self.INITIAL_RATIO, False, 0

    def _prefill(self, m: Motions) -> None:
        size, draft = m.config.block_size, m.draft
        self.listed = len(m.running) - (self.chunked is not None) + self.stale
        wanted = sum((r.length_limit - r.num_tokens) * self.ratio for r in m.running if r is not self.chunked)
        chunk, prefill, left = m.budget, self.PREFILL_TOKENS, len(m.blocks) * size - wanted
        if request := self.chunked:
            positions = min(request.missing, chunk, int(left))
            if not self._continue(m, request, positions) or positions < request.missing:
                return
            pages = -(-positions // size) * size
            chunk, prefill = chunk - pages, prefill - pages
            left -= pages + request.length_limit - request.prompt_tokens
        while m.waiting and not self.full:
            request = m.waiting[0]
            found = m.find(request)
            held = len(found.blocks) * size
            revived = m.revived(found) * size  # counted as free until now
            if len(m.slots) <= self.stale or request.length_limit - held >= left - revived:
                self.full = True
                break
            extend = request.num_tokens - found.tokens
            pages = -(-extend // size) * size
            if pages >= prefill and draft.rows:
                break
            positions = extend if pages <= chunk else chunk // size * size
            if positions <= 0 or not m.fits(found, found.tokens + positions):
                break
            m.admit(request, found, found.tokens + positions)
            draft.add(request, positions)
            if positions < extend:
                self.chunked = request
                break
            chunk, prefill = chunk - pages, prefill - pages
            left -= revived + request.capacity - held + request.length_limit - request.prompt_tokens
            self.full = left <= 0
            if min(chunk, prefill) <= 0:
                break

    def _continue(self, m: Motions, request: Request, positions: int) -> bool:
        stop = request.num_computed + positions
        if positions <= 0 or m.config.blocks_for(stop) - request.capacity // m.config.block_size > len(m.blocks):
            return False
        m.make_room(request, stop)
        m.draft.add(request, positions)
        return True

    def _decode(self, m: Motions) -> None:
        decoding = [request for request in m.running if request is not self.chunked]
        growers, short = m.growers(), False
        while len(growers) > len(m.blocks) and len(decoding) > 1:
            short = True
            victim = m.pick(decoding)
            decoding.remove(victim)
            growers = [request for request in growers if request is not victim]
            m.evict(victim, to_head=False)
        if short:
            got = sum(r.num_tokens - r.prompt_tokens for r in decoding)
            all_output = sum(r.length_limit - r.prompt_tokens for r in decoding)
            self.ratio = min(1.0, (got + self.RETRACT_STEPS * len(decoding)) / (all_output + 1))
        elif decoding:
            step = (self.INITIAL_RATIO - self.MINIMUM_RATIO) / self.DECAY_STEPS
            self.ratio = max(self.ratio - step, self.MINIMUM_RATIO)
        if short or self.stale:
            self.full, self.stale = False, 0
        for request in growers:
            m.make_room(request, request.num_tokens)
