"""The documentation is true: generated parts are current, examples run, tables match results, links lead on."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from batchbench import errors
from batchbench.gate_rules import load_demands
from batchbench.gating import EXIT_CODES
from batchbench.results import load_result
from batchbench.schema import TABLES
from tests.batchbench.test_cli import invoke

PAGES = [Path("README.md"), Path("CHANGELOG.md"), Path("CONTRIBUTING.md"), *sorted(Path("docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def scenarios_in(page):
    return [text for text in blocks(page, "toml") if "[[rules]]" not in text]


def load_generator():
    spec = importlib.util.spec_from_file_location("generate", "docs/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current():
    found = list(load_generator().pages())
    assert {page.name for page, _, _ in found} == {"README.md", "cli.md", "metrics.md", "preemption.md", "scenarios.md"}
    for page, text, wanted in found:
        assert text == wanted, f"{page.name} is stale: run make docs"


def test_the_metrics_page_lists_exactly_the_columns_of_the_parquet_files():
    page = Path("docs/metrics.md").read_text()
    for table, columns in TABLES.items():
        section = page.split(f"### `{table}.parquet`")[1].split("### ")[0]
        listed = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)
        assert [(name, unit.strip(), meaning.strip()) for name, unit, meaning in listed] == [
            (c.name, c.unit or "-", c.meaning) for c in columns
        ]


def test_every_command_is_documented():
    help_text = invoke("--help").stdout
    commands = re.findall(r"^  (\w+) ", help_text.split("Commands:")[1], re.MULTILINE)
    assert commands == list(load_generator()._COMMANDS)


@pytest.mark.parametrize("page", [page for page in PAGES if scenarios_in(page)], ids=str)
def test_scenarios_in_the_docs_validate_and_their_pools_hold(page, tmp_path):
    shutil.copytree("scenarios/traces", tmp_path / "traces")
    for text in scenarios_in(page):
        path = tmp_path / "x.toml"
        path.write_text(text)
        assert invoke("validate", str(path)).exit_code == 0
        assert invoke("sweep", str(path), "--dry-run").exit_code == 0


@pytest.mark.parametrize("code", blocks(Path("README.md"), "python"))
def test_python_in_the_readme_runs(code):
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_tests_that_the_docs_name_exist(page):
    files = {path.name: path.read_text() for path in Path("tests").rglob("*.py")}
    for path in re.findall(r"`(tests/[\w/]+\.py)`", page.read_text()):
        assert Path(path).is_file(), path
    for file, name in re.findall(r"`(test_\w+\.py)::(test_\w+)`", page.read_text()):
        assert f"def {name}(" in files[file], (file, name)
    for name in re.findall(r"`(test_\w+)(?:\.py)?`", page.read_text()):
        assert f"{name}.py" in files or any(f"def {name}(" in text for text in files.values()), name


def test_results_open_without_torch():
    code = """
import sys
sys.modules["torch"] = None  # importing it now raises
from pathlib import Path
from batchbench.figures.drawing import draw_all
from batchbench.results import load_result
draw_all(load_result("results/day34"), Path(sys.argv[1]))
"""
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", code, folder], check=True, capture_output=True)


def test_the_gate_file_in_the_docs_is_one(tmp_path):
    (text,) = [text for text in blocks(Path("docs/ci.md"), "toml") if "[[rules]]" in text]
    (tmp_path / "g.toml").write_text(text)
    assert load_demands(tmp_path / "g.toml").rules


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a command line of the docs where a user would, with this program as `batchbench`."""
    for name in ("scenarios", "results"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    program = tmp_path / "batchbench"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={Path.cwd()} exec {sys.executable} -m batchbench "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.chdir(tmp_path)
    return lambda line: subprocess.run(line, shell=True, capture_output=True, text=True, check=True)


def test_the_workflow_and_the_hook_in_the_docs_pass_here(shell):
    workflow, hook = (yaml.safe_load(text) for text in blocks(Path(__file__).parents[2] / "docs/ci.md", "yaml"))
    steps = [step["run"] for step in workflow["jobs"]["gate"]["steps"] if "run" in step]
    for line in [step for step in steps if step.startswith("batchbench")] + [hook["repos"][0]["hooks"][0]["entry"]]:
        assert "passed" in shell(line).stdout or "sweep" in line
    assert "### batchbench gate: day34 passed" in Path("summary.md").read_text()


def test_every_exit_code_of_an_error_is_in_the_table():
    page = Path("docs/cli.md").read_text()
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.BatchbenchError)]
    assert {c.exit_code for c in classes} == {1, 2, 4, 5}
    for code in {*EXIT_CODES.values(), 0, 1, 2, 4, 130}:
        assert re.search(rf"^\| {code} \|", page, re.MULTILINE)


def test_make_targets_that_the_docs_name_exist():
    targets = set(re.findall(r"^([a-z]+):", Path("Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:^    |`)make ([a-z]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, (page, named - targets)


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    """The committed scenario, run today."""
    folder = tmp_path_factory.mktemp("again")
    on_cpu = Path("scenarios/day34.toml").read_text().replace("[engine]", '[engine]\ndevice = "cpu"')
    (folder / "day34.toml").write_text(on_cpu)
    assert invoke("sweep", str(folder / "day34.toml"), "--out", str(folder / "out")).exit_code == 0
    return load_result(folder / "out")


_MEASURED = ("s", "logits", "token ids", "unit")  # of another run, or machine; "unit": a column says which


def test_the_committed_counts_are_what_the_engine_counts_today(again):
    then = load_result("results/day34")
    assert again.run["workload_hash"] == then.run["workload_hash"]
    for name, columns in TABLES.items():
        counted = [c.name for c in columns if c.unit not in _MEASURED and not c.name.endswith("_s")]
        counted = [column for column in counted if column != "text_digest"]
        assert again.tables[name][counted].equals(then.tables[name][counted]), name


TINY = [
    path
    for path in sorted(Path("scenarios").glob("*.toml"))
    if ".gate" not in path.name and 'model = "tiny"' in path.read_text()
]


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_every_scenario_has_results_that_hold_today(path, tmp_path):
    """By the schedule alone, which counts as the engine does; what only a model tells is left out."""
    done = invoke("sweep", str(path), "--engine", "schedule", "--out", str(tmp_path), "--no-progress", "--no-plots")
    assert done.exit_code == 0, done.output
    today, then = load_result(tmp_path), load_result(f"results/{path.stem}")
    assert today.run["workload_hash"] == then.run["workload_hash"]
    assert len(set(then.tables["pools"]["text_digest"])) == 1
    for name in ("pools", "requests", "iterations", "admissions", "prefills", "evictions", "token_runs"):
        counted = [c.name for c in TABLES[name] if c.unit not in ("s", "bytes") and not c.name.endswith("_s")]
        counted = [c for c in counted if c not in ("padded_tokens", "numerics", "text_digest")]
        assert today.tables[name][counted].equals(then.tables[name][counted]), name
    assert {p.stem for p in Path(f"plots/{path.stem}").glob("*.png")} >= {"staircase", "rows_against_positions"}


def test_the_committed_text_is_what_the_engine_writes_today(again):
    """Not a promise across machines: another processor's rounding may flip a token whose two best logits
    are within about 3e-5. The closest pair in the committed texts is 0.0018 apart, so this should hold everywhere.
    """
    then = load_result("results/day34")
    assert min(min(gaps) for gaps in then.tables["texts"]["logit_gaps"]) > 1e-3
    assert list(again.tables["pools"]["text_digest"]) == list(then.tables["pools"]["text_digest"])
