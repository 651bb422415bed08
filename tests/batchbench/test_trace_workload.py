"""From a recorded trace to requests: what is taken, at which scale, what prompts share, and what is refused."""

from __future__ import annotations

import json
import re
import tomllib
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import get_args

import pytest

from batchbench import engine_factory, engine_tokenizer, load_scenario
from batchbench.driver import run_workload
from batchbench.errors import ScenarioError, TraceError, UsageError
from batchbench.ledger import LEDGER
from batchbench.protocol import Point
from batchbench.recording import half_up, read_recording
from batchbench.results import load_result
from batchbench.running import pacing_of
from batchbench.scenario import EngineSettings, _tuples
from batchbench.service import Slo
from batchbench.tables import point_tables
from batchbench.traces import FORMATS
from batchbench.workload import build_requests, needs_tokenizer, workload_hash
from batchbench.workload_schema import TraceFormat, TraceSource, Workload
from tests.batchbench.scripted import Tables
from tests.batchbench.test_cli import invoke
from tests.batchbench.test_distributions import of_another_process

BYTES = engine_tokenizer("own", EngineSettings(slots=1))  # of the embedded model
AZURE = "tests/traces/azure2023_code_first2000.csv"
ROWS = "arrived_at,num_prefill_tokens,num_decode_tokens\n10,100,7\n10.5,30,5\n12,20,1\n12,9,40\n14.25,50,3\n"


def workload(text):
    return Workload.model_validate(_tuples(tomllib.loads(text)))


def replayed(path, keys="", clock="virtual", more="", tokenizer=None):
    return build_requests(workload(f'{more}\n[trace]\npath = "{path}"\n{keys}'), tokenizer, clock)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


def lengths(requests):
    return [(r.prompt_tokens, r.output_tokens) for r in requests]


def scenario_file(folder, trace, keys="", pools="[40]", engine="", head='clock = "virtual"'):
    path = folder / "x.toml"
    virtual = "[virtual]\niteration_s = 0.01\n" if "virtual" in head else ""
    path.write_text(
        f'name = "x"\n{head}\n{virtual}[engine]\nslots = 4\nblock_size = 4\n{engine}\n'
        f'[workload.trace]\npath = "{Path(trace).absolute()}"\n{keys}\n[sweep]\npools = {pools}\n'
    )
    return str(path)


# ---- which rows, when, how long --------------------------------------------------------------


def test_rows_are_requests_in_their_order_and_at_their_times(rows):
    requests = replayed(rows)
    assert lengths(requests) == [(100, 7), (30, 5), (20, 1), (9, 40), (50, 3)]
    assert [r.arrival for r in requests] == [0, 500_000_000, 2_000_000_000, 2_000_000_000, 4_250_000_000]
    assert [r.request_id for r in requests] == ["r0", "r1", "r2", "r3", "r4"]
    assert [r.line for r in requests] == [2, 3, 4, 5, 6]
    assert {r.after for r in requests} == {None}


def test_rows_that_are_not_in_order_are_sorted_and_equal_times_stay(rows):
    rows.write_text(ROWS + "11,8,8\n12,1,2\n")
    assert [r.line for r in replayed(rows)] == [2, 3, 7, 4, 5, 8, 6]
    assert [r.line for r in replayed(rows, "max_requests = 3")] == [2, 3, 7]


def test_a_window_counts_from_its_start(rows):
    requests = replayed(rows, "window_s = [1.5, 4.25]")
    assert [(r.line, r.arrival) for r in requests] == [(4, 500_000_000), (5, 500_000_000)]


def test_lengths_choose_after_the_window_and_before_the_number(rows):
    keys = "window_s = [0, 4]\nmax_prompt_tokens = 50\nmax_output_tokens = 39\nmax_requests = 1"
    source = workload(f'[trace]\npath = "{rows}"\n{keys}').trace
    recording = read_recording(source, 0, None)
    assert list(recording.lines) == [3]
    assert recording.tally.lines()[0] == (
        "rows: 5 read = 1 used + 1 dropped (prompt of more than max_prompt_tokens = 50)"
        " + 1 dropped (output of more than max_output_tokens = 39) + 1 dropped (outside the window)"
        " + 1 dropped (beyond the number of requests wanted)"
    )


def test_times_count_from_the_files_first_row_even_where_that_is_dropped(rows):
    assert replayed(rows, "max_prompt_tokens = 30")[0].arrival == 500_000_000


