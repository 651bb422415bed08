"""The floor under a sweep: exact bounds, never above what a run needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchbench.commands.present import plan_rows
from batchbench.predict import floor_iterations, floor_positions, read_bandwidth_bytes_per_s
from batchbench.protocol import EngineDescription, Point
from tests.batchbench.scripted import request
from tests.helpers import bare_engine, drain

DAY34 = [request(f"r{n}", output=24, prompt=5) for n in range(6)]


@pytest.mark.parametrize(("pool", "floor"), [(48, 24), (32, 24), (24, 27), (16, 41), (12, 54), (8, 81)])
def test_day34_floor(pool, floor):
    """648 block-iterations: 4 tokens at each of 2..7 blocks, six times."""
    assert floor_iterations(DAY34, slots=6, block_size=4, pool_blocks=pool) == floor


def test_slots_bound_too():
    assert floor_iterations(DAY34, slots=1, block_size=4, pool_blocks=1000) == 144


def test_positions():
    assert floor_positions(DAY34) == 168


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 30),
)
def test_no_schedule_undercuts_it(lengths, slots, block_size, extra):
    requests = [request(f"r{n}", output, prompt) for n, (prompt, output) in enumerate(lengths)]
    pool = max(-(-(p + o - 1) // block_size) for p, o in lengths) + extra
    engine = bare_engine(slots, pool, block_size)
    for r in requests:
        engine.submit(r.request_id, r.prompt, r.output_tokens)
    steps = drain(engine)
    assert len(steps) >= floor_iterations(requests, slots, block_size, pool)
    assert engine.forward_tokens == floor_positions(requests) + engine.rebuilt_tokens


def test_a_plan_reads_the_weights_once_per_iteration():
    engine = EngineDescription("e", "m", "float32", "cpu", 6, 4, 0, kv_bytes_per_token=768, iteration_weight_bytes=1000)
    (row,) = plan_rows(DAY34, [Point(12)], [engine], bandwidth=100.0)
    assert row == {
        "pool_blocks": 12,
        "choices": "",
        "pool_bytes": 12 * 4 * 768,
        "floor_iterations": 54,
        "floor_positions": 168,
        "weights_read_s": 540.0,
    }


def test_bandwidth_is_a_plausible_number():
    assert 1e8 < read_bandwidth_bytes_per_s(2**23, repeats=2) < 1e13
