"""Each invariant is broken on purpose, exactly one at a time, and the message is read."""

from __future__ import annotations

import pytest

from engine.audit import audit
from engine.errors import AuditError
from engine.plan import Write
from engine.request import STILL, Request, Status
from engine.scheduler import Scheduler
from tests.helpers import drain, prompt, real_engine


@pytest.fixture
def engine():
    """Three running (r0..r2), two waiting (r3, r4), some blocks free."""
    engine = real_engine(slots=3, pool_blocks=20)
    for n in range(5):
        engine.submit(f"r{n}", prompt(n, 6), 10)
    engine.step()
    engine.step()
    audit(engine.scheduler, engine.runner.state())
    return engine


def lose_block(s, _):
    s.blocks._free.remove(9)


def own_block_twice(s, r):
    s.requests["r1"].blocks[0] = s.requests["r0"].blocks[0]


def block_free_and_owned(s, _):
    s.blocks._free.append(0)


def foreign_block(s, _):
    s.blocks._free.append(20)


def owned_foreign_block(s, _):
    s.running[0].blocks.append(25)


def lose_slot(s, _):
    s.running[0].slot = None


def share_slot(s, _):
    s.running[1].slot = s.running[0].slot


def waiting_holds_blocks(s, _):
    s.waiting[0].blocks = [9]


def waiting_holds_slot(s, _):
    s.waiting[0].slot = 1


def waiting_holds_computed(s, _):
    s.waiting[1].computed = 3


def queue_out_of_order(s, _):
    s.waiting.rotate(1)


def running_overtakes(s, _):
    s.waiting[0].arrival = 0


def running_out_of_order(s, _):
    s.running.reverse()


def waiting_twice(s, _):
    s.waiting.insert(1, s.waiting[0])


def running_unknown(s, _):
    del s.requests["r1"]


def finished_in_queue(s, _):
    s.waiting[1].status = Status.FINISHED


def finished_holds_blocks(s, _):
    s.requests["done"] = Request("done", 1, 2, 9, 2, [1, 2], status=Status.FINISHED, blocks=[9])


def computed_behind(s, _):
    s.running[0].settled, s.running[0].pace, s.running[0].computed = 8, STILL, 6


def one_block_too_many(s, _):
    s.running[0].blocks += s.blocks.take(1)


def capacity_wrong(s, _):
    s.running[2].capacity += 4


def too_many_tokens(s, _):
    s.running[1].length_limit = 8


def too_few_tokens(s, _):
    s.running[1].prompt_tokens = 8


def text_lost(s, _):
    s.waiting[0].frontier = 6


def running_text_lost(s, _):
    s.running[0].frontier = 8


def finished_text_lost(s, _):
    s.requests["done"] = Request("done", 1, 2, 9, 2, [1, 2], status=Status.FINISHED, frontier=2)


def in_no_queue(s, _):
    s.waiting[0].status = Status.RUNNING


def decoders_miscounted(s, _):
    s.decoding += 1


def growth_forgotten(s, _):
    s._grow_at.clear()


def end_forgotten(s, _):
    s._end_at.clear()


def room_miscounted(s, _):
    s.unused -= 1


def stale_table(s, r):
    r.tables[s.running[1].slot, 0] += 1


def position_never_written(s, r):
    del r._written[s.running[0].blocks[0] * 4 + 2]


def written_by_another(s, r):
    r._written[s.running[0].blocks[0] * 4 + 2] = Write("r9", 2, s.running[0].tokens[2])


def written_beyond_text(s, r):
    request = s.running[0]
    r._written[request.blocks[1] * 4 + 3] = Write(request.request_id, 7, 0)


def written_into_anothers_tail(s, r):
    r._written[s.running[0].blocks[1] * 4 + 3] = Write("r1", 0, 0)


