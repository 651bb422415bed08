"""The SGLang rules: an independent port of its batch lists, turn by turn, and each of its habits alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Status
from tests.helpers import assert_whole, bare_engine, drain, take_all


class Port:
    """SGLang 0.5.5 without its cache, on counts alone: lists of batches as it keeps them, and no blocks.

    Written along `get_next_batch_to_run`: names of lists and flags are its own. Requests are numbers.
    """

    def __init__(self, requests, slots, pool, size, chunk):
        self.prompt, self.new = [p for p, _ in requests], [o for _, o in requests]
        self.out, self.kv, self.pages = ([0] * len(requests) for _ in range(3))
        self.slots, self.pool, self.size, self.chunk = slots, pool, size, chunk
        self.waiting, self.running, self.last = list(range(len(requests))), [], []
        self.last_extends = self.full = self.beyond = False
        self.chunked = None
        self.ratio = 0.7

    def ceil(self, tokens):
        return -(-tokens // self.size)

    def done(self, r):
        return self.out[r] == self.new[r]

    def turns(self):
        """(positions by request, retracted) of every forward, up to the first that finds no room for a chunk."""
        while not all(map(self.done, range(len(self.new)))):
            if self.last_extends:
                joins = [r for r in self.last if not self.done(r) and r != self.chunked]
                if len(joins) < len(self.last):
                    self.full = False
                if joins and not self.running:
                    self.running, self.full = joins, False  # another object, whose flag is as new
                else:
                    self.running = self.running + joins
            rows = self.extend()
            if self.beyond:
                return
            self.last_extends, retracted = bool(rows), []
            if not rows and self.running:
                before = len(self.running)
                self.running = [r for r in self.running if not self.done(r)]
                if self.running:
                    retracted = self.retract()
                    rows = dict.fromkeys(self.running, 1)
                if len(self.running) < before:
                    self.full = False
            self.last = list(rows)
            if not rows:
                self.ratio = 0.7
                continue
            yield rows, retracted
            for r, positions in rows.items():
                self.kv[r] += positions
                self.pages[r] = self.ceil(self.kv[r])
                if self.kv[r] == self.prompt[r] + self.out[r]:
                    self.out[r] += 1
                    if self.done(r):
                        self.pages[r] = 0

    def extend(self):
        if self.chunked is None and (self.full or not self.waiting):
            return {}
        offset = sum((self.new[r] - self.out[r]) * self.ratio for r in self.running)
        free = (self.pool - sum(self.pages)) * self.size
        chunk, tokens, can_run, resumed = self.chunk, 16384, {}, self.chunked
        if resumed is not None:
            missing = self.prompt[resumed] + self.out[resumed] - self.kv[resumed]
            take = can_run[resumed] = min(missing, chunk, int(free - offset))
            self.beyond = take <= 0  # SGLang computes on with it
            offset += self.ceil(take) * self.size + (self.new[resumed] if take == missing else 0)
            chunk -= self.ceil(take) * self.size
            tokens -= self.ceil(take) * self.size
            self.chunked = None if take == missing else resumed
        for r in self.waiting:
            if len(can_run) >= self.slots - len(self.running):
                self.full = True
            if self.full:
                break
            length = self.prompt[r] + self.out[r]
            whole = self.ceil(length) * self.size
            if length + self.new[r] - self.out[r] >= free - offset:
                self.full = True
                break
            if whole >= tokens and can_run:
                break
            if whole > chunk:
                if chunk < self.size:
                    break
                can_run[r] = chunk // self.size * self.size
                self.chunked = r
                break
            can_run[r] = length
            offset += whole + self.new[r]
            chunk -= whole
            tokens -= whole
            if free - offset <= 0:
                self.full = True
                break
            if min(tokens, chunk) <= 0:
                break
        self.waiting = [r for r in self.waiting if r not in can_run]
        return can_run

    def short(self, rows):
        return sum(self.kv[r] % self.size == 0 for r in rows) > self.pool - sum(self.pages)

    def retract(self):
        if not self.short(self.running):
            self.ratio = max(self.ratio - (0.7 - 0.7 * 0.14) / 600, 0.7 * 0.14)
            return []
        kept, retracted = sorted(self.running, key=lambda r: (self.out[r], -self.prompt[r]), reverse=True), []
        while (not retracted or self.short(kept)) and len(kept) > 1:
            r = kept.pop()
            retracted.append(r)
            self.kv[r] = self.pages[r] = 0
        self.running = kept
        self.waiting = self.waiting + retracted
        got, most = sum(self.out[r] for r in kept), sum(self.new[r] for r in kept)
        self.ratio = min(1.0, (got + 20 * len(kept)) / (most + 1))
        return retracted


def compare(requests, slots, pool, size, chunk):
    """Every forward of the engine against the port's. Returns (positions by request, retracted) of each."""
    engine = bare_engine(slots, pool, size, rows=True, rules="sglang", token_budget=chunk)
    for number, (prompt, output) in enumerate(requests):
        engine.submit(str(number), [1] * prompt, output)
    honest, plans, turns = engine.scheduler.schedule, [], []
    engine.scheduler.schedule = lambda: plans.append(honest()) or plans[-1]
    port = Port(requests, slots, pool, size, chunk or 10**9)
    for rows, retracted in port.turns():
        engine.step()
        plan = plans.pop()
        lengths = {
            int(n): stop - start for n, start, stop in zip(plan.request_ids, plan.starts, plan.stops, strict=True)
        }
        assert lengths == rows
        assert [int(event.request_id) for event in plan.evicted] == retracted
        turns.append((rows, retracted))
    assert port.beyond or not engine.has_work
    drain(engine)
    assert_whole(engine.scheduler)
    return turns


