"""Scenario files: what is accepted, what is refused, and the one line that says so."""

from __future__ import annotations

import pytest

from batchbench import build_requests, load_scenario
from batchbench.errors import ScenarioError
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
    assert (scenario.engine.model, scenario.engine.block_size, scenario.engine.watermark_blocks) == ("tiny", 16, 0)
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
        ("pools = [16, 8]", "pools = ['8']", "sweep.pools.0: must be an integer, got '8'$"),
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
        ("requests = 3\nprompt_tokens = 4", "requests = 1000\nprompt_tokens = 1000000", "more than 100000000"),
        ("[sweep]", "[sweep", "not valid TOML: .*line 9"),
        ("requests = 3", 'requests = 3\nprompts = ""', "workload.prompts: .*at least 1 character"),
        ("requests = 3", "requests = 3\nprompts = ['a']", "workload.prompts: must be a string"),
        (
            "requests = 3",
            'requests = 3\nseed = 1\nprompts = "natural"',
            "workload: seed = 1 draws random prompts, but prompts = 'natural'; leave one out",
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
    with pytest.raises(ScenarioError, match="Is a directory"):
        load_scenario(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ScenarioError, match=r"latin\.toml: not valid TOML: .*utf-8"):
        load_scenario(tmp_path / "latin.toml")


def test_a_byte_order_mark_is_no_obstacle(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_scenario(tmp_path / "x.toml").name == "x"


def test_with_texts_the_prompt_length_may_be_left_out(tmp_path):
    natural = load(tmp_path, GOOD.replace("prompt_tokens = 4", 'prompts = "natural"')).workload
    assert (natural.prompts, natural.request_lengths) == ("natural", ((None, 5),) * 3)
    both = load(tmp_path, GOOD.replace("prompt_tokens = 4", 'prompts = "natural"\nprompt_tokens = 4')).workload
    assert both.request_lengths == ((4, 5),) * 3


def test_both_spellings_of_a_workload_are_the_same_workload(tmp_path):
    equal = build_requests(load(tmp_path, GOOD).workload)
    listed = GOOD.replace("requests = 3\nprompt_tokens = 4\noutput_tokens = 5", "lengths = [[4, 5], [4, 5], [4, 5]]")
    explicit = build_requests(load(tmp_path, listed).workload)
    assert equal == explicit
    assert workload_hash(equal) == workload_hash(explicit)


@pytest.mark.parametrize("extra", ["seed = 1", "arrival_iterations = [0, 0, 1]"])
def test_a_different_workload_has_a_different_hash(tmp_path, extra):
    a = build_requests(load(tmp_path, GOOD).workload)
    b = build_requests(load(tmp_path, GOOD.replace("requests = 3", f"requests = 3\n{extra}")).workload)
    assert workload_hash(a) != workload_hash(b)


def test_prompts_are_seeded_distinct_and_the_same_on_every_machine(tmp_path):
    requests = build_requests(load(tmp_path, GOOD).workload)
    assert [r.request_id for r in requests] == ["r0", "r1", "r2"]
    assert len({r.prompt for r in requests}) == 3
    assert requests[0].prompt == (157, 100, 250, 204)
