"""The command line: exit codes, single-line errors, formats, and that bad input writes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from batchbench.asking import describe
from batchbench.cli import app
from batchbench.commands.present import Format, Sheet
from batchbench.results import load_result
from batchbench.scenario import Scenario
from batchbench.schema import TABLES
from engine.scheduler import Scheduler
from tests.engine.test_checkpoint import COMMON

DAY34 = Path("scenarios/day34.toml").resolve()


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scenario(here, *changes):
    text = DAY34.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (here / "x.toml").write_text(text)
    return "x.toml"


def everything_under(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def assert_refused(done, here, message):
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert done.stdout == ""
    assert {path.name for path in here.iterdir()} <= {"x.toml", "file"}, "something was left behind"


def test_sweep_writes_tables_and_figures_and_says_where(here):
    done = invoke("sweep", str(DAY34))
    assert done.exit_code == 0, done.output
    tables = sorted(TABLES)
    figures = ["pool_sweep", "pool_use", "rows_against_positions", "service", "slot_timeline", "staircase", "victims"]
    assert everything_under(here) == sorted(
        [f"plots/day34/{name}.png" for name in figures]
        + [f"results/day34/{name}.parquet" for name in tables]
        + ["results/day34/run.json"]
    )
    assert "tables: results/day34/*.parquet" in done.stdout
    assert "figures: plots/day34/*.png" in done.stdout
    assert [line.split()[1] for line in done.stderr.splitlines()] == ["48", "32", "24", "16", "12", "8"]
    assert "6/6 requests, 64 iterations, 7 evictions" in done.stderr
    assert all(re.search(r"evictions, [0-9.]+ (ms|s|us)$", line) for line in done.stderr.splitlines())


def test_no_progress_is_silent_and_out_moves_everything(here):
    done = invoke("sweep", str(DAY34), "--no-progress", "--out", "o")
    assert (done.exit_code, done.stderr) == (0, "")
    assert {path.split("/")[0] for path in everything_under(here)} == {"o"}
    assert (here / "o/plots/staircase.png").exists()


def test_json_is_complete_and_has_nulls_not_nans(here):
    path = scenario(here, ("pools = [48, 32, 24, 16, 12, 8]", "pools = [7]"), ("requests = 6", "requests = 1"))
    done = invoke("sweep", path, "--format", "json", "--out", "o")
    document = json.loads(done.stdout)
    (pool,) = document["pools"]
    assert pool["issued_tokens"] == 24
    assert pool["recomputed_tokens_per_preemption"] is None
    assert document["tables"] == "o"


def test_markdown(here):
    done = invoke("sweep", str(DAY34), "--format", "markdown", "--no-progress")
    lines = done.stdout.splitlines()
    assert (
        lines[0]
        == "| pool | occupancy | evictions per request | recompute share | victim latency | paired latency | text |"
    )
    assert lines[6] == "| 12 blocks | 0.375 | 1.17 | 39.9% | 1.90x | 1.90x | identical |"


def test_a_bar_in_markdown_makes_no_column():
    assert Sheet(("a",), (("x|y",),)).markdown().splitlines()[-1] == "| x\\|y |"


def test_one_pool_claims_no_comparison(here):
    done = invoke("sweep", scenario(here, ("pools = [48, 32, 24, 16, 12, 8]", "pools = [12]")), "--out", "o")
    assert "not compared" in done.stdout
    assert "identical" not in done.stdout


def test_dry_run_predicts_and_writes_nothing(here):
    done = invoke("sweep", str(DAY34), "--dry-run")
    assert done.exit_code == 0
    assert everything_under(here) == []
    row = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["12"])
    assert row[:7] == ["12", "blocks", "36.0", "KiB", "54", "168", row[6]]
    document = json.loads(invoke("sweep", str(DAY34), "--dry-run", "--format", "json").stdout)
    assert [pool["pool_bytes"] for pool in document["pools"]] == [n * 4 * 768 for n in (48, 32, 24, 16, 12, 8)]


def test_a_dry_run_describes_one_engine_per_choice(here, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "batchbench.commands.sweep.describe", lambda make, point: asked.append(point) or describe(make, point)
    )
    path = scenario(here, ("pools = [48, 32, 24, 16, 12, 8]", "pools = [48, 12, 8]\nslots = [6, 2]"))
    document = json.loads(invoke("sweep", path, "--dry-run", "--format", "json").stdout)
    assert [dict(point.choices)["slots"] for point in asked] == [6, 2]
    assert [pool["pool_bytes"] for pool in document["pools"]] == [n * 4 * 768 for n in (48, 12, 8)] * 2


@pytest.mark.parametrize(
    ("file", "option", "want"),
    [(None, None, "exact"), (None, "fast", "fast"), ("fast", None, "fast"), ("fast", "exact", "exact")],
)
def test_numerics_is_the_options_or_the_files(here, file, option, want):
    path = scenario(here, *([("slots = 6", f'slots = 6\nnumerics = "{file}"')] if file else []))
    chosen = ("--numerics", option) if option else ()
    plan = invoke("sweep", path, *chosen, "--dry-run").stdout
    assert ("blocks of 4, numerics fast\n" in plan) == (want == "fast")
    assert json.loads(invoke("sweep", path, *chosen, "--dry-run", "--format", "json").stdout)["numerics"] == want


def test_every_table_of_a_fast_sweep_says_so(here, monkeypatch):
    drawn = "batchbench.commands.sweep.draw"  # takes seconds, thrice
    monkeypatch.setattr(drawn, lambda result, folder: [folder / "none.png"])
    path = scenario(here, ("[48, 32, 24, 16, 12, 8]", "[48, 12]"))
    done = {name: invoke("sweep", path, "--numerics", "fast", "--format", name) for name in Format}
    assert {one.exit_code for one in done.values()} == {0}
    rows = [line.split() for line in done[Format.table].stdout.splitlines() if " blocks " in line]
    assert [row[-2:] for row in rows[:2]] == [["identical", "fast"]] * 2
    lines = done[Format.markdown].stdout.split("\n\n")[0].splitlines()
    assert [line.split("|")[-2].strip() for line in lines] == ["numerics", "---:", "fast", "fast"]
    assert {pool["numerics"] for pool in json.loads(done[Format.json].stdout)["pools"]} == {"fast"}
    result = load_result(here / "results/day34")
    for name in TABLES:
        assert {row["numerics"] for row in result.rows(name)} == {"fast"}, name
    assert (result.run["scenario"]["engine"]["numerics"], result.run["engine"]["numerics"]) == ("fast", "fast")
    assert result.run["engine"]["numerics_detail"] == "fast (torch, no promise)"


def test_native_kernels_have_no_fast_numerics(here):
    path = scenario(here, ("slots = 6", 'slots = 6\nkernels = "native"'))
    done = invoke("sweep", path, "--numerics", "fast")
    assert_refused(done, here, "numerics fast leaves the shapes to torch; kernels 'native' are exact alone")


def test_audit_runs_clean(here):
    assert invoke("sweep", str(DAY34), "--audit").exit_code == 0


def test_validate_and_schema(here):
    done = invoke("validate", str(DAY34))
    assert done.exit_code == 0
    assert "day34: 6 requests through pools 48, 32, 24, 16, 12, 8" in done.stdout
    assert json.loads(invoke("schema").stdout) == Scenario.model_json_schema()


def test_plot_draws_again_from_the_tables_alone(here):
    invoke("sweep", str(DAY34), "--out", "o")
    done = invoke("plot", "o", "--out", "again", "--point", "5")
    assert done.exit_code == 0
    assert [Path(line).name for line in done.stdout.split()] == [
        "pool_sweep.png",
        "staircase.png",
        "slot_timeline.png",
        "pool_use.png",
        "service.png",
        "victims.png",
        "rows_against_positions.png",
    ]
    assert (here / "again/staircase.png").read_bytes() == (here / "o/plots/staircase.png").read_bytes()


# ---- what callers saw ----------------------------------------------------------------------------

TWO_POOLS = ("[48, 32, 24, 16, 12, 8]", "[48, 12]")
NAME = 'name = "day34"'


@pytest.fixture
def undrawn(monkeypatch):
    """Figures take seconds."""
    monkeypatch.setattr("batchbench.commands.sweep.draw", lambda result, folder: [folder / "none.png"])


def second_table(path, *options):
    """(title, headings, rows of cells) of a sweep's second table, as Markdown."""
    done = invoke("sweep", path, "--format", "markdown", "--no-progress", *options)
    assert done.exit_code == 0, done.output
    _, title, table = done.stdout.split("\n\n")[-3:]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return title, lines[0], lines[2:]


