"""The engine's own counters, and what it refuses."""

from __future__ import annotations

import pytest

from engine.errors import NoProgress
from tests.helpers import bare_engine, drain, prompt, real_engine

COUNTERS = (
    "issued_tokens",
    "collected_tokens",
    "forward_tokens",
    "padded_tokens",
    "prefill_rows",
    "recomputed_tokens",
    "rebuilt_tokens",
)


def test_totals_are_the_sums_of_the_steps():
    engine = real_engine(slots=6, pool_blocks=12)
    for n in range(6):
        engine.submit(f"r{n}", prompt(n, 5), 24)
    steps = drain(engine)
    for name in COUNTERS:
        assert getattr(engine, name) == sum(getattr(step, name) for step in steps) > 0, name
    assert engine.recompute_fraction == 107 / 268


def test_padding_fills_whole_tiles_and_is_no_position():
    engine = real_engine(slots=2, pool_blocks=30)
    engine.submit("a", prompt(0, 30), 2)
    engine.submit("b", prompt(1, 5), 2)
    first, second = drain(engine)
    assert (first.forward_tokens, first.padded_tokens) == (35, 29)
    assert (second.forward_tokens, second.padded_tokens) == (2, 30)


def test_nothing_forwarded_is_a_fraction_of_zero():
    assert bare_engine(1, 1).recompute_fraction == 0.0


def test_a_schedule_that_cannot_go_on_raises_instead_of_hanging():
    engine = bare_engine(slots=1, pool_blocks=4)
    engine.submit("r", [1, 2], 3)
    engine.scheduler.slots.take(1)  # a slot that never comes back
    with pytest.raises(NoProgress, match="no row to forward: 1 waiting, 4 of 4 blocks free"):
        engine.step()