@settings(max_examples=300, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12) | st.integers(30, 40)), min_size=1, max_size=10),
    slots=st.integers(1, 6),
    size=st.integers(1, 6),
    squeeze=st.floats(0, 1),
    pages=st.none() | st.integers(1, 4),
)
def test_every_forward_equals_an_independent_port(requests, slots, size, squeeze, pages):
    needed = [-(-(p + o + 1) // size) for p, o in requests]
    pool = round(max(needed) + squeeze**2 * (sum(needed) - max(needed)))
    compare(requests, slots, pool, size, pages and pages * size)


def test_long_outputs_are_retracted_as_in_the_port():
    """Outputs of one length end together: the estimate of 0.7 of them was too low."""
    sizes = [(12, 500, 300), (16, 400, 100), (16, 200, 60), (6, 40, 40), (10, 60, 30)]
    for slots, pool, output in sizes:
        turns = compare([(4 + n % 17, output + n % 6) for n in range(20)], slots, pool, size=4, chunk=None)
        assert any(retracted for _, retracted in turns)


def admitted(engine, turns):
    return [[admission.request_id for admission in engine.step().admitted] for _ in range(turns)]


def test_a_slot_that_falls_free_is_given_out_one_decode_later():
    engine = bare_engine(slots=2, pool_blocks=100, rules="sglang")
    for name, output in (("a", 2), ("b", 9), ("c", 3)):
        engine.submit(name, [1] * 4, output)
    # "a" ends in the second forward; the third still finds it in the list, and decodes "b"
    assert admitted(engine, 4) == [["a", "b"], [], [], ["c"]]


def test_the_first_prefill_is_followed_by_another_because_the_list_was_empty():
    """The first counts outputs whole: 3 x 44 tokens of 160. As it joins the empty list, the flag is forgotten."""
    engine = bare_engine(slots=9, pool_blocks=40, rules="sglang")
    for number in range(6):
        engine.submit(f"r{number}", [1] * 4, 40)
    assert admitted(engine, 3) == [["r0", "r1", "r2"], ["r3"], []]  # then 0.7 of 3 x 39 of 148 leave room for one


def test_the_ratio_falls_with_each_decode_and_starts_again_when_nobody_runs():
    engine = bare_engine(slots=1, pool_blocks=40, rules="sglang")
    rules = engine.scheduler._decide
    engine.submit("a", [1] * 4, 4)
    engine.submit("b", [1] * 4, 4)
    ratios = []
    while engine.has_work:
        engine.step()
        ratios.append(rules.ratio)
    step = (0.7 - 0.7 * 0.14) / 600
    fallen = [0.7, 0.7 - step, 0.7 - step - step, 0.7 - step - step - step]
    assert ratios == fallen * 2  # SGLang idles for a turn between the two; here that turn is left out


def test_the_last_position_of_a_chunked_prompt_is_a_prefill():
    engine = bare_engine(slots=2, pool_blocks=40, rules="sglang", token_budget=8)
    engine.submit("a", [1] * 9, 3)
    assert [[(p.request_id, p.positions) for p in engine.step().prefills] for _ in range(3)] == [
        [("a", 8)], [("a", 1)], []]  # fmt: skip


def test_cached_blocks_that_come_back_to_life_are_no_longer_free():
    """Of 32 positions "b" brings 8 back to life, takes 4 more and wants 14 to come: 6 are left, and "c" needs 10."""
    engine = bare_engine(slots=4, pool_blocks=8, rules="sglang", prefix_cache=True)
    engine.submit("a", [1] * 9, 1)
    drain(engine)
    take_all(engine, ["a"])
    engine.submit("b", [1] * 9, 14)
    engine.submit("c", [2] * 4, 6)
    assert admitted(engine, 1) == [["b"]]
    assert engine.scheduler.requests["c"].status is Status.WAITING