HEADINGS = ["pool", *(f"{m} {p}" for m in ("ttft", "itl", "tpot", "e2e", "queue") for p in ("p50", "p99"))]


def test_a_schedule_is_told_in_iterations(here, undrawn):
    title, headings, rows = second_table(scenario(here, TWO_POOLS), "--engine", "schedule")
    assert (title, headings) == ("service in iterations", HEADINGS)
    assert rows[0] == ["48 blocks", "1", "1", "1", "1", "1.00", "1.00", "24", "24", "0", "0"]
    assert rows[1][7:9] == ["36", "64"]  # r2's and r5's latency


def test_modelled_seconds_are_told_where_there_are_some(here, undrawn):
    clock = f'{NAME}\nclock = "virtual"\n[virtual]\niteration_s = 0.02'
    title, headings, rows = second_table(scenario(here, TWO_POOLS, (NAME, clock)), "--engine", "schedule")
    assert (title, headings) == ("service in modelled seconds", HEADINGS)
    assert rows[0] == ["48 blocks", *["20.0 ms"] * 6, *["480.0 ms"] * 2, *["0 us"] * 2]
    assert rows[1][7:9] == ["720.0 ms", "1.28 s"]


def test_the_engine_is_told_in_measured_seconds(here, undrawn):
    title, headings, rows = second_table(scenario(here, TWO_POOLS))
    assert (title, headings) == ("service in measured seconds, inside the engine", HEADINGS)
    assert all(re.fullmatch(r"[0-9.]+ (us|ms|s)", cell) for row in rows for cell in row[1:])