@pytest.mark.parametrize(("scale", "first"), [(2.0, 250_000_000), (0.3, 1_666_666_667), (1, 500_000_000)])
def test_rate_scale_divides_times(rows, scale, first):
    assert replayed(rows, f"rate_scale = {scale}")[1].arrival == first


def test_length_scale_rounds_a_half_up_and_leaves_one(rows):
    assert lengths(replayed(rows, "length_scale = 0.05")) == [(5, 1), (2, 1), (1, 1), (1, 2), (3, 1)]
    assert [half_up(Fraction(n, 4)) for n in range(8)] == [0, 0, 1, 1, 1, 1, 2, 2]


def test_under_iterations_a_second_is_so_many(rows):
    requests = replayed(rows, "iterations_per_s = 3\nrate_scale = 0.5", "iterations")
    assert [r.arrival for r in requests] == [0, 3, 12, 12, 25]  # 4.25 s * 3 / 0.5 = 25.5


def test_under_iterations_seconds_are_refused_unless_all_come_at_once(rows):
    with pytest.raises(
        ScenarioError, match=r"is in seconds, but clock is 'iterations': give trace.iterations_per_s, or"
    ):
        replayed(rows, clock="iterations")
    assert {r.arrival for r in replayed("tests/traces/lognormal_1000_t0.csv", clock="iterations")} == {0}


def test_arrivals_beside_a_trace_replace_its_times(rows):
    constant = 'arrivals = {process = "constant", rate = 0.5}'
    requests = replayed(rows, "window_s = [0.5, 9]", "iterations", constant)
    assert [(r.line, r.arrival) for r in requests] == [(3, 0), (4, 2), (5, 4), (6, 6)]
    users = 'arrivals = {process = "closed-loop", users = 2, think = 4}'
    assert [(r.after, r.arrival) for r in replayed(rows, clock="iterations", more=users)] == [
        (None, 0), (None, 0), ("r0", 4), ("r1", 4), ("r2", 4),
    ]  # fmt: skip


def test_azure_as_published(tmp_path):
    requests = replayed(AZURE, "max_requests = 3")
    assert lengths(requests) == [(4808, 10), (3180, 8), (110, 27)]
    assert [r.arrival for r in requests] == [0, 52_000_000, 98_189_000]


def test_qwen_bailian_turns_come_at_their_recorded_times():
    requests = replayed("tests/traces/qwen_bailian_made.jsonl")
    assert [r.arrival for r in requests] == [0, 512_000_000, 61_114_000_000, 61_114_000_000]
    assert {r.after for r in requests} == {None} and {r.history_tokens for r in requests} == {0}
    first, _, third, _ = requests
    assert third.prompt[:512] == first.prompt[:512] and third.prompt[:521] != first.prompt[:521]


# ---- what prompts share ----------------------------------------------------------------------


def test_equal_hash_ids_are_equal_tokens_and_the_rest_is_the_rows_own():
    first, second, third, fourth = (tuple(r.prompt) for r in replayed("tests/traces/vllm_timed_made.jsonl"))
    assert [len(p) for p in (first, second, third, fourth)] == [100, 48, 33, 16]
    assert first[:16] == second[:16] == third[:16] == fourth
    assert len({first[16:32], second[16:32], third[16:32]}) == 3
    assert first == tuple(replayed("tests/traces/vllm_timed_made.jsonl")[0].prompt)  # made again
    other = replayed("tests/traces/vllm_timed_made.jsonl", more="seed = 1")[0].prompt
    assert other != first and max(first) < 256


def mooncake(folder, *listed):
    path = folder / "m.jsonl"
    with path.open("w") as file:
        for n, (tokens, ids) in enumerate(listed):
            row = {"timestamp": 1000 * n, "input_length": tokens, "output_length": 4, "hash_ids": ids}
            print(json.dumps(row), file=file)
    return path


def test_an_id_stands_for_the_same_wherever_it_is_and_a_part_is_its_beginning(tmp_path):
    path = mooncake(tmp_path, (20, [7, 8, 9]), (16, [8, 7]), (18, [7, 8, 9]), (9, None), (24, ["x", 2**70, -1]))
    keys = 'format = "mooncake"\nprefix_tokens = 8'
    a, b, c, own, big = (tuple(r.prompt) for r in replayed(path, keys))
    assert a[:8] == b[8:] and a[8:16] == b[:8] and a[:18] == c
    assert len(own) == 9 and own[:8] not in (a[:8], b[:8]) and len(big) == 24


