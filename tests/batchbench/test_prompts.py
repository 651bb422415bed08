"""Prompts that are text: files and what is wrong with them, the shipped set, and the requests made of them."""

from __future__ import annotations

import pytest

from batchbench import build_requests, engine_tokenizer, load_scenario
from batchbench.errors import ScenarioError, UsageError
from batchbench.paths import FilePath
from batchbench.prompts import load_prompts
from batchbench.scenario import EngineSettings
from batchbench.workload import workload_hash
from batchbench.workload_schema import Workload
from tests.engine.test_gguf_to_folder import written
from tests.helpers import bare_engine, drain

BYTES = engine_tokenizer("own", EngineSettings(slots=1))  # of the embedded model


def workload(prompts, **settings):
    defaults = {} if "lengths" in settings else {"requests": 3, "output_tokens": 5}
    return Workload(prompts=prompts, **(defaults | settings))


def ids(*texts):
    return [tuple(text.encode()) for text in texts]


@pytest.fixture
def three(tmp_path):
    path = tmp_path / "three.txt"
    path.write_text("one\n\ntwo is longer\nthree, longest\n")
    return str(path)


# ---- the shipped set -------------------------------------------------------------------------


def test_the_shipped_prompts_are_forty_different_texts_of_a_few_sentences():
    prompts = load_prompts("natural")
    assert len(prompts) == len(set(prompts)) == 40
    assert all(text == text.lstrip("\n") and 80 <= len(text.encode()) <= 400 for text in prompts)


@pytest.mark.smollm2
def test_the_shipped_prompts_are_20_to_120_tokens_of_smollm2(smollm2_folder):
    tokenizer = engine_tokenizer("own", EngineSettings(model=str(smollm2_folder), slots=1))
    lengths = [len(tokenizer.encode(text)) for text in load_prompts("natural")]
    assert 20 <= min(lengths) <= max(lengths) <= 120


# ---- from texts to requests ------------------------------------------------------------------


def test_texts_become_token_ids_in_order_and_start_again_when_they_run_out(three):
    requests = build_requests(workload(three, requests=5), BYTES)
    assert [r.prompt for r in requests] == ids("one", "two is longer", "three, longest", "one", "two is longer")
    assert [r.request_id for r in requests] == ["r0", "r1", "r2", "r3", "r4"]
    assert {r.output_tokens for r in requests} == {5}


def test_prompt_tokens_are_exact_shorter_texts_are_passed_over_and_longer_ones_cut(three):
    assert [r.prompt for r in build_requests(workload(three, prompt_tokens=6), BYTES)] == ids(
        "two is", "three,", "two is"
    )
    requests = build_requests(workload(three, lengths=((2, 9), (14, 8), (4, 7))), BYTES)
    assert [(r.prompt, r.output_tokens) for r in requests] == list(
        zip(ids("on", "three, longest", "two "), (9, 8, 7), strict=True)
    )


def test_no_text_is_long_enough(three):
    with pytest.raises(ScenarioError, match=r"no prompt of '.*three.txt' has 15 tokens; the longest has 14"):
        build_requests(workload(three, prompt_tokens=15), BYTES)


def test_texts_without_a_tokenizer_are_refused(three):
    with pytest.raises(UsageError, match="needs the engine's tokenizer, and there is none"):
        build_requests(workload(three))


def test_all_prompts_together_have_a_limit(three, monkeypatch):
    monkeypatch.setattr("batchbench.workload.MAX_PROMPT_TOKENS", 29)
    with pytest.raises(ScenarioError, match="the prompts hold 30 tokens together, more than 29"):
        build_requests(workload(three), BYTES)
    monkeypatch.setattr("batchbench.workload.MAX_PROMPT_TOKENS", 30)
    build_requests(workload(three), BYTES)


def test_the_hash_is_over_the_ids_not_over_the_file(three, tmp_path):
    listed = tmp_path / "other.toml"
    listed.write_text("""prompts = ['one', "two is longer", '''\nthree, longest''']""")
    a, b = (build_requests(workload(name), BYTES) for name in (three, str(listed)))
    assert workload_hash(a) == workload_hash(b)
    assert workload_hash(a) != workload_hash(build_requests(workload(three, prompt_tokens=3), BYTES))