def test_goodput_has_a_column_where_there_are_objectives(here, undrawn):
    slo = f"{NAME}\nclock = 'virtual'\n[slo]\ne2e_s = 0.72\n[virtual]\niteration_s = 0.02"
    _, headings, rows = second_table(scenario(here, TWO_POOLS, (NAME, slo)), "--engine", "schedule")
    assert headings == [*HEADINGS, "goodput"]
    assert [row[-1] for row in rows] == ["100.0%", "50.0%"]  # latencies of 24, 28, 36, 44, 56 and 64 iterations
    without = f"{NAME}\n[slo]\ne2e_s = 0.72"
    _, headings, rows = second_table(scenario(here, TWO_POOLS, (NAME, without)), "--engine", "schedule")
    assert [row[-1] for row in rows] == ["not known"] * 2


def test_choices_have_a_column_there_too(here, undrawn):
    path = scenario(here, ("pools = [48, 32, 24, 16, 12, 8]", "pools = [12]\nslots = [6, 1]"))
    _, headings, rows = second_table(path, "--engine", "schedule")
    assert (headings[:3], [row[1] for row in rows]) == (["pool", "choices", "ttft p50"], ["slots 6", "slots 1"])


def test_json_has_every_service_row(here, undrawn):
    path = scenario(here, TWO_POOLS)
    document = json.loads(invoke("sweep", path, "--format", "json", "--no-progress").stdout)
    assert document["service"] == load_result(here / "results/day34").rows("service")
    assert {(row["metric"], row["unit"]) for row in document["service"]} == {
        (metric, unit) for metric in ("ttft", "itl", "tpot", "e2e", "queue") for unit in ("iterations", "s")
    }


