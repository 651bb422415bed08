"""The engine's own counters, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from engine.errors import EngineError, NoProgress, NumericsError
from engine.sampler import greedy
from tests.helpers import KERNELS, bare_engine, drain, prompt, real_engine

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
    engine = real_engine(slots=6, pool_blocks=12, kernels="torch")
    for n in range(6):
        engine.submit(f"r{n}", prompt(n, 5), 24)
    steps = drain(engine)
    for name in COUNTERS:
        assert getattr(engine, name) == sum(getattr(step, name) for step in steps) > 0, name
    assert engine.recompute_fraction == 107 / 268


def test_padding_fills_whole_tiles_and_is_no_position():
    engine = real_engine(slots=2, pool_blocks=30, kernels="torch")
    engine.submit("a", prompt(0, 30), 2)
    engine.submit("b", prompt(1, 5), 2)
    first, second = drain(engine)
    tile = engine.runner.model.tiles.rows
    assert (first.forward_tokens, first.padded_tokens) == (35, -35 % tile)
    assert (second.forward_tokens, second.padded_tokens) == (2, -2 % tile)


def test_nothing_forwarded_is_a_fraction_of_zero():
    assert bare_engine(1, 1).recompute_fraction == 0.0


def test_a_schedule_that_cannot_go_on_raises_instead_of_hanging():
    engine = bare_engine(slots=1, pool_blocks=4)
    engine.submit("r", [1, 2], 3)
    engine.scheduler.slots.take(1)  # a slot that never comes back
    with pytest.raises(NoProgress, match="no row to forward: 1 waiting, 4 of 4 blocks free"):
        engine.step()


def test_an_engine_whose_iteration_failed_is_spent(monkeypatch):
    engine = bare_engine(slots=1, pool_blocks=4)
    engine.submit("r", [1, 2], 3)

    def out_of_memory(plan):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner, "execute", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(EngineError, match="an earlier iteration failed"):
        engine.step()


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    assert greedy(logits) == ([1, 0], [0.0, 0.0])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error_not_a_text(bad, kernels):
    engine = real_engine(slots=1, pool_blocks=8, kernels=kernels)
    engine.submit("r", prompt(0, 5), 4)
    engine.step()
    engine.runner.store.values[0, 0, 0] = bad
    with pytest.raises(NumericsError, match="not finite"):
        engine.step()
