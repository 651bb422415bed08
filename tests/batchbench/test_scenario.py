"""Scenario files: what is accepted, what is refused, and the one line that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchbench import Sampling, build_requests, load_scenario
from batchbench.errors import ScenarioError
from batchbench.prompts import load_prompts
from batchbench.scenario import EngineSettings
from batchbench.workload import workload_hash

GOOD = """
name = "x"
[engine]
slots = 2
[workload]
requests = 3
prompt_tokens = 4
output_tokens = 5
[sweep]
pools = [16, 8]
"""


def load(tmp_path, text):
    path = tmp_path / "x.toml"
    path.write_text(text)
    return load_scenario(path)


def test_defaults_and_frozenness(tmp_path):
    scenario = load(tmp_path, GOOD)
    settings = scenario.engine
    assert (settings.model.written, settings.block_size, settings.watermark_blocks) == ("tiny", 16, 0)
    assert (scenario.engine.device, scenario.engine.dtype) == ("auto", "float32")
    with pytest.raises(ValueError, match="frozen"):
        scenario.engine.slots = 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slots = 2", "slotz = 2", "unknown key 'engine.slotz', did you mean 'engine.slots'?"),
        ("[sweep]\npools", "[sweep]\npool", "unknown key 'sweep.pool', did you mean 'sweep.pools'?"),
        ("[engine]", "[engin]", "unknown key 'engin', did you mean 'engine'?"),
        ('name = "x"', 'name = "x"\nversion = 3', "unknown key 'version', did you mean"),
        ('name = "x"', "", "name is missing"),
        ("slots = 2", "", "engine.slots is missing"),
        ('name = "x"', 'name = "../x"', "name: must be up to 100 letters, .*got '../x'"),
        ('name = "x"', 'name = ""', "name: must be up to 100 letters"),
        ('name = "x"', "name = 3", "name: must be a string, got 3"),
        ("[engine]\nslots = 2", "engine = 8", "engine: must be a table, got 8"),
        (
            "pools = [16, 8]",
            "pools = ['8']",
            "sweep.pools.0: must be a number of blocks, bytes such as .*0.5x\", got '8'$",
        ),
        ("pools = [16, 8]", f"pools = {[-1] * 500}", "sweep.pools.2: must be at least 1, got -1; and 497 more$"),
        ("slots = 2", "slots = 0", "engine.slots: .*at least 1, got 0"),
        ("slots = 2", "slots = true", "engine.slots: must be an integer, got True"),
        ("slots = 2", 'slots = "2"', "engine.slots: must be an integer, got '2'"),
        ("slots = 2", "slots = 2.5", "engine.slots: must be an integer, got 2.5"),
        ("slots = 2", 'slots = 2\ndtype = "float16"', "engine.dtype: .*'float32' or 'bfloat16', got 'float16'"),
        ("slots = 2", "slots = 2\nwatermark_blocks = -1", "engine.watermark_blocks: .*got -1"),
        ("pools = [16, 8]", "pools = []", "sweep.pools: must not be empty"),
        ("pools = [16, 8]", "pools = [16, -8]", "sweep.pools.1: .*got -8"),
        ("pools = [16, 8]", "pools = [16, 0]", "sweep.pools.1: .*got 0"),
        ("pools = [16, 8]", "pools = [16, 8, 16]", "sweep: pool 16 is listed twice"),
        ("pools = [16, 8]", "pools = 16", "sweep.pools: must be an array, got 16"),
        ("requests = 3", "requests = 0", "workload.requests: .*got 0"),
        ("requests = 3", "", "workload: requests missing .or give lengths"),
        (
            "requests = 3",
            "requests = 3\nlengths = [[1, 2]]",
            "workload: give either lengths or requests, prompt_tokens",
        ),
        (
            "requests = 3",
            "requests = 3\narrival_iterations = [0, 1]",
            "arrival_iterations has 2 entries for 3 requests",
        ),
        (
            "requests = 3\nprompt_tokens = 4\noutput_tokens = 5",
            "lengths = []",
            "workload: lengths is empty: there are no requests",
        ),
        ("requests = 3\nprompt_tokens = 4\noutput_tokens = 5", "lengths = [[1, 0]]", "workload.lengths.0.1: .*got 0"),
        ("requests = 3\nprompt_tokens = 4\noutput_tokens = 5", "lengths = [[1]]", "workload.lengths.0.1 is missing"),
        ("slots = 2", f"slots = {10**9}", "engine.slots: must be at most 65536, got 1000000000"),
        ("slots = 2", f"slots = {'9' * 5000}", "not valid TOML: Exceeds the limit"),
        (
            "slots = 2",
            f"slots = 0x{'f' * 5000}",
            "engine.slots: must be at most 65536, got a number of hundreds of digits",
        ),
        ('name = "x"', f"name = 0x{'f' * 5000}", "name: must be a string, got a number of hundreds of digits"),
        ("slots = 2", f"slots = 2\nx = {'[' * 3000}", "nested too deeply"),
        ("slots = 2", f"slots = 2\n{'a.' * 3000}a = 1", "nested too deeply"),
        ("pools = [16, 8]", f"pools = [{10**30}]", "sweep.pools.0: must be at most 2147483647"),
        ("prompt_tokens = 4", f"prompt_tokens = {10**12}", "workload.prompt_tokens: must be at most 10000000"),
        ("requests = 3\nprompt_tokens = 4", "requests = 10000\nprompt_tokens = 2000000", "more than 10000000000"),
        ("[sweep]", "[sweep", "not valid TOML: .*line 9"),
        ("requests = 3", 'requests = 3\nprompts = ""', "workload.prompts: .*at least 1 character"),
        ("requests = 3", "requests = 3\nprompts = ['a']", "workload.prompts: must be a string"),
        (
            "requests = 3",
            'requests = 3\nseed = 1\nprompts = "natural"',
            "workload: seed = 1 draws random prompts, but prompts = 'natural'; leave one out",
        ),
        ("requests = 3", "requests = 3\ntemperature = -1", "workload.temperature: must be at least 0.0?, got -1"),
        (
            "requests = 3",
            "requests = 3\ntemperature = 101.0",
            "workload.temperature: must be at most 100.0?, got 101.0",
        ),
        ("requests = 3", "requests = 3\ntemperature = inf", "workload.temperature: must be .*, got inf"),
        ("requests = 3", "requests = 3\ntemperature = nan", "workload.temperature: must be .*, got nan"),
        ("requests = 3", "requests = 3\ntemperature = '1'", "workload.temperature: must be a number, got '1'"),
        ("requests = 3", "requests = 3\ntemperature = true", "workload.temperature: must be a number, got True"),
        ("requests = 3", "requests = 3\ntemperature = 1\ntop_p = 0.0", "workload.top_p: must be above 0.0?, got 0.0"),
        ("requests = 3", "requests = 3\ntemperature = 1\ntop_p = 1.5", "workload.top_p: must be at most 1.0?, got 1.5"),
        ("requests = 3", "requests = 3\ntemperature = 1\ntop_k = -1", "workload.top_k: must be at least 0, got -1"),
        ("requests = 3", "requests = 3\ntemperature = 1\ntop_k = 1.5", "workload.top_k: must be an integer, got 1.5"),
        (
            "requests = 3",
            "requests = 3\ntop_k = 4\nsampling_seed = 1",
            "workload: top_k, sampling_seed would do nothing: temperature is 0, which takes the best token",
        ),
        (
            "prompt_tokens = 4\noutput_tokens = 5",
            'prompts = "natural"',
            "workload: output_tokens missing .or give lengths",
        ),
    ],
)
def test_a_bad_file_gets_one_line_naming_it_and_the_key(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ScenarioError, match=message) as caught:
        load(tmp_path, GOOD.replace(old, new))
    assert str(caught.value).startswith(f"{tmp_path}/x.toml: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ScenarioError, match=r"nope\.toml: No such file"):
        load_scenario(tmp_path / "nope.toml")
    with pytest.raises(ScenarioError, match="is no regular file"):
        load_scenario(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ScenarioError, match=r"latin\.toml: not UTF-8"):
        load_scenario(tmp_path / "latin.toml")


def test_a_byte_order_mark_is_no_obstacle(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_scenario(tmp_path / "x.toml").name == "x"


def test_with_texts_the_prompt_length_may_be_left_out(tmp_path):
    natural = load(tmp_path, GOOD.replace("prompt_tokens = 4", 'prompts = "natural"')).workload
    assert (natural.prompts.written, natural.request_lengths) == ("natural", ((None, 5),) * 3)
    both = load(tmp_path, GOOD.replace("prompt_tokens = 4", 'prompts = "natural"\nprompt_tokens = 4')).workload
    assert both.request_lengths == ((4, 5),) * 3


def test_both_spellings_of_a_workload_are_the_same_workload(tmp_path):
    equal = build_requests(load(tmp_path, GOOD).workload)
    listed = GOOD.replace("requests = 3\nprompt_tokens = 4\noutput_tokens = 5", "lengths = [[4, 5], [4, 5], [4, 5]]")
    explicit = build_requests(load(tmp_path, listed).workload)
    assert equal == explicit
    assert workload_hash(equal) == workload_hash(explicit)


def test_sampling_reaches_every_request_and_greedy_is_none(tmp_path):
    assert {r.sampling for r in build_requests(load(tmp_path, GOOD).workload)} == {None}
    extra = "requests = 3\ntemperature = 1\ntop_k = 40\ntop_p = 0.9\nsampling_seed = 7"
    drawn = build_requests(load(tmp_path, GOOD.replace("requests = 3", extra)).workload)
    assert {r.sampling for r in drawn} == {Sampling(1.0, 40, 0.9, 7)}


def test_the_hash_of_a_greedy_workload_is_what_it_was_before_there_was_sampling():
    requests = build_requests(load_scenario("scenarios/day34.toml").workload)
    assert workload_hash(requests) == "06509a6b8e8424e033450da7c84ea14111c1d8d3cd08f5c929473f5c8b417452"


def test_different_workloads_have_different_hashes(tmp_path):
    changes = [
        "",
        "seed = 1",
        "arrival_iterations = [0, 0, 1]",
        "temperature = 1",
        "temperature = 2",
        "temperature = 1\ntop_k = 9",
        "temperature = 1\ntop_p = 0.9",
        "temperature = 1\nsampling_seed = 9",
    ]
    workloads = [load(tmp_path, GOOD.replace("requests = 3", f"requests = 3\n{change}")).workload for change in changes]
    assert len({workload_hash(build_requests(workload)) for workload in workloads}) == len(changes)


def test_prompts_are_seeded_distinct_and_the_same_on_every_machine(tmp_path):
    requests = build_requests(load(tmp_path, GOOD).workload)
    assert [r.request_id for r in requests] == ["r0", "r1", "r2"]
    assert len({r.prompt for r in requests}) == 3
    assert requests[0].prompt == (157, 100, 250, 204)


# ---- paths ---------------------------------------------------------------------------------------

PATHS = {
    "engine.model": ('model = "tiny"', 'model = "{}"'),
    "engine.calibration": ("slots = 6", 'slots = 6\nreclaim = "cheaper"\nswap_blocks = 9\ncalibration = "{}"'),
    "workload.prompts": ("prompt_tokens = 5", 'prompt_tokens = 5\nprompts = "{}"'),
    "workload.lengths_file": ("prompt_tokens = 5\noutput_tokens = 24", 'lengths_file = "{}"'),
    "workload.trace.path": ("requests = 6\nprompt_tokens = 5\noutput_tokens = 24", 'trace = {{ path = "{}" }}'),
    "workload.output_tokens.file": ("output_tokens = 24", 'output_tokens = {{ dist = "empirical", file = "{}" }}'),
}


def naming(folder, key, path):
    """Day 34 with a path in that key."""
    old, new = PATHS[key]
    text = Path("scenarios/day34.toml").resolve().read_text()
    assert old in text
    (folder / "x.toml").write_text(text.replace(old, new.format(path)))
    return folder / "x.toml"


@pytest.mark.parametrize("key", PATHS)
def test_no_path_leads_out_of_the_scenario_s_folder(tmp_path, key):
    work, outside = tmp_path / "work", tmp_path / "outside"
    work.mkdir(), outside.mkdir()
    (work / "link").symlink_to(outside)
    (work / "inner").mkdir()
    (work / "circle").symlink_to("circle")
    files = {path: naming(work, key, path).rename(work / f"{n}.toml") for n, path in enumerate([
        "../outside/x.txt", "inner/../../outside/x.txt", "link/x.txt", "link", "..",
        "a\\u0000b", "x" * 300, "circle/x",
        "x.txt", "inner/../x.txt", "./link/../x.txt", str(outside / "x.txt"), "inner",
    ])}  # fmt: skip
    *outer, nul, long, circle, plain, inner, through, absolute, folder = files.values()
    for file in outer:
        with pytest.raises(ScenarioError, match=f"{re.escape(key)}: leads out of the scenario's folder; write an abs"):
            load_scenario(file)
    with pytest.raises(ScenarioError, match=f"{re.escape(key)}: is no path: it holds a zero byte"):
        load_scenario(nul)
    with pytest.raises(ScenarioError, match=f"{re.escape(key)}: is no path: its links lead in a circle"):
        load_scenario(circle)
    for file in (long, plain, inner, absolute, folder):
        load_scenario(file)  # whether something is there, who reads it says
    with pytest.raises(ScenarioError, match="leads out"):
        load_scenario(through)  # the system, too, follows the link before it goes up


def test_a_scenario_reads_from_its_own_folder_wherever_it_is_run(tmp_path, monkeypatch):
    naming(tmp_path, "workload.prompts", "mine.txt")
    (tmp_path / "mine.txt").write_text("one\ntwo\n")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine.txt").write_text("not this one\n")
    monkeypatch.chdir(tmp_path / "work")
    for file in ("../x.toml", tmp_path / "x.toml"):
        prompts = load_scenario(file).workload.prompts
        assert load_prompts(prompts) == ("one", "two")
        assert (prompts.written, str(prompts)) == ("mine.txt", str(Path(file).parent / "mine.txt"))
        assert load_scenario(file).model_dump(mode="json")["workload"]["prompts"] == "mine.txt"


def test_a_path_that_a_caller_gives_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(EngineSettings(model="../elsewhere", slots=1).model) == "../elsewhere"