def test_in_a_terminal_a_second_table_follows_the_first(here, undrawn):
    done = invoke("sweep", scenario(here, TWO_POOLS), "--engine", "schedule", "--no-progress")
    _, second, rest = done.stdout.split("\n\n")
    lines = second.splitlines()
    assert (lines[0], lines[2].split()) == ("service in iterations", ["pool", *["p50", "p99"] * 5])
    assert max(map(len, lines)) <= 100
    assert rest.startswith("tables: ")
    assert "between runs" not in done.stdout


def test_real_time_is_marked(here, undrawn):
    path = scenario(here, TWO_POOLS, (NAME, f'{NAME}\nclock = "wall"'))
    done = invoke("sweep", path, "--no-progress")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("real time: counters may differ between runs\n")
    assert "\n\nservice in real seconds: counters may differ between runs\n" in done.stdout
    assert second_table(path)[0] == "service in real seconds: counters may differ between runs"


@pytest.mark.parametrize("command", ["sweep", "validate"])
def test_a_schedule_in_real_time_is_refused_before_anything_is_written(here, command):
    path = scenario(here, (NAME, f'{NAME}\nclock = "wall"'))
    assert_refused(invoke(command, path, "--engine", "schedule"), here, "clock = 'wall': a schedule computes nothing")


def test_the_demand_is_not_known_in_real_time(here):
    path = scenario(here, (NAME, f'{NAME}\nclock = "wall"'), ("[48, 32, 24, 16, 12, 8]", '["1x"]'))
    assert_refused(invoke("sweep", path), here, "pools relative to the demand: a schedule finds it, and takes no real")


# ---- texts ---------------------------------------------------------------------------------------

NATURAL = ("requests = 6\nprompt_tokens = 5", 'requests = 6\nprompts = "natural"')


def test_show_text_prints_every_prompt_and_completion_escaped(here):
    (here / "p.txt").write_text("a\\b\x1b[31m é\u202e\n")
    path = scenario(here, (NATURAL[0], 'requests = 2\nprompts = "p.txt"'), ("[48, 32, 24, 16, 12, 8]", "[48, 17]"))
    done = invoke("sweep", path, "--show-text", "--no-progress")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.split("figures: ")[1].splitlines()
    assert lines[1:3] == ["", "r0 prompt      a\\\\b\\x1b[31m é\\u202e"]
    assert lines[3].startswith("   completion  ") and lines[5].startswith("r1 prompt")
    assert "\x1b" not in done.stdout
    document = json.loads(invoke("sweep", path, "--show-text", "--no-progress", "--format", "json").stdout)
    assert [text["request_id"] for text in document["texts"]] == ["r0", "r1"]
    assert {text["prompt"] for text in document["texts"]} == {"a\\b\x1b[31m é\u202e"}
    stored = load_result(here / "results/day34").rows("texts")[0]
    assert document["texts"][0]["completion"] == bytes(stored["token_ids"]).decode(errors="replace")