def test_a_row_has_the_same_content_whatever_is_left_out(rows):
    whole, part = replayed(rows), replayed(rows, "window_s = [2, 3]")
    assert [tuple(r.prompt) for r in whole][2:4] == [tuple(r.prompt) for r in part]


@pytest.mark.parametrize("scale", [0.05, 0.1, 0.3, 0.77])
def test_scaled_prompts_have_as_many_chunks_as_ids(scale):
    path = "tests/traces/mooncake_fast25_conversation_first300.jsonl"
    recorded = [json.loads(line) for line in Path(path).read_text().splitlines()]
    size = half_up(512 * Fraction(str(scale)))
    requests = replayed(path, f"length_scale = {scale}")
    assert len(requests) == 300
    for request in requests:
        row = recorded[request.line - 1]
        assert -(-request.prompt_tokens // size) == len(row["hash_ids"])
        assert abs(request.prompt_tokens - row["input_length"] * size / 512) <= 1
    shared = [tuple(r.prompt)[:size] for r in requests]
    assert len(set(shared)) == len({row["hash_ids"][0] for row in recorded})


def test_a_prefix_cache_finds_exactly_what_the_ids_share(tmp_path):
    """By hand, in blocks of 4 and chunks of 8: every row comes when the one before is done."""
    path = mooncake(tmp_path, (20, [1, 2, 3]), (22, [1, 2, 4]), (16, [1, 5]), (20, [1, 2, 3]), (8, [1]))
    requests = replayed(path, 'format = "mooncake"\nprefix_tokens = 8')
    settings = EngineSettings(slots=4, block_size=4, prefix_cache=True)
    engine, seen = engine_factory("schedule", settings)(60), []
    step = engine.step

    def watched():
        outcome = step()
        seen.extend(outcome.admissions)
        return outcome

    engine.step = watched
    run_workload(engine, [replace(r, arrival=100 * n) for n, r in enumerate(requests)], batches=False)
    # r3 repeats r0, of which at least the last position is computed; r4 is a single chunk, so its second block is.
    assert [a.shared_tokens for a in seen] == [0, 16, 8, 16, 4]


def samples():
    """Hashes of workloads by what another process might do otherwise."""
    conversation, synthetic = (
        f"tests/traces/mooncake_fast25_{one}_first300.jsonl" for one in ("conversation", "synthetic")
    )
    return {
        "hash ids, scaled": workload_hash(replayed(conversation, "length_scale = 0.05", more="seed = 5")),
        "another trace": workload_hash(replayed(synthetic, "max_requests = 20")),
        "no ids": workload_hash(replayed(AZURE, "max_requests = 50\nrate_scale = 0.7", more="temperature = 0.5")),
    }


def test_it_is_the_same_in_every_process():
    assert of_another_process(__name__) == samples()


# ---- texts -----------------------------------------------------------------------------------


def test_texts_are_read_by_the_engines_tokenizer():
    path = "tests/traces/sharegpt_made.json"
    assert needs_tokenizer(workload(f'[trace]\npath = "{path}"')) and not needs_tokenizer(
        workload(f'[trace]\npath = "{AZURE}"')
    )
    requests = replayed(path, clock="iterations", tokenizer=BYTES)
    assert bytes(requests[0].prompt) == b"Which page holds position 17?"
    assert requests[0].output_tokens == len("With 16 positions in a page, the second.")
    assert {r.arrival for r in requests} == {0} and len(requests) == 2
    short = replayed(path, "length_scale = 0.5\nmax_requests = 1", tokenizer=BYTES)
    assert [(bytes(r.prompt), r.output_tokens) for r in short] == [(b"Which page hold", 20)]


def test_a_text_without_an_output_or_its_length_is_dropped():
    source = TraceSource(path="tests/traces/vllm_custom_made.jsonl")
    recording = read_recording(source, 0, BYTES)
    assert recording.tally.lines()[0] == "rows: 3 read = 2 used + 1 dropped (no output length)"
    assert bytes(recording.prompts[0]) == b"Count to three." and list(recording.output_tokens) == [12, 7]


def test_texts_beyond_the_number_wanted_are_not_tokenised():
    class Once:
        def encode(self, text):
            assert text.startswith(("Which", "With"))
            return BYTES.encode(text)

    source = TraceSource(path="tests/traces/sharegpt_made.json", max_requests=1)
    assert len(read_recording(source, 0, Once()).prompts) == 1


# ---- what is refused -------------------------------------------------------------------------


def test_the_formats_are_those_that_can_be_read():
    assert get_args(TraceFormat) == FORMATS


@pytest.mark.parametrize("said", [
    "requests = 3", "prompt_tokens = 3", "output_tokens = 3", "length_correlation = 0.5", "lengths = [[1, 1]]",
    'lengths_file = "x"', "arrival_iterations = [0]", "priorities = [1]", 'prompts = "natural"',
    "prefix = {tokens = 3}", "conversation = {turns = 3}",
])  # fmt: skip
def test_what_a_trace_says_is_not_said_twice(rows, said):
    with pytest.raises(ValueError, match=rf"give either \[workload.trace\] or {said.split()[0]}, not both"):
        replayed(rows, more=said)


CONSTANT = 'arrivals = {process = "constant", rate = 1}'


@pytest.mark.parametrize(("keys", "more", "message"), [
    ("rate_scale = 2", CONSTANT, r"trace.rate_scale would do nothing: \[workload.arrivals\] replaces"),
    ("iterations_per_s = 2", CONSTANT, r"trace.iterations_per_s would do nothing: \[workload.arrivals\]"),
    ("iterations_per_s = 2", "", "trace.iterations_per_s would do nothing: clock is 'virtual'"),
    ("window_s = [3, 3]", "", r"window_s = \[3, 3\] is empty"),
    ("window_s = [30, 40]", "", r"no row is left to be a request; rows: 5 read = 0 used \+ 5 dropped \(outside the w"),
    ("length_scale = 1.5", "", "less than or equal to 1"),
    ("prefix_tokens = 8", "", "prefix_tokens = 8 would do nothing: vidur has no hash ids"),
    ('format = "mooncake"', "", "not JSON|no column"),
    ("", 'arrivals = {process = "closed-loop", users = 6}', "arrivals.users is 6, but there are only 5 requests"),
    ("rate_scale = 1e-6", "", None),
])  # fmt: skip
def test_contradictions_say_what_is_wrong(rows, keys, more, message):
    if message is None:
        assert replayed(rows, keys, more=more)[-1].arrival == 4_250_000 * 10**9
        return
    with pytest.raises((ValueError, UsageError), match=message):
        replayed(rows, keys, more=more)


def test_texts_have_no_times_and_no_seed():
    path = "tests/traces/sharegpt_made.json"
    with pytest.raises(UsageError, match="texts need the engine's tokenizer"):
        replayed(path)
    with pytest.raises(ScenarioError, match=r"trace.rate_scale would do nothing: trace .* has no times"):
        replayed(path, "rate_scale = 2", tokenizer=BYTES)
    with pytest.raises(TraceError, match="no times, so a window means nothing"):
        replayed(path, "window_s = [0, 1]", tokenizer=BYTES)
    with pytest.raises(ScenarioError, match="seed = 3 draws random prompts, but trace"):
        replayed(path, more="seed = 3", tokenizer=BYTES)


def test_a_time_that_is_too_far(rows):
    rows.write_text(ROWS + "2e9,1,1\n")
    with pytest.raises(ScenarioError, match="an arrival at 1999999990000000000, later than"):
        replayed(rows)


def test_an_unknown_key_or_format_is_named(rows, tmp_path):
    for keys, message in (
        ("rate_scal = 2", "did you mean 'workload.trace.rate_scale'"),
        ('format = "x"', "must be 'azure'"),
    ):
        done = invoke("validate", scenario_file(tmp_path, rows, keys))
        assert done.exit_code == 2 and message in done.stderr


RULES = {
    "batchbench": ("", 0),
    "vllm-v1": ('rules = "vllm-v1"', 0),
    "first-chunk": ('rules = "vllm-v1"\ntoken_budget = 8\nadmission_gate = "first-chunk"', 0),
    "sglang": ('rules = "sglang"', 2),  # the whole length must be less than what is free
    "reserve-output": ('admission = "reserve-output"', 0),
    "static": ('batching = "static"', 0),
    "prefix-cache": ("prefix_cache = true", 0),
}


@pytest.mark.parametrize(("engine", "more"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("command", ["validate", "sweep"])
def test_the_two_that_never_fit_are_refused_by_name(rows, tmp_path, engine, more, command):
    """In blocks of 4: r0 is 100 + 7 tokens, and of the rest r4 is the first that fits without its output alone."""
    needed = -(-(106 + more) // 4)
    path = scenario_file(tmp_path, rows, pools="[60, 24]", engine=engine)
    done = invoke(command, path)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        "error: request 'r0' (trace line 2): its prompt of 100 tokens alone needs 25, more than the pool of 24 blocks "
        f"of 4; with its 7 output tokens the smallest pool that holds it is {needed} blocks"
    )
    done = invoke(command, scenario_file(tmp_path, rows, pools="[60, 25]", engine=engine))
    assert done.stderr.splitlines()[-1] == (
        "error: request 'r0' (trace line 2): its prompt of 100 tokens fits the pool of 25 blocks of 4, but with its 7 "
        f"output tokens it needs {needed}; the smallest pool that holds it is {needed} blocks"
    )
    enough = invoke("validate", scenario_file(tmp_path, rows, pools=f"[60, {needed}]", engine=engine))
    assert enough.exit_code == 0, enough.output


def test_a_reservation_that_does_not_fit_says_so(rows, tmp_path):
    engine = 'admission = "reserve-max"\nmax_tokens = 120'
    done = invoke("validate", scenario_file(tmp_path, rows, pools="[29]", engine=engine))
    assert (
        "(trace line 2): its prompt of 100 tokens fits the pool of 29 blocks of 4, but with the 120 positions"
        in done.stderr
    )
    assert done.stderr.endswith("it needs 30; the smallest pool that holds it is 30 blocks\n")
    done = invoke("validate", scenario_file(tmp_path, rows, pools="[60]", engine=engine.replace("120", "105")))
    assert "(trace line 2): 100 prompt + 7 output tokens feed 106 positions, max_tokens reserves 105" in done.stderr


# ---- the books -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["validate"], ["sweep", "--dry-run"], ["sweep", "--no-progress", "--format", "json"]]
)
def test_the_books_are_printed_and_add_up(tmp_path, command):
    keys = "window_s = [0, 200]\nlength_scale = 0.02\nmax_prompt_tokens = 5000\nmax_requests = 20"
    path = scenario_file(tmp_path, AZURE, keys, pools="[60, 40]")
    out = [] if command[0] == "validate" or "--dry-run" in command else ["--out", str(tmp_path / "out")]
    done = invoke(*command, path, "--engine", "schedule", *out)
    assert done.exit_code == 0, done.output
    about, books, noted = done.stderr.splitlines()[:3]
    assert (
        about == f"trace: {Path(AZURE).absolute()}: azure"
        and noted == "trace: noted: times without a zone, taken as UTC: 2000"
    )
    read, used, *dropped = map(int, re.findall(r"(\d+) (?:read|used|dropped)", books))
    assert (read, used, len(dropped)) == (2000, 20, 3) and read == used + sum(dropped)
    if out:
        assert json.loads(done.stdout)["scenario"] == "x"
        said = load_result(tmp_path / "out").run["trace"]
        assert said["rows_read"] == said["rows_used"] + sum(said["dropped"].values()) == 2000
        assert said["format"] == "azure" and list(said["dropped"].values()) == dropped
        assert len(load_result(tmp_path / "out").rows("requests")) == 2 * used


SAMPLES = sorted(path for path in Path("tests/traces").iterdir() if path.suffix != ".md" and "me2" not in path.name)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_every_sample_is_a_workload_whose_books_add_up(tmp_path, sample):
    path = scenario_file(tmp_path, sample, "length_scale = 0.01\nmax_requests = 50", pools="[900]")
    done = invoke("validate", path, "--engine", "schedule")
    assert done.exit_code == 0, done.output
    read, used, *dropped = map(int, re.findall(r"(\d+) (?:read|used|dropped)", done.stderr.splitlines()[1]))
    assert read == used + sum(dropped) and f"x: {used} requests" in done.stdout


# ---- memory ----------------------------------------------------------------------------------


def many_rows(path, rows):
    """path: whose suffix says whether rows are lengths alone, or have eight hash ids each."""
    with path.open("w") as file:
        if path.suffix == ".csv":
            print("arrived_at,num_prefill_tokens,num_decode_tokens", file=file)
            file.writelines(f"{n / 1000},4000,{300 + n % 300}\n" for n in range(rows))
        else:
            for n in range(rows):
                ids = [8 * (n % 5000) + m for m in range(8)]
                row = {"timestamp": n, "input_length": 4000, "output_length": 300 + n % 300, "hash_ids": ids}
                print(json.dumps(row), file=file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "keys"),
    [("many.csv", 30_000, ""), ("many.jsonl", 20_000, ""), ("many.jsonl", 20_000, "max_requests = 300000")],
)
def test_rows_take_little_memory(tmp_path, name, rows, keys):
    """A million rows must not need a gigabyte."""
    path = tmp_path / name
    many_rows(path, rows)
    tracemalloc.start()
    try:
        requests = replayed(path, keys)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(requests) == rows and requests[-1].prompt_tokens == 4000
    assert kept / rows < 500 and peak / rows < 1000, (kept / rows, peak / rows)


# ---- the committed scenarios -----------------------------------------------------------------


def ledgers(scenario, name, pool, choices, loaded={}):  # noqa: B006  # the model, once
    """Every table of a run but for what only a forward tells."""
    settings = scenario.engine
    requests = build_requests(scenario.workload, None, scenario.clock)
    if name == "own":
        factory = loaded.setdefault("own", engine_factory("own", settings))
        factory.settings = settings
    else:
        factory = engine_factory(name, settings)
    engine, tables = factory(pool, **choices), Tables()
    sink = tables.ledger(Point(pool, tuple(choices.items())), engine.describe())
    timing = run_workload(engine, requests, pacing=pacing_of(scenario), sink=sink, choices=tuple(choices.items()))
    tables.close()
    found = {**tables, **point_tables(0, timing, None, Slo())}
    return {
        n: found[n].drop_columns([c for c in ("numerics", "padded_tokens", "copy_s") if c in found[n].column_names])
        for n in (*LEDGER, "requests", "service")
    }


@pytest.mark.parametrize(("name", "pool", "choices"), [
    ("code_completion", 500, {}),
    ("code_completion", 300, {}),
    ("agents", 100, {"prefix_cache": False}),
    ("agents", 200, {"prefix_cache": True}),
    ("agents", 100, {"prefix_cache": True}),
])  # fmt: skip
def test_the_schedule_counts_what_the_engine_counts(name, pool, choices):
    """Under the virtual clock seconds are the same, too."""
    scenario = load_scenario(f"scenarios/{name}.toml")
    want, got = (ledgers(scenario, engine, pool, choices) for engine in ("own", "schedule"))
    assert len(want["evictions"]) and len(want["token_runs"]) and len(want["iterations"])
    assert set(want) >= {"iterations", "admissions", "prefills", "evictions", "token_runs", "requests"}
    for table in want:
        assert got[table].to_pylist() == want[table].to_pylist(), table


def test_hash_ids_are_shared_alike_by_schedule_and_engine(tmp_path):
    trace = "tests/traces/mooncake_fast25_conversation_first300.jsonl"
    keys = "length_scale = 0.02\nmax_requests = 40\nmax_prompt_tokens = 30000\nrate_scale = 500"
    scenario = load_scenario(scenario_file(tmp_path, trace, keys, engine="prefix_cache = true"))
    want, got = (ledgers(scenario, engine, 170, {}) for engine in ("own", "schedule"))
    shared = want["admissions"].column("shared_tokens").to_pylist()
    assert sum(shared) > 200 and len(want["evictions"]) and len(want["requests"]) == 40
    for table in want:
        assert got[table].to_pylist() == want[table].to_pylist(), table


def test_agents_resend_what_was_said_and_the_cache_finds_it():
    """On the real engine, in a roomy pool: all full blocks of a history but for its last position are found."""
    scenario = load_scenario("scenarios/agents.toml")
    requests = build_requests(scenario.workload, None, scenario.clock)[:24]  # three agents of eight turns
    engine = engine_factory("own", scenario.engine)(2000, prefix_cache=True)
    told, admitted = {}, {}
    submit, step = engine.submit, engine.step

    def watched():
        outcome = step()
        admitted.update({a.request_id: a for a in outcome.admissions})
        return outcome

    engine.submit = lambda request: (told.update({request.request_id: tuple(request.prompt)}), submit(request))
    engine.step = watched
    timing = run_workload(engine, requests, pacing=pacing_of(scenario))
    followers = [r for r in requests if r.after]
    assert len(followers) == 21
    for request in followers:
        said = told[request.after] + timing.texts[request.after].token_ids
        assert told[request.request_id] == said + tuple(request.prompt)
        assert len(said) == request.history_tokens
        shared = admitted[request.request_id].shared_tokens
        assert shared == (len(said) - 1) // 16 * 16, request.request_id
