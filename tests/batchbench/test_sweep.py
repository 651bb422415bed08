"""sweep_pool_sizes: timings only for identical text, refusals before anything runs."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

import pytest

import engine.sampling
from batchbench import (
    Eviction,
    RequestSpec,
    Sampling,
    SweepObserver,
    Text,
    build_requests,
    engine_factory,
    load_scenario,
    sweep_pool_sizes,
)
from batchbench.adapters.fake import FakeClock, ScriptedEngine
from batchbench.errors import EngineFailed, RequestRefused, TextsDiffer, UsageError
from batchbench.scenario import EngineSettings
from engine.gguf_to_folder import convert
from tests.batchbench.scripted import it, request
from tests.engine.test_gguf_to_folder import written

CALM = [it(1), it(1), it(1, finished=("a",))]
EVICTED = (Eviction("a", generated_tokens=1),)
PRESSED = [it(1), it(1, preempted=("a",), evictions=EVICTED, recomputed_tokens=1), it(1, finished=("a",))]


class Factory:
    """Scripted engines by pool size; remembers what it built."""

    def __init__(self, texts, script=CALM, **kwargs):
        self.texts, self.script, self.kwargs, self.built, self.clock = texts, script, kwargs, [], FakeClock()

    def __call__(self, pool_blocks):
        script = CALM if pool_blocks > 8 else self.script
        text = {"a": self.texts.get(pool_blocks, Text((1, 2, 3), (9.0, 9.0, 9.0)))}
        engine = ScriptedEngine(script, text, slots=1, pool_blocks=pool_blocks, clock=self.clock, **self.kwargs)
        self.built.append(engine)
        return engine


def sweep(factory, pools=(16, 8), observer=None):
    return sweep_pool_sizes([request("a", 3)], pools, factory, clock=factory.clock, observer=observer)


def test_timings_come_back_in_the_order_of_the_pools_and_engines_are_closed():
    factory = Factory({})
    assert [t.pool_blocks for t in sweep(factory, (8, 16, 12))] == [8, 16, 12]
    assert all(engine.closed for engine in factory.built)


def test_a_difference_hands_back_nothing_and_names_it_all():
    factory = Factory({8: Text((1, 7, 5), (9.0, 0.25, 9.0))}, PRESSED)
    with pytest.raises(TextsDiffer) as caught:
        sweep(factory)
    assert str(caught.value) == (
        "texts differ, so there are no timings: request 'a', generated token 1: "
        "pool 16 continues [2, 3] (best two logits 9 apart, never evicted); "
        "pool 8 continues [7, 5] (best two logits 0.25 apart, evicted before it, at 1 generated tokens)"
    )
    assert caught.value.exit_code == 4
    assert all(engine.closed for engine in factory.built)


@pytest.mark.parametrize("numerics", ["exact", "fast", None])
def test_a_difference_under_fast_numerics_is_explained(numerics):
    explained = r"; numerics is fast, under which texts may differ between pools; under exact they would not$"
    factory = Factory({8: Text((1, 7, 5))}, PRESSED, numerics=numerics)
    with pytest.raises(TextsDiffer) as caught:
        sweep(factory)
    assert bool(re.search(explained, str(caught.value))) == (numerics == "fast")


def test_an_eviction_after_the_difference_is_not_blamed():
    factory = Factory({8: Text((4, 2, 3), None)}, PRESSED)
    with pytest.raises(TextsDiffer, match="an unreported distance apart, not evicted before it, evicted later, at 1"):
        sweep(factory)


def test_an_engine_that_reports_ids_alone_gets_its_iterations_named():
    script = [it(1), it(1, preempted=("a",)), it(1, finished=("a",))]
    with pytest.raises(TextsDiffer, match="evicted in iterations 1"):
        sweep(Factory({8: Text((4, 2, 3))}, script))


def test_long_continuations_are_cut():
    requests = [request("a", 20)]
    script = [*[it(1)] * 19, it(1, finished=("a",))]

    def factory(pool):
        text = Text(tuple(range(pool, pool + 20)))
        return ScriptedEngine(script, {"a": text}, slots=1, pool_blocks=pool, clock=FakeClock())

    with pytest.raises(TextsDiffer, match=r"\[16, 17, 18, 19, 20, 21, 22, 23, \.\.\. 12 more\]"):
        sweep_pool_sizes(requests, (16, 8), factory)


def test_a_continuation_that_fits_is_shown_whole():
    def factory(pool):
        text = Text(tuple(range(pool, pool + 8)))
        script = [*[it(1)] * 7, it(1, finished=("a",))]
        return ScriptedEngine(script, {"a": text}, slots=1, pool_blocks=pool, clock=FakeClock())

    with pytest.raises(TextsDiffer, match=r"\[16, 17, 18, 19, 20, 21, 22, 23\]"):
        sweep_pool_sizes([request("a", 8)], (16, 8), factory)


def test_every_request_is_compared():
    requests = [request(name) for name in "abc"]

    def factory(pool):
        texts = {"a": Text((1,)), "b": Text((1,)), "c": Text((pool,))}
        return ScriptedEngine([it(3, finished=("a", "b", "c"))], texts, slots=3, pool_blocks=pool, clock=FakeClock())

    with pytest.raises(TextsDiffer, match="request 'c', generated token 0"):
        sweep_pool_sizes(requests, (16, 8), factory)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ((), "the sweep has no pools"),
        ((8, 0), "pool of 0 blocks: must be an integer of at least 1"),
        ((8, -4), "pool of -4 blocks: must be"),
        ((8, 9.5), "pool of 9.5 blocks: must be"),
        ((True,), "pool of True blocks: must be"),
        ((8, 16, 8), "pool of 8 blocks is listed twice"),
    ],
)
def test_bad_pools_are_refused_before_an_engine_is_built(pools, message):
    factory = Factory({})
    with pytest.raises(UsageError, match=message):
        sweep(factory, pools)
    assert not factory.built


def test_no_requests_and_repeated_ids_are_refused():
    factory = Factory({})
    with pytest.raises(UsageError, match="no requests"):
        sweep_pool_sizes([], (8,), factory)
    with pytest.raises(UsageError, match="request id 'a' is used twice"):
        sweep_pool_sizes([request("a"), request("a")], (8,), factory)


def test_a_request_that_the_smallest_pool_refuses_stops_the_sweep_before_it_starts():
    class Started(SweepObserver):
        def on_start(self, pools):
            raise AssertionError("the sweep started")

    with pytest.raises(RequestRefused, match="request 'a': does not fit 8 blocks"):
        sweep(Factory({}, refuse=("a",)), observer=Started())


def test_the_observer_sees_everything_in_order():
    seen = []

    class Watch(SweepObserver):
        def on_start(self, points):
            seen.append(("start", tuple(point.pool_blocks for point in points)))

        def on_point(self, point, which):
            seen.append(("pool", point.pool_blocks))

        def on_iteration(self, iteration, outcome):
            seen.append(iteration)

        def on_timing(self, timing):
            seen.append(("timing", timing.pool_blocks))

    sweep(Factory({}), observer=Watch())
    assert seen == [("start", (16, 8)), ("pool", 16), 0, 1, 2, ("timing", 16), ("pool", 8), 0, 1, 2, ("timing", 8)]


def test_an_engine_failure_is_an_error_and_the_engine_is_closed(monkeypatch):
    factory = Factory({})

    def broken(self):
        raise EngineFailed("out of memory")

    monkeypatch.setattr(ScriptedEngine, "step", broken)
    with pytest.raises(EngineFailed, match="out of memory"):
        sweep(factory)
    assert all(engine.closed for engine in factory.built)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "huge"}, "unknown model 'huge': not tiny, and no checkpoint folder or GGUF file of that path"),
        ({"device": "gpu"}, "unknown device 'gpu'; known: auto, cpu, cuda, cuda:N"),
        ({"device": "mps"}, "unknown device 'mps'"),
        ({"device": "cuda:9"}, "device 'cuda:9' is not there"),
    ],
)
def test_unknown_models_and_devices_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        engine_factory("own", EngineSettings(**({"slots": 1} | change)))


def test_a_model_s_hash_is_of_its_content(tmp_path):
    def hashed(**settings):
        engine = engine_factory("own", EngineSettings(slots=1, device="cpu", **settings))(4)
        return engine.describe().model_hash

    made, _ = written(tmp_path / "x.gguf")
    convert(made, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert hashed(model=str(tmp_path / "a")) == hashed(model=str(tmp_path / "b")) != hashed(model=str(made))
    with open(tmp_path / "b/model.safetensors", "r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        last = weights.read()[0]
        weights.seek(-1, os.SEEK_END)
        weights.write(bytes([last ^ 1]))
    assert hashed(model=str(tmp_path / "a")) != hashed(model=str(tmp_path / "b"))
    assert hashed() == hashed(dtype="bfloat16") != hashed(seed=1)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_no_file_of_a_model_leads_out_of_the_scenario_s_folder(tmp_path, file):
    made, _ = written(tmp_path / "x.gguf")
    convert(made, tmp_path / "work/model")
    (tmp_path / "work/model" / file).rename(tmp_path / file)
    (tmp_path / "work/model" / file).symlink_to(tmp_path / file)
    day34 = Path("scenarios/day34.toml").read_text()
    for name, fits in (("model", False), (tmp_path / "work/model", True)):
        (tmp_path / "work/x.toml").write_text(day34.replace('model = "tiny"', f'model = "{name}"\ndevice = "cpu"'))
        settings = load_scenario(tmp_path / "work/x.toml").engine
        if fits:
            engine_factory("own", settings)
        else:
            with pytest.raises(UsageError, match=f"{file} leads out of the scenario's folder; write the model's abs"):
                engine_factory("own", settings)


def test_an_unknown_engine_is_refused():
    with pytest.raises(UsageError, match="unknown engine 'vllm9'; known: own"):
        engine_factory("vllm9", EngineSettings(slots=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_engine_through_shrinking_pools_with_arrivals_and_ragged_lengths(dtype):
    scenario = load_scenario("scenarios/day34.toml")
    settings = scenario.engine.model_copy(update={"slots": 3, "dtype": dtype, "watermark_blocks": 1})
    lengths = ((3, 20), (17, 5), (1, 30), (8, 8), (4, 1), (12, 19))
    workload = type(scenario.workload)(lengths=lengths, arrival_iterations=(0, 0, 2, 5, 5, 30))
    timings = sweep_pool_sizes(build_requests(workload), (60, 14, 9, 8), engine_factory("own", settings, audit=True))
    assert timings[0].preemptions == 0 < timings[-1].preemptions
    assert len({t.text_digest for t in timings}) == 1
    for timing in timings[1:]:
        assert timing.forward_tokens - timings[0].forward_tokens == timing.rebuilt_tokens


def drawn(dtype="float32", **changes):
    """Day 34 with sampled tokens, through a roomy pool and two that evict."""
    scenario = load_scenario("scenarios/day34.toml")
    settings = scenario.engine.model_copy(update={"dtype": dtype})
    workload = scenario.workload.model_copy(update={"temperature": 1.5, "top_k": 50, "top_p": 0.95} | changes)
    return sweep_pool_sizes(build_requests(workload), (48, 12, 8), engine_factory("own", settings, audit=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_texts_are_identical_through_shrinking_pools(dtype):
    timings = drawn(dtype)
    assert timings[0].preemptions == 0 < timings[1].preemptions < timings[2].preemptions
    digest = timings[0].text_digest
    assert {t.text_digest for t in timings} == {digest}
    others = [drawn(dtype, **change)[0].text_digest for change in (
        {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.5}, {"sampling_seed": 1},
    )]  # fmt: skip
    assert len({digest, *others}) == 6


def test_randomness_that_follows_the_schedule_is_caught(monkeypatch):
    """One stream of numbers for all, as a global generator gives: who draws which depends on the batch."""
    stream = random.Random(0)
    monkeypatch.setattr(engine.sampling.Sampling, "uniform", lambda self, request_id, position: stream.random())
    with pytest.raises(TextsDiffer, match="request 'r0', generated token 0"):
        drawn()


def test_sampling_that_the_engine_refuses_is_one_line():
    spec = RequestSpec("a", (1,), 1, sampling=Sampling(-1.0))
    with pytest.raises(UsageError, match=r"^temperature is -1.0, must be a number of at least 0$"):
        sweep_pool_sizes([spec], (8,), engine_factory("own", EngineSettings(slots=1)))