def test_a_terminal_that_lacks_the_characters_gets_escapes(here):
    (here / "p.txt").write_text("é日\n")
    path = scenario(here, (NATURAL[0], 'requests = 1\nprompts = "p.txt"'), ("[48, 32, 24, 16, 12, 8]", "[17]"))
    done = subprocess.run(
        [sys.executable, "-m", "batchbench", "sweep", path, "--show-text", "--no-progress"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(DAY34.parents[1]), "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "r0 prompt      \\xe9\\u65e5\n" in done.stdout


def test_texts_are_printed_only_when_asked_for(here):
    assert "texts" not in json.loads(invoke("sweep", str(DAY34), "--format", "json").stdout)
    random = json.loads(invoke("sweep", str(DAY34), "--format", "json", "--show-text").stdout)
    assert len(random["texts"]) == 6


@pytest.mark.parametrize("other", [("--dry-run",), ("--format", "markdown")])
def test_show_text_is_refused_where_it_would_show_nothing(here, other):
    message = f"--show-text and {' '.join(other)} do not go together"
    assert_refused(invoke("sweep", str(DAY34), "--show-text", *other), here, message)


@pytest.mark.parametrize("command", [("sweep",), ("sweep", "--dry-run"), ("validate",)])
def test_natural_prompts_run_on_the_embedded_model(here, command):
    path = scenario(here, NATURAL, ("[48, 32, 24, 16, 12, 8]", "[500, 120]"))
    done = invoke(*command, path)
    assert done.exit_code == 0, done.output


def test_text_needs_a_tokenizer_and_says_so_before_the_model_is_loaded(here):
    (here / "bare").mkdir()
    model = ('model = "tiny"', 'model = "bare"')
    for changes, options in (((NATURAL, model), ()), ((model,), ("--show-text",))):
        done = invoke("sweep", scenario(here, *changes), *options)
        assert done.exit_code == 2
        assert done.stderr == (
            "error: bare: no tokenizer.json, so text cannot become token ids; "
            "copy it from the model's original folder\n"
        )
    assert everything_under(here) == ["x.toml"]


def test_missing_prompts(here):
    path = scenario(here, (NATURAL[0], 'requests = 6\nprompts = "gone.txt"'))
    assert_refused(invoke("sweep", path), here, "gone.txt: No such file or directory")


@pytest.mark.parametrize("texts", ["loops", "varied"])
def test_degenerate_texts_are_warned_of(here, monkeypatch, texts):
    """A sampler that goes through five tokens in turn, and the real one."""
    turn = count()
    if texts == "loops":  # six rows an iteration, one token for all
        monkeypatch.setattr("engine.model.greedy", lambda rows: ([next(turn) % 5] * len(rows), [1.0] * len(rows)))
    torch_alone = ("slots = 6", 'slots = 6\nkernels = "torch"')
    changes = (torch_alone, ("output_tokens = 24", "output_tokens = 40"), ("[48, 32, 24, 16, 12, 8]", "[66]"))
    path = scenario(here, *changes)
    done = invoke("sweep", path, "--no-progress", "--format", "json")
    recorded = json.loads((here / "results/day34/run.json").read_text())["text_repetition"]
    assert json.loads(done.stdout)["text_repetition"] == recorded
    if texts == "loops":
        assert recorded == 1 - 5 / 40
        assert done.stderr == (
            "warning: the texts are degenerate, so their identity proves little: in the median text 88% of the tokens "
            'occur among the 64 before them (limit 75%); other prompts, such as prompts = "natural", may help\n'
        )
    else:
        assert 0 <= recorded < 0.5
        assert done.stderr == ""


# ---- bad input: one line, exit code 2, nothing written ---------------------------------------


@pytest.mark.parametrize("command", ["sweep", "validate"])
def test_missing_file(here, command):
    assert_refused(invoke(command, "nope.toml"), here, "nope.toml: No such file or directory")


def test_malformed_toml(here):
    assert_refused(invoke("sweep", scenario(here, ("[engine]", "[engine"))), here, "not valid TOML")


def test_unknown_key(here):
    path = scenario(here, ("slots = 6", "slot = 6"))
    assert_refused(invoke("sweep", path), here, "unknown key 'engine.slot', did you mean 'engine.slots'?")


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ("[48, -12]", "sweep.pools.1"),
        ("[48, 0]", "sweep.pools.1"),
        ("[48, 48]", "pool 48 is listed twice"),
        ("[]", "sweep.pools"),
    ],
)
def test_bad_pools(here, pools, message):
    path = scenario(here, ("[48, 32, 24, 16, 12, 8]", pools))
    assert_refused(invoke("sweep", path), here, message)


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_pool_too_small_for_one_request(here, dry_run):
    path = scenario(here, ("16, 12, 8]", "16, 12, 6]"))
    message = "'r0': its prompt of 5 tokens fits the pool of 6 blocks of 4, but with its 24 output tokens it needs 7; "
    assert_refused(invoke("sweep", path, *dry_run), here, message)


