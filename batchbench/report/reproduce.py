"""How to run a result again: the command that made it, and its scenario as a file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import tomli_w

from batchbench.report.document import Code, Paragraph, Part, Section
from batchbench.results import Result
from batchbench.sheets import escaped

_FILES = (("engine", "model"), ("engine", "calibration"), ("workload", "lengths_file"), ("workload", "prompts"))
_OURS = ("tiny", "natural")  # they ship with batchbench


def reproduce(result: Result) -> Section:
    """The command, or the best that can be derived from an older result; the scenario; what else it reads."""
    run = result.run
    parts: list[Part] = [Paragraph(_revision(run))]
    name = scenario_file(run)
    if arguments := _arguments(run):
        parts.append(
            Paragraph(
                f"Save the scenario below as {escaped(name)}. The command that made this result, but for its folders:"
            )
        )
    elif "command" in run:
        parts.append(Paragraph(f"Save the scenario below as {escaped(name)}. This result was made from Python:"))
        parts.append(Code("Python", _python(run, name), "python"))
        arguments = []
    else:
        arguments = ["sweep", name, *_derived(run)]
        parts.append(
            Paragraph(
                f"Save the scenario below as {escaped(name)}. This result is of a version that did not keep its "
                "command; this one is derived from what it says, and options that leave no trace, such as --audit, are "
                "not known:"
            )
        )
    if arguments:
        parts.append(Code("Command", f"batchbench {shlex.join(map(escaped, arguments))} --out out/again", "sh"))
    text = scenario_toml(run["scenario"])
    if text is None:
        parts.append(Paragraph("The result does not hold its scenario, only its name."))
    else:
        parts.append(
            Code(f"{escaped(name)}, with every default and every option of the command filled in", text, "toml")
        )
    if needed := _needed(run["scenario"]):
        parts.append(
            Paragraph(f"It also reads, from the folder that you save it in: {', '.join(map(escaped, needed))}.")
        )
    workload = run.get("workload_hash")
    if isinstance(workload, str):
        parts.append(Paragraph(f"The same workload has the hash {escaped(workload)}."))
    return Section("reproduce", "How to reproduce", tuple(parts))


def scenario_file(run: Mapping[str, Any]) -> str:
    """What its scenario's file was called, without folders."""
    arguments = _arguments(run)
    return arguments[1] if len(arguments) > 1 else f"{run['scenario']['name']}.toml"


def scenario_toml(scenario: Mapping[str, Any]) -> str | None:
    """A stored scenario as TOML, which has no null: what is null is left out. None where only its name was stored."""
    if "workload" not in scenario:
        return None
    return tomli_w.dumps(_without_nulls(scenario))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _arguments(run: Mapping[str, Any]) -> list[str]:
    """As sweep stored them; none where it did not."""
    found = run.get("command")
    return list(found) if isinstance(found, list) and all(isinstance(one, str) for one in found) else []


def _derived(run: Mapping[str, Any]) -> list[str]:
    """The engine, where the scenario does not say it: a schedule computes no text."""
    return ["--engine", "schedule"] if run["engine"].get("computes_text") is False else []


def _python(run: Mapping[str, Any], name: str) -> str:
    """The call that made it, but for an engine's factory, which only its author has."""
    engine = run["engine"].get("engine")
    ours = {"batchbench": '"own"', "schedule": '"schedule"'}.get(str(engine))
    last = ours or f"make_engine)  # the factory of the engine that calls itself {escaped(str(engine))}"
    call = f'run_scenario(load_scenario({json.dumps(escaped(name))}), "out/again", {last}' + (")" if ours else "")
    return f"from batchbench import load_scenario, run_scenario\n\n{call}"


def _needed(scenario: Mapping[str, Any]) -> list[str]:
    """Files beside the scenario's own."""
    found = [section.get(key) for name, key in _FILES if isinstance(section := scenario.get(name), dict)]
    workload = scenario.get("workload")
    trace = workload.get("trace") if isinstance(workload, dict) else None
    found.append(trace.get("path") if isinstance(trace, dict) else None)
    return [path for path in found if isinstance(path, str) and path not in _OURS]


def _revision(run: Mapping[str, Any]) -> str:
    git, versions = run.get("git"), run.get("versions")
    version = versions.get("kv-batchbench") if isinstance(versions, dict) else None
    named = f"batchbench {version}" if isinstance(version, str) else "batchbench, of an unknown version"
    if not isinstance(git, dict) or not isinstance(git.get("commit"), str):
        return f"Made by {escaped(named)}, installed as a package: no commit is known."
    if git.get("modified"):
        return (
            f"Made by {escaped(named)} at commit {escaped(git['commit'])}, with changes that were not committed: the "
            "commit alone is not what ran."
        )
    return f"Made by {escaped(named)} at commit {escaped(git['commit'])}."
