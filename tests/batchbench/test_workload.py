"""From traffic in a scenario to requests: lengths, arrivals, prefixes, conversations, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import time
import tomllib
import tracemalloc
from collections import Counter
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchbench import engine_tokenizer, load_scenario
from batchbench.arrivals import TAGS as PROCESS_TAGS
from batchbench.distributions import NANO
from batchbench.errors import ScenarioError, UsageError
from batchbench.lazy_prompts import LazyPrompt, RandomPrompt, Stretch
from batchbench.prompts import load_prompts
from batchbench.protocol import RequestSpec, Sampling
from batchbench.scenario import EngineSettings, _tuples
from batchbench.workload import build_requests, workload_hash
from batchbench.workload_schema import Workload
from tests.batchbench.test_distributions import of_another_process

BYTES = engine_tokenizer("own", EngineSettings(slots=1))  # of the embedded model
DRAWN = """
requests = 40
prompt_tokens = {dist = "lognormal", mean = 50, sigma = 0.5, max = 200}
output_tokens = {dist = "uniform", min = 1, max = 30}
"""


def workload(text):
    return Workload.model_validate(_tuples(tomllib.loads(text)))


def built(text, clock="virtual", tokenizer=None):
    return build_requests(workload(text), tokenizer, clock)


EQUAL = "requests = {}\nprompt_tokens = 10\noutput_tokens = 4\n"


# ---- lengths ---------------------------------------------------------------------------------


def test_lengths_are_drawn_for_prompts_and_outputs_apart():
    requests = built(DRAWN)
    assert len(requests) == 40 and [r.request_id for r in requests] == [f"r{n}" for n in range(40)]
    assert len({len(r.prompt) for r in requests}) > 20 and all(len(r.prompt) <= 200 for r in requests)
    assert len({r.output_tokens for r in requests}) > 10
    fixed = built(DRAWN.replace('{dist = "uniform", min = 1, max = 30}', "5"))
    assert [len(r.prompt) for r in fixed] == [len(r.prompt) for r in requests]  # outputs do not move prompts
    assert {r.output_tokens for r in fixed} == {5}


def test_more_requests_do_not_move_the_first_ones_and_another_seed_moves_all():
    extra = "arrivals = {process = 'poisson', rate = 3}"
    requests = built(DRAWN + extra)
    assert built(DRAWN.replace("40", "80") + extra)[:40] == requests
    other = built(DRAWN + extra + "\nseed = 1")
    assert [len(r.prompt) for r in other] != [len(r.prompt) for r in requests]
    assert [r.arrival for r in other] != [r.arrival for r in requests]


def test_arrivals_do_not_move_lengths():
    with_arrivals = built(DRAWN + "arrivals = {process = 'poisson', rate = 3}")
    assert [(r.prompt, r.output_tokens) for r in with_arrivals] == [(r.prompt, r.output_tokens) for r in built(DRAWN)]


@pytest.mark.parametrize(("correlation", "least", "most"), [("1", 0.95, 1), ("-1", -1, -0.95), ("0.0", -0.5, 0.5)])
def test_correlated_lengths(correlation, least, most):
    requests = built(DRAWN + f"length_correlation = {correlation}")
    order = sorted(requests, key=lambda r: len(r.prompt))
    halves = [sum(r.output_tokens for r in half) / 20 for half in (order[:20], order[20:])]
    # Means of the halves of a uniform 1..30 are 8 and 23 if sorted; 40 draws blur that by about 2.5.
    assert least * 15 - 6 <= halves[1] - halves[0] <= most * 15 + 6


def test_recorded_pairs_stay_pairs(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("10,1\n20,2\n30,3\n")
    requests = built(f"requests = 300\nlengths_file = '{path}'")
    assert all(r.output_tokens * 10 == len(r.prompt) for r in requests)
    assert all(60 <= n <= 140 for n in Counter(r.output_tokens for r in requests).values())  # 100, 5 deviations of 8.2
    column = f"{{dist = 'empirical', file = '{path}', column = %d}}"
    apart = built(f"requests = 300\nprompt_tokens = {column % 1}\noutput_tokens = {column % 2}")
    assert len({(len(r.prompt), r.output_tokens) for r in apart}) == 9
    with pytest.raises(ScenarioError, match=r"nope\.csv: No such file"):
        built(f"requests = 3\nlengths_file = '{tmp_path}/nope.csv'")


# ---- arrivals --------------------------------------------------------------------------------


def test_arrivals_are_on_the_clock():
    said = EQUAL.format(4) + "arrivals = {process = 'constant', rate = 2}"
    assert [r.arrival for r in built(said, "iterations")] == [0, 0, 1, 1]
    assert [r.arrival for r in built(said, "wall")] == [0, NANO // 2, NANO, 3 * NANO // 2]
    listed = EQUAL.format(2) + "arrival_iterations = [3, 1]"
    assert [r.arrival for r in built(listed, "iterations")] == [3, 1]
    with pytest.raises(ScenarioError, match="arrival_iterations counts iterations, but clock is 'virtual'"):
        built(listed, "virtual")


def test_a_closed_loop_is_a_chain_for_every_user():
    requests = built(EQUAL.format(7) + "arrivals = {process = 'closed-loop', users = 3, think = 1.5}")
    assert [r.after for r in requests] == [None, None, None, "r0", "r1", "r2", "r3"]
    assert [r.arrival for r in requests] == [0, 0, 0] + [3 * NANO // 2] * 4
    assert {r.history_tokens for r in requests} == {0}  # another question, not another turn


def test_users_may_think_for_random_times():
    said = "arrivals = {process = 'closed-loop', users = 4, think = {dist = 'exponential', mean = 2}}"
    thought = [r.arrival for r in built(EQUAL.format(4004) + said) if r.after]
    mean = sum(thought) / len(thought) / NANO
    assert len(thought) == 4000 and mean == pytest.approx(2, abs=4 * 2 / 4000**0.5)  # 4 standard errors


# ---- prefixes --------------------------------------------------------------------------------


def test_a_system_prompt_is_the_same_before_every_prompt_and_groups_take_turns():
    plain = built(EQUAL.format(5))
    requests = built(EQUAL.format(5) + "prefix = {tokens = 6, groups = 2, group_tokens = 3}")
    assert {len(r.prompt) for r in requests} == {r.prompt_tokens for r in requests} == {19}
    assert len({tuple(r.prompt)[:6] for r in requests}) == 1
    heads = [tuple(r.prompt)[:9] for r in requests]
    assert heads[0] == heads[2] == heads[4] != heads[1] == heads[3]
    assert [tuple(r.prompt)[9:] for r in requests] == [tuple(r.prompt) for r in plain]
    other = built(EQUAL.format(1) + "seed = 1\nprefix = {tokens = 6}")
    assert tuple(other[0].prompt)[:6] != heads[0][:6]


def test_prefixes_of_texts_are_text(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("abc\ndefg\n")
    said = f"requests = 3\noutput_tokens = 2\nprompts = '{path}'\nprefix = {{tokens = 2, groups = 2, group_tokens = 4}}"
    prompts = [bytes(r.prompt) for r in built(said, tokenizer=BYTES)]
    assert prompts == [b"abcdefabc", b"abgabcdefg", b"abcdefabc"]  # joined: abcdefg abcdefg ..., cut at 2, 6 and 10


# ---- conversations ---------------------------------------------------------------------------

TALK = EQUAL.format(7) + "conversation = {turns = 3, think = 2}\n"


def test_a_turn_follows_the_one_before_and_resends_it():
    requests = built(TALK + "arrivals = {process = 'constant', rate = 0.1}\nprefix = {tokens = 5}")
    assert [r.after for r in requests] == [None, "r0", "r1", None, "r3", "r4", None]
    assert [r.arrival // NANO for r in requests] == [0, 2, 2, 10, 2, 2, 20]
    assert [len(r.prompt) for r in requests] == [15, 10, 10, 15, 10, 10, 15]  # the history holds the prefix
    assert [r.history_tokens for r in requests] == [0, 19, 33, 0, 19, 33, 0]
    assert [r.prompt_tokens for r in requests] == [15, 29, 43, 15, 29, 43, 15]


def test_users_hold_one_conversation_after_the_other():
    requests = built(TALK + "arrivals = {process = 'closed-loop', users = 2, think = 9}")
    assert [r.after for r in requests] == [None, "r0", "r1", None, "r3", "r4", "r2"]
    assert [r.arrival // NANO for r in requests] == [0, 2, 2, 0, 2, 2, 9]
    assert requests[6].history_tokens == 0


def test_turns_may_be_drawn_and_the_last_conversation_is_cut_short():
    requests = built(EQUAL.format(300) + "conversation = {turns = {dist = 'uniform', min = 1, max = 5}}")
    starts = [n for n, r in enumerate(requests) if not r.after] + [300]
    sizes = Counter(after - before for before, after in pairwise(starts))
    assert set(sizes) == {1, 2, 3, 4, 5} and all(10 <= n <= 30 for n in sizes.values())  # 20, 2.5 deviations of 4
    assert len(built(EQUAL.format(4) + "conversation = {turns = 100}")) == 4


# ---- texts -----------------------------------------------------------------------------------


def test_drawn_lengths_run_on_through_the_texts(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("abc\ndefg\n")
    said = f"requests = 4\noutput_tokens = 2\nprompts = '{path}'\nprompt_tokens = {{dist = 'fixed', value = 9}}"
    assert [bytes(r.prompt) for r in built(said, tokenizer=BYTES)] == [b"abcdefgab", b"defgabcde"] * 2
    with pytest.raises(UsageError, match="needs the engine's tokenizer"):
        built(said)
    whole = built(f"requests = 2\noutput_tokens = {{dist = 'fixed', value = 2}}\nprompts = '{path}'", tokenizer=BYTES)
    assert [bytes(r.prompt) for r in whole] == [b"abc", b"defg"]


def test_a_stretch_is_a_cut_of_the_text_told_for_ever():
    text = (5, 6, 7, 8)
    for start in range(9):
        for tokens in range(14):
            stretch = Stretch(text, start, tokens)
            assert len(stretch) == tokens
            assert tuple(stretch) == tuple(text[(start + n) % 4] for n in range(tokens))


def test_turns_take_one_text_after_the_other():
    said = "requests = 3\noutput_tokens = 2\nprompts = 'natural'\nconversation = {turns = 2}"
    requests = built(said, tokenizer=BYTES)
    texts = [text.encode() for text in load_prompts("natural")[:3]]
    assert [bytes(r.prompt) for r in requests] == texts
    assert requests[1].history_tokens == len(texts[0]) + 2


# ---- the page --------------------------------------------------------------------------------


def test_every_process_has_an_example_on_the_page_that_builds():
    examples = re.findall(r"^\| `(arrivals = .*?)` \|", Path("docs/scenarios.md").read_text(), re.MULTILINE)
    assert {workload(EQUAL.format(20) + said).arrivals.process for said in examples} == {
        tag.removeprefix("process ") for tag in PROCESS_TAGS
    }
    for said in examples:
        arrivals = [r.arrival for r in built(EQUAL.format(20) + said, "iterations") if not r.after]
        assert arrivals == sorted(arrivals)


# ---- the hash --------------------------------------------------------------------------------


def test_the_hash_is_of_one_json_array():
    sampling = Sampling(0.5, 3)
    requests = (
        RequestSpec('r"0', (1, 255, 256, 10**6), 3, 5, sampling),
        RequestSpec("r1", RandomPrompt("x", 4), 3, 5, None, 7, "r0", 2),
    )
    rows = [
        ['r"0', [1, 255, 256, 10**6], 3, 5, *astuple(sampling)],
        ["r1", list(requests[1].prompt), 3, 5, ["priority", 7], ["after", "r0", 2]],
    ]
    assert workload_hash(requests) == hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def test_everything_that_changes_a_workload_changes_its_hash():
    said = [
        DRAWN,
        DRAWN + "seed = 1",
        DRAWN + "length_correlation = 0.5",
        DRAWN + "arrivals = {process = 'poisson', rate = 1}",
        DRAWN + "arrivals = {process = 'closed-loop', users = 2}",
        DRAWN + "arrivals = {process = 'closed-loop', users = 2, think = 1}",
        DRAWN + "prefix = {tokens = 3}",
        DRAWN + "prefix = {groups = 1, group_tokens = 3}",
        DRAWN + "conversation = {turns = 2}",
        DRAWN + "conversation = {turns = 2, think = 1}",
    ]
    assert len({workload_hash(built(text)) for text in said}) == len(said)
    assert workload_hash(built(DRAWN + "arrivals = {process = 'burst'}")) == workload_hash(built(DRAWN))


def samples():
    """Hashes of workloads that draw everything, to be compared between processes."""
    everything = DRAWN + (
        "length_correlation = 0.7\nprefix = {tokens = 8, groups = 3, group_tokens = 4}\n"
        "conversation = {turns = {dist = 'zipf', alpha = 1, max = 5}, think = {dist = 'exponential', mean = 1}}\n"
    )
    loop = "arrivals = {process = 'closed-loop', users = 3, think = {dist = 'lognormal', mean = 2, sigma = 1}}"
    return {
        "open": workload_hash(built(everything + "arrivals = {process = 'gamma', rate = 3, burstiness = 0.5}")),
        "closed": workload_hash(built(everything + loop)),
    }


def test_another_process_builds_the_same():
    assert of_another_process(__name__) == samples()


# ---- any workload ----------------------------------------------------------------------------


@st.composite
def traffic(draw):
    requests = draw(st.integers(1, 30))
    lines = [f"requests = {requests}", "prompt_tokens = 10", "output_tokens = {dist = 'uniform', min = 1, max = 9}"]
    lines += draw(st.sampled_from([[], ["prefix = {tokens = 4}"], ["prefix = {groups = 1, group_tokens = 2}"]]))
    turns = draw(st.sampled_from([None, "3", "{dist = 'uniform', min = 1, max = 4}"]))
    lines += [f"conversation = {{turns = {turns}, think = 1}}"] if turns else []
    users = draw(st.one_of(st.none(), st.integers(1, requests)))
    lines += [f"arrivals = {{process = 'closed-loop', users = {users}, think = 2}}"] if users else []
    return "\n".join(lines), users, bool(turns)


@given(traffic())
@settings(deadline=None)
def test_whatever_is_asked_every_request_follows_an_earlier_one_and_users_are_never_more(asked):
    text, users, talks = asked
    try:
        requests = built(text)
    except ScenarioError:  # fewer conversations than users, by the draw
        assume(False)
    earlier = {}
    for r in requests:
        if r.history_tokens:
            before = earlier[r.after]
            assert talks and r.history_tokens == before.prompt_tokens + before.output_tokens
        earlier[r.request_id] = r
        assert r.after is None or r.after in earlier
    after = [r.after for r in requests if r.after]
    assert len(after) == len(set(after))  # nobody is followed by two: each user has one request at a time
    if users:
        assert sum(r.after is None for r in requests) <= users
    assert users or talks or not after


# ---- size ------------------------------------------------------------------------------------


def test_a_hundred_thousand_requests_are_small_and_built_at_once():
    said = workload(
        """
        requests = 100000
        prompt_tokens = {dist = "lognormal", mean = 1000, sigma = 0.5}
        output_tokens = {dist = "lognormal", mean = 200, sigma = 0.5}
        arrivals = {process = "poisson", rate = 5}
        """
    )
    began = time.perf_counter()
    requests = build_requests(said)
    assert time.perf_counter() - began < 10  # about 1 s; ten times that on a loaded machine
    assert all(isinstance(r.prompt, LazyPrompt) for r in requests[:100])
    del requests
    tracemalloc.start()
    requests = build_requests(workload("requests = 10000\nprompt_tokens = 1000\noutput_tokens = 10"))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size / len(requests) < 500


# ---- what is refused -------------------------------------------------------------------------

SCENARIO = """
name = "x"
[engine]
slots = 2
[workload]
requests = 3
prompt_tokens = 4
output_tokens = 5
[sweep]
pools = [16]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("= 4", "= {dist = 'normal', mean = 5}", "workload.prompt_tokens.std is missing"),
        ("= 4", "= {dist = 'normal', mean = 5, std = 0}", "workload.prompt_tokens.std: must be above 0.*got 0"),
        ("= 4", "= {dist = 'normal', mean = 5, std = true}", "workload.prompt_tokens.std: must be a number, got True"),
        (
            "= 4",
            "= {dist = 'lognormal', mean = 5, sigma = 1, maximum = 3}",
            "unknown key 'workload.prompt_tokens.maximum', did you mean 'workload.prompt_tokens.m",
        ),
        ("= 4", "= {dist = 'lognorm'}", "workload.prompt_tokens: must be an integer, or a table whose dist is 'fixed'"),
        ("= 4", "= 'four'", "workload.prompt_tokens: must be an integer, or a table .*got 'four'"),
        ("= 4", "= {dist = 'uniform', min = 9, max = 3}", "workload.prompt_tokens: min = 9 is above max = 3"),
        ("= 4", "= 4\nlengths_file = 'x'", "workload: give either lengths_file or prompt_tokens, output_tokens"),
        ("= 4", "= 4\nlength_correlation = 1.5", "workload.length_correlation: must be at most 1.*got 1.5"),
        (
            "= 4",
            "= {dist = 'zipf', alpha = 1, max = 9}\nlength_correlation = 0.5",
            "workload: length_correlation is of two drawn lengths, but output_tokens is not a table with dist",
        ),
        (
            "= 4",
            "= 4\narrivals = {process = 'poison', rate = 1}",
            "workload.arrivals: must be a table whose process is",
        ),
        (
            "= 4",
            "= 4\narrivals = {process = 'poisson', rate = 0}",
            "workload.arrivals.rate: must be at least 1e-09, got 0",
        ),
        ("= 4", "= 4\narrivals = 'poisson'", "workload.arrivals: must be a table whose process is .*got 'poisson'"),
        (
            "= 4",
            "= 4\narrivals = {process = 'poisson', rat = 1, rate = 2}",
            "unknown key 'workload.arrivals.rat', did you mean 'workload.arrivals.rate'",
        ),
        (
            "= 4",
            "= 4\narrivals = {process = 'closed-loop', users = 2, thinks = 2}",
            "unknown key 'workload.arrivals.thinks', did you mean 'workload.arrivals.think'",
        ),
        (
            "= 4",
            "= 4\narrivals = {process = 'closed-loop', users = 2, think = {dist = 'exponential', meen = 2}}",
            "workload.arrivals.think.mean is missing; unknown key 'workload.arrivals.think.meen', did you mean "
            "'workload.arrivals.think.mean'",
        ),
        (
            "= 4",
            "= 4\narrivals = {process = 'closed-loop', users = 4}",
            "workload: arrivals.users is 4, but there are only 3 requests",
        ),
        (
            "= 4",
            "= 4\narrival_iterations = [0, 0, 0]\narrivals = {process = 'burst'}",
            r"workload: give either arrival_iterations or \[workload.arrivals\], not both",
        ),
        (
            "= 4",
            "= 4\narrival_iterations = [0, 0, 0]\nconversation = {turns = 2}",
            r"workload: give either arrival_iterations or \[workload.conversation\], not both",
        ),
        ("= 4", "= 4\nconversation = {think = 2}", "workload.conversation.turns is missing"),
        ("= 4", "= 4\nconversation = {turns = 0}", "workload.conversation.turns: must be at least 1, got 0"),
        ("= 4", "= 4\nprefix = {}", r"workload.prefix: there is neither tokens \(a system prompt\) nor groups"),
        ("= 4", "= 4\nprefix = {groups = 2}", "workload.prefix: groups and group_tokens belong together"),
        (
            "= 4",
            "= 4\nprefix = {groups = 4, group_tokens = 2}",
            "workload: prefix.groups is 4, but there are only 3 requests",
        ),
        ("= 4", "= 4\nprefixes = {}", "unknown key 'workload.prefixes', did you mean 'workload.prefix'"),
    ],
)
def test_a_contradiction_is_one_sentence_that_names_the_keys(tmp_path, old, new, message):
    path = tmp_path / "x.toml"
    path.write_text(SCENARIO.replace(old, new, 1))
    with pytest.raises(ScenarioError, match=message) as caught:
        load_scenario(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_with_texts_a_seed_must_decide_something(tmp_path):
    texts = "requests = 3\noutput_tokens = 5\nprompts = 'natural'\nseed = 1\n"
    for idle in ("", "arrivals = {process = 'burst'}", "arrivals = {process = 'closed-loop', users = 2, think = 1}"):
        with pytest.raises(ValueError, match="seed = 1 draws random prompts"):
            workload(texts + idle)
    for drawn in (
        "arrivals = {process = 'poisson', rate = 1}",
        "arrivals = {process = 'closed-loop', users = 2, think = {dist = 'exponential', mean = 1}}",
        "conversation = {turns = {dist = 'uniform', min = 1, max = 2}}",
        "prompt_tokens = {dist = 'uniform', min = 1, max = 2}",
    ):
        assert workload(texts + drawn).seed == 1


def test_all_prompts_together_have_a_limit_histories_included(monkeypatch):
    monkeypatch.setattr("batchbench.workload.MAX_PROMPT_TOKENS", 85)
    built(EQUAL.format(8))
    with pytest.raises(ScenarioError, match="the prompts hold 90 tokens together, more than 85"):
        built(EQUAL.format(9))
    with pytest.raises(ScenarioError, match="the prompts hold 124 tokens together, more than 85"):
        built(EQUAL.format(9) + "conversation = {turns = 9}")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "[arrivals]\nprocess = 'closed-loop'\nusers = 4\n",
            "arrivals.users is 4, but there are only 1 conversations",
        ),
        ("[prefix]\ngroups = 3\ngroup_tokens = 5\n", "prefix.groups is 3, but there are only 1 conversations"),
    ],
)
def test_a_user_without_a_conversation_and_a_group_of_nobody_are_refused(table, message):
    text = f"requests = 5\nprompt_tokens = 3\noutput_tokens = 2\n{table}[conversation]\nturns = 5\n"
    workload = Workload.model_validate(tomllib.loads(text))
    with pytest.raises(ScenarioError, match=message):
        build_requests(workload)


def test_a_device_is_no_endless_file_of_lengths():
    workload = Workload.model_validate({"requests": 2, "lengths_file": "/dev/zero"})
    with pytest.raises(ScenarioError, match="/dev/zero: is no regular file"):
        build_requests(workload)
