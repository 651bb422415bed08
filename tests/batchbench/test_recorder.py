"""What a recorder keeps of iterations as they come, and every message with which it refuses what cannot have been."""

from __future__ import annotations

import pytest

from batchbench import Admission, Prefill
from batchbench.errors import OutcomeRefused
from batchbench.protocol import IterationBatch, IterationEvents
from batchbench.recorder import Recorder
from tests.batchbench.scripted import it, play, request

REQUESTS = [request("a", 5), request("b", 5), request("late", 1, arrival=9)]


def told(issued, collected=None, **fields):
    return it(issued, collected, **{"began": (), "paused": ()} | fields)


def recorder(*outcomes, arrived=("a", "b")):
    """A recorder that has seen these, one an iteration from 0; those named have arrived."""
    record = Recorder(REQUESTS, 4)
    for request_id in arrived:
        record.arrive(request_id, 0, 0)
    for iteration, outcome in enumerate(outcomes):
        record.add(iteration, outcome)
    return record


def batch(collected, rows=None, events=()):
    """collected: tokens of each iteration."""
    count = len(collected)
    rows = collected if rows is None else [rows] * count
    return IterationBatch(rows, collected, rows, [2] * count, [0] * count, [3] * count, [1] * count, events)


ADMITTED = told(1, began=("a",), admissions=(Admission("a"),))


@pytest.mark.parametrize(
    ("before", "outcome", "message"),
    [
        ((), told(1, finished=("x",), began=("x",)), "iteration 0: 'x' was never submitted"),
        ((), told(1, began=("x",)), "iteration 0: 'x' begins to get tokens, but gets some or is unknown"),
        (
            (told(1, began=("a",)),),
            told(1, paused=("b",)),
            "iteration 1: 'b' gets no more tokens for now, but got none",
        ),
        ((told(1, began=("a",)),), told(1, began=("a",)), "iteration 1: 'a' begins to get tokens, but gets some"),
        ((), told(2, began=("a",)), "iteration 0: 2 tokens are collected, 1 requests get one"),
        ((told(2, began=("a", "b")),), told(2, paused=("b",)), "iteration 1: 2 tokens are collected, 1 requests"),
        ((told(2, began=("a", "b")),), told(2, preempted=("b",)), "iteration 1: 2 tokens are collected, 1 requests"),
        ((told(1, began=("a",)),), told(0), "iteration 1: 0 tokens are collected, 1 requests get one"),
        ((), told(1, finished=("late",), began=("late",)), "iteration 0: 'late' is ahead of its arrival"),
        ((ADMITTED,), told(1, admissions=(Admission("a"),)), "iteration 1: 'a' is admitted, but was running"),
        ((ADMITTED,), told(0, admissions=(), preempted=("b",)), "iteration 1: 'b' is evicted, but was not running"),
        (
            (ADMITTED,),
            told(2, admissions=(), began=("b",), finished=("b",)),
            "iteration 1: 'b' finishes, but was not running",
        ),
        (
            (told(1, began=("a",), finished=("a",)),),
            told(0, preempted=("a",)),
            "iteration 1: 'a' is evicted after it finished",
        ),
        (
            (told(1, began=("a",), finished=("a",)),),
            told(1, began=("a",), finished=("a",)),
            "iteration 1: 'a' finishes twice",
        ),
        ((), told(1, began=("a",), prefills=(Prefill("x", 1, 0, False),)), "iteration 0: 'x' was never submitted"),
    ],
)
def test_what_cannot_have_happened_is_refused(before, outcome, message):
    record = recorder(*before)
    with pytest.raises(OutcomeRefused, match=message):
        record.add(len(before), outcome)


@pytest.mark.parametrize(("collected", "iteration"), [([1, 2, 2], 1), ([2, 3, 2], 2), ([2, 2, 2, 3, 2], 4)])
def test_a_batch_in_which_others_get_tokens_than_its_events_say_is_refused(collected, iteration):
    record = recorder(told(2, began=("a", "b")))
    said = f"iteration {iteration}: {collected[iteration - 1]} tokens are collected, 2 requests get one"
    with pytest.raises(OutcomeRefused, match=said):
        record.add_batch(1, batch(collected, rows=3, events=[IterationEvents(2, ())]), ())


def test_what_cannot_have_happened_is_refused_in_a_batch_too():
    record = recorder(told(2, began=("a", "b")))
    with pytest.raises(OutcomeRefused, match="iteration 3: 'x' was never submitted"):
        record.add_batch(1, batch([2, 2, 2], events=[IterationEvents(2, ("x",))]), ())


def test_tokens_whose_iterations_are_not_told_in_the_end_are_refused():
    """A run of tokens is told when it ends: by an eviction, a pause or the last token."""
    script = [told(1, began=("a",)), told(1, finished=("a",))]
    assert play([request("a", 2)], script).record.runs.number.tolist() == [2]

    class Forgets(Recorder):
        def _close(self, request_id, end):
            super()._close(request_id, end - 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchbench.driver.Recorder", Forgets)
        with pytest.raises(OutcomeRefused, match="the iterations of 1 tokens are told, of 2"):
            play([request("a", 2)], script)


def test_a_batch_is_as_many_iterations_as_it_has():
    record = recorder(told(2, began=("a", "b"), free_blocks=3, unused_tokens=1))
    record.add_batch(1, batch([2, 2, 2]), [100, 110, 120, 130])
    assert record.iterations.tolist() == [0, 1, 2, 3]
    assert (record.start_ns.tolist(), record.end_ns.tolist()) == ([100, 110, 120], [110, 120, 130])
    assert (record.issued, record.collected, record.positions, record.busy) == (8, 8, 8, 4)
    assert (record.free_sum, record.free_samples, record.least_free, record.unused_sum) == (12, 4, 3, 4)
    assert record.runs is not None and len(record.runs) == 0  # both are still under way
    record.add(4, told(2, finished=("a", "b")))
    assert (record.runs.iteration.tolist(), record.runs.number.tolist()) == ([0, 0], [5, 5])


def test_one_silence_about_tokens_is_silence_about_all_of_them():
    for silent in ({"began": None}, {"paused": None}, {"preempted": None}):
        record = recorder(told(1, began=("a",)), told(1, **silent), told(1))
        assert record.runs is None


def test_sums_are_none_once_an_iteration_was_silent():
    record = recorder(told(1, began=("a",), padded_tokens=3), told(1, padded_tokens=4))
    assert record.total("padded_tokens") == 7
    record.add(2, told(1))
    assert record.total("padded_tokens") is None