def test_a_pool_larger_than_memory_is_refused_before_the_smaller_ones_run(here):
    path = scenario(here, ("[48, 32, 24, 16, 12, 8]", "[8, 2000000000]"), ("block_size = 4", "block_size = 65536"))
    assert_refused(
        invoke("sweep", path),
        here,
        "pool of 2000000000 blocks of 65536: 91552.7 TiB of K/V could not be allocated on cpu",
    )


def test_empty_workload(here):
    path = scenario(here, ("requests = 6\nprompt_tokens = 5\noutput_tokens = 24", "lengths = []"))
    assert_refused(invoke("sweep", path), here, "there are no requests")


def test_unwritable_output_folder(here):
    (here / "file").write_text("not a folder")
    assert_refused(invoke("sweep", str(DAY34), "--out", "file/o"), here, "output folder file/o: Not a directory")


def test_unwritable_figure_folder_is_found_before_the_sweep(here):
    (here / "file").write_text("not a folder")
    done = invoke("sweep", str(DAY34), "--out", "o", "--plots", "file/p")
    assert_refused(done, here, "output folder file/p: Not a directory")


@pytest.mark.parametrize("made", ["folder", "link", "file"])
def test_what_batchbench_did_not_make_is_never_deleted(here, made):
    (here / "o").mkdir()
    mine = here / "o/batchbench-parts"
    if made == "folder":
        mine.mkdir()
        (mine / "thesis.txt").write_text("years of work")
    elif made == "link":
        (here / "elsewhere").mkdir()
        mine.symlink_to(here / "elsewhere")
    else:
        mine.write_text("years of work")
    done = invoke("sweep", str(DAY34), "--out", "o", "--no-progress")
    assert (done.exit_code, done.stderr) == (2, "error: o/batchbench-parts was not made by batchbench; move it away\n")
    assert mine.exists() and (made != "folder" or (mine / "thesis.txt").exists())


@pytest.mark.parametrize(
    ("command", "option"),
    [(("sweep", str(DAY34)), "--out"), (("sweep", str(DAY34)), "--plots"), (("plot", "results/day34"), "--out")],
)
def test_an_empty_name_is_no_folder(here, command, option):
    done = invoke(*command, option, "")
    assert done.exit_code == 2
    assert f"Invalid value for '{option}': must name a folder; the working folder is '.'" in done.stderr
    assert everything_under(here) == []


def test_a_folder_where_a_table_should_go(here):
    (here / "o/pools.parquet").mkdir(parents=True)
    done = invoke("sweep", str(DAY34), "--out", "o", "--no-progress")
    assert (done.exit_code, done.stderr) == (2, "error: output folder o: pools.parquet is a folder there\n")


def test_figures_never_narrow_with_the_terminal(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    done = invoke("sweep", str(DAY34), "--no-progress")
    row = next(line for line in done.stdout.splitlines() if "12 blocks" in line)
    assert row.split() == ["12", "blocks", "0.375", "1.17", "39.9%", "1.90x", "1.90x", "identical"]


def test_names_too_long_for_the_file_system_are_found_before_the_sweep(here):
    long = "x" * 300
    for option in (("--out", long), ("--out", "o", "--plots", long), ("--out", f"a/{long}")):
        assert_refused(invoke("sweep", str(DAY34), "--no-progress", *option), here, "File name too long")


def test_a_folder_where_a_figure_should_go(here):
    (here / "p/staircase.png").mkdir(parents=True)
    done = invoke("sweep", str(DAY34), "--out", "o", "--plots", "p", "--no-progress")
    assert (done.exit_code, done.stderr) == (2, "error: figure folder p: staircase.png is a folder there\n")
    assert everything_under(here) == []


@pytest.mark.parametrize("command", [("schema",), ("validate", str(DAY34)), ("--help",), ("--version",)])
def test_output_that_cannot_be_written(here, command):
    environment = os.environ | {"PYTHONPATH": str(DAY34.parents[1])}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "batchbench", *command],
            stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "error: output: No space left on device\n")