def written_into_a_free_block(s, r):
    r._latest[s.blocks.free[0] * 4] = Write("r1", 0, 0)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lose_block, "block 9 is lost: neither free nor owned"),
        (own_block_twice, "block 0 is held 2 times: by 'r0', 'r1'"),
        (block_free_and_owned, "block 0 is held 2 times: by 'r0', 'the free list'"),
        (foreign_block, "block 20 is not one of the pool's 20"),
        (owned_foreign_block, "block 25 is not one of the pool's 20"),
        (lose_slot, "slot 0 is lost"),
        (share_slot, "slot 0 is held 2 times: by 'r0', 'r1'"),
        (waiting_holds_blocks, r"waiting request 'r3' holds blocks \[9\], slot None, 0 computed"),
        (waiting_holds_slot, r"waiting request 'r3' holds blocks \[\], slot 1, 0 computed"),
        (waiting_holds_computed, "waiting request 'r4' holds .* 3 computed positions; it must hold nothing"),
        (finished_holds_blocks, r"finished request 'done' holds blocks \[9\]"),
        (queue_out_of_order, "waiting 'r4' is ahead of waiting 'r3', which arrived before it"),
        (running_out_of_order, "running 'r2' is ahead of running 'r1', which arrived before it"),
        (running_overtakes, "running 'r2' is ahead of waiting 'r3', which arrived before it"),
        (waiting_twice, "request 'r3' is 2 times in the waiting queue"),
        (running_unknown, "request 'r1' is unknown but in the running queue"),
        (finished_in_queue, "request 'r4' is finished but in the waiting queue"),
        (computed_behind, "running request 'r0' has K/V of 6 positions for 8 tokens, not all but one"),
        (one_block_too_many, "running request 'r0' holds 3 blocks, 7 positions need 2"),
        (capacity_wrong, "running request 'r2' has capacity 12 in 2 blocks"),
        (too_many_tokens, "running request 'r1' has 8 tokens, should be between its prompt's 6 and its limit of 8"),
        (too_few_tokens, "running request 'r1' has 8 tokens, should be between its prompt's 8 and its limit of 16"),
        (running_text_lost, "request 'r0' lost text: 8 tokens, but 8 positions of it were once computed"),
        (finished_text_lost, "request 'done' lost text: 2 tokens, but 2 positions of it were once computed"),
        (text_lost, "request 'r3' lost text: 6 tokens, but 6 positions of it were once computed"),
        (in_no_queue, "request 'r3' is running but in no queue"),
        (decoders_miscounted, "3 requests decode, 4 are counted"),
        (growth_forgotten, "request 'r0' decodes, but nobody awaits its growth or its end"),
        (end_forgotten, "request 'r0' decodes, but nobody awaits its growth or its end"),
        (room_miscounted, "3 allocated positions are unused, 2 are counted"),
        (stale_table, "the block table of slot 1 is stale"),
        (position_never_written, r"K/V of 'r0' at position 2 \(cell 2\) was last written by None"),
        (written_by_another, r"K/V of 'r0' at position 2 \(cell 2\) was last written by \('r9', 2, \d+\)"),
        (written_beyond_text, "cell 7 of 'r0', beyond its 7 computed positions, was written by .'r0', 7, 0."),
        (written_into_anothers_tail, "cell 7 of 'r0', beyond its 7 computed positions, was written by .'r1', 0, 0."),
        (written_into_a_free_block, r"K/V of 'r1' at position 0 was written to cell \d+, not its own"),
    ],
)
def test_breach_is_named(engine, break_it, message):
    break_it(engine.scheduler, engine.runner)
    with pytest.raises(AuditError, match=message):
        audit(engine.scheduler, engine.runner.state())


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (
            lambda by_content, by_block: by_block.popitem(),
            r"content \d+ should be in block \d, which is known to hold N",
        ),
        (lambda by_content, by_block: by_content.popitem(), r"block \d is known to hold .*, which cannot be found"),
        (lambda by_content, by_block: by_content.update({(0, (1,)): (9, 5)}), "content 9 should be in block 5"),
        (
            lambda by_content, by_block: (by_content.update({(0, (1,)): (9, 5)}), by_block.update({5: (0, (1,))})),
            "content 9 of 1 tokens is in block 5, which cannot be",
        ),
    ],
)
def test_a_breach_between_the_maps_of_known_contents_is_named(plant, message):
    engine = real_engine(slots=1, pool_blocks=6, prefix_cache=True)
    engine.submit("r", prompt(0, 13), 5)
    drain(engine)
    assert len(engine.scheduler.blocks.contents[0]) == len(engine.scheduler.blocks.contents[1]) == 4
    plant(*engine.scheduler.blocks.contents)
    with pytest.raises(AuditError, match=message):
        audit(engine.scheduler, engine.runner.state())


def test_a_shared_block_that_is_counted_wrongly_is_named():
    engine = real_engine(slots=1, pool_blocks=6, prefix_cache=True)
    engine.submit("r", prompt(0, 13), 5)
    engine.step()
    engine.scheduler.blocks.owners[0] = 2
    with pytest.raises(AuditError, match="block 0 counts 2 owners, has 1, and is 0 times free"):
        audit(engine.scheduler, engine.runner.state())


def test_a_block_leaked_on_one_release_is_caught_in_that_iteration_by_id(monkeypatch):
    """Every text would be right: only the audit can see this."""
    honest, leaked = Scheduler.release, []

    def leaky(self, request, status):
        if not leaked:
            leaked.append(request.blocks.pop())
        honest(self, request, status)

    engine = real_engine(slots=2, pool_blocks=20)
    engine.submit("short", prompt(0, 6), 3)
    engine.submit("long", prompt(1, 6), 12)
    monkeypatch.setattr(Scheduler, "release", leaky)
    engine.step()
    engine.step()
    with pytest.raises(AuditError, match=r"block (\d+) is lost") as caught:
        engine.step()  # the iteration in which `short` finishes
    assert str(leaked[0]) in str(caught.value)


def test_an_id_used_again_does_not_confuse_the_write_check():
    engine = real_engine(slots=1, pool_blocks=4)
    engine.submit("r", prompt(0, 3), 12)
    for _ in range(10):
        engine.step()
    engine.abort("r")
    engine.submit("r", prompt(1, 1), 14)
    drain(engine)