# ---- files -----------------------------------------------------------------------------------


def test_a_text_file_has_a_prompt_per_line_as_it_stands(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes("\ufeffé\\n \u2028 a\r\n \r\nb\n".encode())
    assert load_prompts(str(path)) == ("é\\n \u2028 a", "b")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"", "there are no prompts in it"),
        ("x.txt", b"\n \n", "there are no prompts in it"),
        ("x.txt", b"\xff", "not UTF-8"),
        ("x.toml", b"prompts = [", "not valid TOML"),
        ("x.toml", b"prompts = " + b"[" * 5000, "not valid TOML"),
        ("x.toml", b"", "must hold one list of strings, prompts"),
        ("x.toml", b"prompts = 'one'", "must hold one list of strings, prompts"),
        ("x.toml", b"prompts = ['one', 2]", "must hold one list of strings, prompts"),
        ("x.toml", b"prompts = ['one']\nother = 1", "must hold one list of strings, prompts"),
        ("x.toml", b"prompts = ['one', '']", r"prompts\.1 is empty"),
        ("x.toml", b"prompts = ['', 'one']", r"prompts\.0 is empty"),
        ("x.toml", b"prompts = []", "there are no prompts in it"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ScenarioError, match=message) as caught:
        load_prompts(str(tmp_path / name))
    assert str(caught.value).startswith(f"{tmp_path}/{name}: ") and "\n" not in str(caught.value)


def test_paths_that_are_no_prompts(tmp_path, monkeypatch):
    with pytest.raises(ScenarioError, match=r"nope\.txt: No such file"):
        load_prompts(str(tmp_path / "nope.txt"))
    with pytest.raises(ScenarioError, match="'neutral' is neither 'natural' nor the path of a .txt or .toml file"):
        load_prompts("neutral")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ScenarioError, match="is no regular file"):
        load_prompts(str(tmp_path / "folder.txt"))
    monkeypatch.setattr("batchbench.prompts._MAX_BYTES", 3)
    (tmp_path / "big.txt").write_text("long")
    with pytest.raises(ScenarioError, match="more than 3 bytes"):
        load_prompts(str(tmp_path / "big.txt"))


# ---- engines ---------------------------------------------------------------------------------


def test_every_kind_of_model_gives_its_tokenizer_or_says_why_not(tmp_path):
    def tokenizer(model):
        return engine_tokenizer("own", EngineSettings(model=str(model), slots=1))

    path, _ = written(tmp_path / "x.gguf")
    assert tokenizer(path).encode("ab1") == [8, 5]
    unknown, _ = written(tmp_path / "y.gguf", cut="llama-bpe")
    (tmp_path / "folder").mkdir()
    for model, message in [
        (unknown, "pre-tokenizer 'llama-bpe' is not supported"),
        (tmp_path / "folder", "folder: no tokenizer.json, so text cannot become token ids"),
        ("huge", "unknown model 'huge'"),
    ]:
        with pytest.raises(UsageError, match=message):
            tokenizer(model)
    with pytest.raises(UsageError, match="unknown engine 'warp'; known: own"):
        engine_tokenizer("warp", EngineSettings(slots=1))


@pytest.mark.smollm2
def test_the_smollm2_scenario_goes_from_no_eviction_to_many(smollm2_folder):
    """Its schedule, without its forwards."""
    scenario = load_scenario("scenarios/smollm2.toml")
    settings = scenario.engine
    assert str(settings.model) == "scenarios/models/SmolLM2-135M-Instruct"  # where `make model` puts it
    tokenizer = engine_tokenizer("own", settings.model_copy(update={"model": FilePath(str(smollm2_folder))}))
    requests = build_requests(scenario.workload, tokenizer)
    assert len({r.prompt for r in requests}) == len(requests) == 24
    evictions = []
    for pool in scenario.sweep.pools:
        engine = bare_engine(settings.slots, pool, settings.block_size, settings.watermark_blocks)
        for r in requests:
            engine.submit(r.request_id, r.prompt, r.output_tokens)
        evictions.append(sum(len(step.evicted) for step in drain(engine)))
    assert evictions == [0, 3, 9, 15, 23]