def test_a_reader_that_leaves_early_is_no_error_message(here):
    command = f"{sys.executable} -m batchbench schema | head -1"
    environment = os.environ | {"PYTHONPATH": str(DAY34.parents[1])}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_a_repository_of_a_scenario_is_never_asked(here):
    """Its configuration could name a command for git to run."""
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "config", "core.fsmonitor", f"touch {here}/pwned; false"], check=True)
    assert invoke("sweep", scenario(here), "--no-progress").exit_code == 0
    assert not (here / "pwned").exists()
    run = json.loads((here / "results/day34/run.json").read_text())
    assert run["git"] is None or len(run["git"]["commit"]) == 40


def test_unknown_engine(here):
    assert_refused(invoke("sweep", str(DAY34), "--engine", "warp"), here, "unknown engine 'warp'; known: own")


@pytest.mark.parametrize(("device", "message"), [("tpu", "unknown device 'tpu'"), ("cuda:7", "'cuda:7' is not there")])
def test_unknown_device(here, device, message):
    path = scenario(here, ("slots = 6", f'slots = 6\ndevice = "{device}"'))
    assert_refused(invoke("sweep", path), here, message)


@pytest.mark.parametrize("command", ["sweep", "validate"])
def test_unknown_model(here, command):
    path = scenario(here, ('model = "tiny"', 'model = "huge"'))
    assert_refused(
        invoke(command, path),
        here,
        "unknown model 'huge': not tiny, and no checkpoint folder or GGUF file of that path",
    )


def test_a_checkpoint_folder_runs_and_a_damaged_one_is_refused(here):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**COMMON)).save_pretrained(here / "llama")
    path = scenario(here, ('model = "tiny"', 'model = "llama"'), ("[48, 32, 24, 16, 12, 8]", "[48, 12]"))
    done = invoke("sweep", path, "--format", "json", "--no-progress", "--audit")
    pools = json.loads(done.stdout)["pools"]
    assert [pool["recomputed_tokens"] for pool in pools] == [0, 107]
    assert pools[0]["text_digest"] == pools[1]["text_digest"]
    assert json.loads((here / "results/day34/run.json").read_text())["engine"]["model"] == "llama"
    (here / "llama/config.json").write_text("{}")
    done = invoke("validate", path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "error: llama: config.json: architecture 'none' is not supported" in done.stderr


def test_validate_finds_the_pool_that_is_too_small(here):
    path = scenario(here, ("16, 12, 8]", "16, 12, 6]"))
    assert_refused(invoke("validate", path), here, "the smallest pool that holds it is 7 blocks")


def test_plot_of_what_is_not_a_result(here):
    assert_refused(invoke("plot", "nowhere"), here, "nowhere is not a result folder")


def test_plot_of_a_pool_that_is_not_there(here):
    invoke("sweep", str(DAY34), "--out", "o")
    done = invoke("plot", "o", "--point", "13")
    assert done.exit_code == 2
    assert "no point 13; it has 0 to 5" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("sweep",), ("swep", "x"), ("sweep", "x", "--pools", "3"), ("plot", "o", "--point", "x")]
)
def test_usage_errors_exit_with_2(here, arguments):
    assert invoke(*arguments).exit_code == 2
    assert everything_under(here) == []


