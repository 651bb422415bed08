"""Writes the generated parts of docs/: table columns, scenario keys, command help, tables of results (`make docs`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pyarrow as pa
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from batchbench.arrivals import PROCESSES
from batchbench.cli import app
from batchbench.distributions import DELAYS, LENGTHS
from batchbench.results import load_result
from batchbench.scenario import EngineSettings, Objectives, Run, Scenario, Sweep, Virtual
from batchbench.schema import ABOUT, TABLES
from batchbench.service_sheet import service_sheet
from batchbench.sheets import sweep_sheet
from batchbench.workload_schema import Conversation, Prefix, TraceSource, Workload

DOCS = Path(__file__).parent
_MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_TABLE = re.compile(r"(<!-- table: ([\w/]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SERVICE = re.compile(r"(<!-- service: ([\w/]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OUTPUT = re.compile(r"(<!-- output: ([^\n]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COMMANDS = (
    "sweep",
    "gate",
    "compare",
    "report",
    "trace",
    "watch",
    "validate",
    "schema",
    "plot",
    "doctor",
    "calibrate",
    "cost",
    "inspect",
)


def columns() -> str:
    """Every table and column of schema.py."""
    parts = []
    for table, listed in TABLES.items():
        parts.append(f"### `{table}.parquet`: {ABOUT[table]}\n")
        parts.append("| column | type | unit | meaning | null when |\n| --- | --- | --- | --- | --- |")
        parts += (
            f"| `{c.name}` | {_shown(c.type)} | {c.unit or '-'} | {c.meaning} | {c.null_when or 'never'} |"
            for c in listed
        )
        parts.append("")
    return "\n".join(parts)


def _shown(kind: pa.DataType) -> str:
    """An Arrow type in few words."""
    if pa.types.is_dictionary(kind):
        return f"dictionary of {kind.value_type}"
    return str(kind).replace("list<item: ", "list<")


def scenario_keys() -> str:
    """Every key of a scenario file with its default."""
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]
    sections: tuple[tuple[str, type[BaseModel]], ...] = (
        ("", Scenario),
        ("virtual.", Virtual),
        ("slo.", Objectives),
        ("run.", Run),
        ("engine.", EngineSettings),
        ("workload.", Workload),
        ("workload.prefix.", Prefix),
        ("workload.conversation.", Conversation),
        ("workload.trace.", TraceSource),
        ("sweep.", Sweep),
    )
    for prefix, model in sections:
        for name, field in model.model_fields.items():
            if field.description:
                default = "required" if field.is_required() else f"`{field.default}`"
                lines.append(f"| `{prefix}{name}` | {default.replace('`None`', '-')} | {field.description} |")
    return "\n".join(lines) + "\n"


def traffic_keys() -> str:
    """Every distribution and arrival process: its formula, and its keys with their defaults."""
    kinds: tuple[tuple[str, str, tuple[type[BaseModel], ...]], ...] = (
        ("length", "dist", LENGTHS),
        ("delay", "dist", DELAYS),
        ("arrivals", "process", PROCESSES),
    )
    lines = ["| of | kind | what it is | keys |", "| --- | --- | --- | --- |"]
    for what, key, models in kinds:
        for model in models:
            about = " ".join((model.__doc__ or "").split())
            fields = [(name, field) for name, field in model.model_fields.items() if name != key]
            keys = "; ".join(f"`{name}`: {_told(field)}" for name, field in fields)
            lines.append(f"| {what} | `{get_args(model.model_fields[key].annotation)[0]}` | {about} | {keys} |")
    return "\n".join(lines) + "\n"


def _told(field: FieldInfo) -> str:
    """What a key is, and its default if it has one."""
    description = (field.description or "").removesuffix(".")
    described = description[:1].lower() + description[1:]
    return described if field.is_required() or field.default is None else f"{described} (`{field.default}`)"


def command_help() -> str:
    """What --help prints, of every command."""
    parts = []
    for command in ("", *_COMMANDS):
        arguments = [command, "--help"] if command else ["--help"]
        shown = CliRunner().invoke(app, arguments, prog_name="batchbench", terminal_width=100).stdout
        text = "\n".join(line.rstrip() for line in shown.strip().splitlines())
        parts.append(f"## `batchbench{' ' + command if command else ''}`\n\n```\n{text}\n```\n")
    return "\n".join(parts)


def table(folder: str) -> str:
    """What a sweep printed of a committed result."""
    result = load_result(DOCS.parent / folder)
    return sweep_sheet(result.rows("pools"), result.rows("statistics")).markdown() + "\n"


def service(folder: str) -> str:
    """And what callers saw of it."""
    result = load_result(DOCS.parent / folder)
    objectives = bool(result.run["scenario"].get("slo"))
    return service_sheet(result.rows("pools"), result.rows("service"), objectives=objectives).markdown() + "\n"


def output(command: str) -> str:
    """What a command prints, and its exit code where that says something."""
    done = CliRunner().invoke(app, command.split()[1:], prog_name="batchbench", terminal_width=100)
    lines = [f"$ {command}", *(line.rstrip() for line in done.stdout.rstrip().splitlines())]
    lines += ["$ echo $?", str(done.exit_code)] if done.exit_code else []
    return "\n".join(["```", *lines, "```"]) + "\n"


GENERATORS: dict[str, Callable[[], str]] = {
    "columns": columns,
    "scenario-keys": scenario_keys,
    "traffic-keys": traffic_keys,
    "command-help": command_help,
}


def pages() -> Iterator[tuple[Path, str, str]]:
    """(page, its text, the text it should have) of every page with a generated part."""
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        wanted = _MARKED.sub(lambda m: m[1] + GENERATORS[m[2]]() + m[3], text)
        wanted = _TABLE.sub(lambda m: m[1] + table(m[2]) + m[3], wanted)
        wanted = _SERVICE.sub(lambda m: m[1] + service(m[2]) + m[3], wanted)
        wanted = _OUTPUT.sub(lambda m: m[1] + output(m[2]) + m[3], wanted)
        if any(mark.search(text) for mark in (_MARKED, _TABLE, _SERVICE, _OUTPUT)):
            yield page, text, wanted


if __name__ == "__main__":
    for page, _, wanted in pages():
        page.write_text(wanted, encoding="utf-8")
