"""Eight engine bugs, planted one at a time: each is caught by the identity check or by the audit."""

from __future__ import annotations

import pytest

from batchbench import build_requests, engine_factory, load_scenario, sweep_pool_sizes
from batchbench.errors import EngineFailed, TextsDiffer
from engine.runner import ModelRunner
from engine.scheduler import Scheduler

POOLS = (48, 12)


def day34(audit=True, pools=POOLS):
    scenario = load_scenario("scenarios/day34.toml")
    factory = engine_factory("own", scenario.engine, audit=audit)
    return sweep_pool_sizes(build_requests(scenario.workload), pools, factory)


def test_without_a_bug_nothing_is_caught():
    assert [t.preemptions for t in day34()] == [0, 7]


def test_resume_that_restarts(monkeypatch):
    """The victim forgets what it generated. Greedy decoding finds the same text again, so the books must tell."""
    honest = Scheduler.evict

    def restart(self, victim):
        honest(self, victim)
        del victim.tokens[victim.prompt_tokens :]
        victim.settled = victim.prompt_tokens

    monkeypatch.setattr(Scheduler, "evict", restart)
    with pytest.raises(EngineFailed, match="AuditError: request 'r4' lost text: 5 tokens, but 8 positions"):
        day34()
    with pytest.raises(EngineFailed, match="'r1' has 44 logit gaps for 24 tokens"):
        day34(audit=False)


def test_resume_off_by_one_position(monkeypatch):
    """The resumed context is fed from one position late, so its first K/V is never written."""
    honest = Scheduler.schedule

    def off_by_one(self):
        plan = honest(self)
        late = {a.slot for a in plan.admitted if a.resumed}
        token_ids, starts, at = [], [], 0
        for slot, start, stop in zip(plan.slots, plan.starts, plan.stops, strict=True):
            skip = int(slot in late)
            token_ids += plan.token_ids[at + skip : at + stop - start]
            starts.append(start + skip)
            at += stop - start
        prefills = [p._replace(positions=p.positions - p.resumed) for p in plan.prefills]
        return plan._replace(token_ids=token_ids, starts=starts, prefills=prefills)

    monkeypatch.setattr(Scheduler, "schedule", off_by_one)
    with pytest.raises(EngineFailed, match=r"AuditError: K/V of 'r1' at position 0 \(cell \d+\) was last written by"):
        day34()
    with pytest.raises(TextsDiffer, match=r"request 'r1', generated token 2\d: .*evicted before it, at 20 generated"):
        day34(audit=False)


def test_stale_block_table(monkeypatch):
    """A slot's next request keeps the last one's blocks in its table."""
    honest = ModelRunner._update_table

    def stale(self, update):
        if update.first > 0 or not self.tables[update.slot].any():
            honest(self, update)

    monkeypatch.setattr(ModelRunner, "_update_table", stale)
    with pytest.raises(EngineFailed, match="AuditError: the block table of slot [01] is stale"):
        day34()
    with pytest.raises(TextsDiffer):
        day34(audit=False)


def test_block_given_to_two_requests(monkeypatch):
    honest = Scheduler._allocate

    def double(self, request, count):
        honest(self, request, count)
        updates = self.draft.table_updates
        other = next((r for r in self.running if r is not request and r.blocks), None)
        if other and request.evictions:
            request.blocks[0] = other.blocks[0]
            updates[-1] = updates[-1]._replace(blocks=list(request.blocks[updates[-1].first :]))

    monkeypatch.setattr(Scheduler, "_allocate", double)
    with pytest.raises(EngineFailed, match=r"AuditError: block \d+ is held 2 times: by 'r\d', 'r\d'"):
        day34()
    with pytest.raises(TextsDiffer, match=r"request 'r\d', generated token \d+"):
        day34(audit=False)


def test_lost_block_on_release(monkeypatch):
    """Every text is right; only the audit can see it."""
    honest, lost = Scheduler.release, []

    def leaky(self, request, status):
        if not lost:
            lost.append(request.blocks.pop())
        honest(self, request, status)

    monkeypatch.setattr(Scheduler, "release", leaky)
    with pytest.raises(EngineFailed, match="AuditError: block [0-9]+ is lost: neither free nor owned"):
        day34()
    lost.clear()
    day34(audit=False)  # both pools finish, and their texts agree


def test_slot_reused_dirty(monkeypatch):
    """A slot's new owner inherits the first entry of the last owner's block table."""
    honest = ModelRunner._update_table

    def dirty(self, update):
        used = self.__dict__.setdefault("used_slots", set())
        inherited = self.tables[update.slot, 0]
        honest(self, update)
        if update.slot in used and update.first == 0:
            self.tables[update.slot, 0] = inherited
        used.add(update.slot)

    monkeypatch.setattr(ModelRunner, "_update_table", dirty)
    with pytest.raises(EngineFailed, match=r"AuditError: the block table of slot \d is stale: .* but 'r\d' owns"):
        day34()
    with pytest.raises(TextsDiffer):
        day34(audit=False)


def test_victim_pushed_to_the_tail(monkeypatch):
    """Every text is right; the queue's order is not."""
    honest = Scheduler.evict

    def to_tail(self, victim):
        honest(self, victim)
        self.waiting.rotate(-1)

    monkeypatch.setattr(Scheduler, "evict", to_tail)
    with pytest.raises(EngineFailed, match=r"AuditError: waiting 'r\d' is ahead of waiting 'r\d', which arrived"):
        day34()


def test_generated_token_dropped_on_eviction(monkeypatch):
    honest = Scheduler.evict

    def drop(self, victim):
        honest(self, victim)
        del victim.tokens[-2]
        victim.settled -= 1

    monkeypatch.setattr(Scheduler, "evict", drop)
    with pytest.raises(EngineFailed, match="AuditError: request 'r4' lost text: 8 tokens, but 8 positions"):
        day34()
    with pytest.raises(EngineFailed, match="'r1' has 25 logit gaps for 24 tokens"):
        day34(audit=False)


def test_generated_token_swapped_on_eviction_is_named_by_the_identity_check(monkeypatch):
    """The count is right, so only the text can tell."""
    honest = Scheduler.evict

    def swap(self, victim):
        honest(self, victim)
        victim.tokens[-2:] = reversed(victim.tokens[-2:])

    monkeypatch.setattr(Scheduler, "evict", swap)
    with pytest.raises(TextsDiffer, match=r"request 'r1', generated token 18: .*evicted later, at 20"):
        day34()