def test_control_characters_do_not_reach_the_terminal(here):
    path = scenario(here, ("[workload]", '"\\u001b[31mred" = 1\n[workload]'))
    done = invoke("sweep", path)
    assert done.exit_code == 2
    assert "\x1b" not in done.stderr
    done = invoke("validate", "a\x1b[31m\nb.toml")
    assert "\x1b" not in done.stderr and done.stderr.count("\n") == 1


# ---- failures --------------------------------------------------------------------------------


def plant(monkeypatch):
    """A bug that changes text: on eviction the last two tokens trade places."""
    honest = Scheduler.evict

    def swap(self, victim):
        event = honest(self, victim)
        victim.tokens[-2:] = reversed(victim.tokens[-2:])
        return event

    monkeypatch.setattr(Scheduler, "evict", swap)


def test_different_texts_exit_with_4_and_leave_no_timings(here, monkeypatch):
    plant(monkeypatch)
    done = invoke("sweep", str(DAY34), "--out", "o", "--no-progress")
    assert done.exit_code == 4
    assert done.stderr.startswith("error: texts differ, so there are no timings: request 'r4', generated token")
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert everything_under(here) == []


def test_different_texts_leave_an_earlier_result_as_it_was(here, monkeypatch):
    invoke("sweep", str(DAY34), "--out", "o")
    before = {path: (here / path).read_bytes() for path in everything_under(here)}
    plant(monkeypatch)
    assert invoke("sweep", str(DAY34), "--out", "o").exit_code == 4
    assert {path: (here / path).read_bytes() for path in everything_under(here)} == before


def test_a_failing_engine_exits_with_1_and_debug_brings_the_traceback(here, monkeypatch):
    def broken(self):
        raise RuntimeError("CUDA out of memory\nTried to allocate")

    monkeypatch.setattr(Scheduler, "schedule", broken)
    done = invoke("sweep", str(DAY34), "--no-progress")
    assert done.exit_code == 1
    assert done.stderr == "error: RuntimeError: CUDA out of memory Tried to allocate\n"
    debug = invoke("sweep", str(DAY34), "--no-progress", "--debug")
    assert debug.exit_code == 1
    assert "out of memory" in str(debug.exception)


def test_a_bug_of_ours_is_one_line_too(here, monkeypatch):
    monkeypatch.setattr("batchbench.running.build_requests", lambda *_: 1 / 0)
    done = invoke("sweep", str(DAY34))
    assert done.exit_code == 1
    assert done.stderr == "internal error: ZeroDivisionError: division by zero (--debug shows where)\n"


def test_an_interrupted_sweep_keeps_the_pools_that_were_done(here, monkeypatch):
    honest, calls = Scheduler.schedule, []

    def interrupt(self):
        calls.append(1)
        if len(calls) > 40:
            raise KeyboardInterrupt
        return honest(self)

    monkeypatch.setattr(Scheduler, "schedule", interrupt)
    done = invoke("sweep", str(DAY34), "--out", "o", "--no-progress")
    assert done.exit_code == 130
    assert "o/batchbench-parts/point-0/requests.parquet" in everything_under(here)


def test_it_runs_as_a_module_in_a_process_of_its_own(here):
    environment = os.environ | {"PYTHONPATH": str(DAY34.parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "batchbench", "validate", "nope.toml"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: nope.toml: No such file or directory\n"


def test_a_machine_without_a_compiler_is_warned_in_one_line(tmp_path):
    environment = os.environ | {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "batchbench", "validate", "scenarios/day34.toml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == (
        "warning: native kernels are not available, torch computes instead: no C++ compiler: "
        "no-such-compiler not found; install g++ or set CXX\n"
    )


def test_no_plots_draws_nothing_and_says_nothing_of_figures(here):
    done = invoke("sweep", str(DAY34), "--no-plots", "--out", "o", "--engine", "schedule")
    assert done.exit_code == 0 and "figures" not in done.stdout
    assert not [path for path in everything_under(here) if path.endswith(".png")]
