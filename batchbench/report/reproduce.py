"""How to run a result again: the command that made it, and its scenario as a file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from batchbench.paths import FilePath
from batchbench.report.document import LISTED_LINES, Code, Paragraph, Part, Section
from batchbench.report.toml_text import toml_text
from batchbench.results import Result
from batchbench.scenario import Scenario
from batchbench.sheets import escaped

_OURS = ("tiny", "natural")  # they ship with batchbench


def reproduce(result: Result) -> Section:
    """The command, or the best that can be derived from an older result; the scenario; what else it reads."""
    run = result.run
    parts: list[Part] = [Paragraph(_revision(run))]
    name, text = scenario_file(run), scenario_toml(run["scenario"])
    listing = None if text is None else Code(_listed(name), text, "toml")
    parts += _call(run, name)
    if needed := _needed(run["scenario"]):
        parts.append(
            Paragraph(f"It also reads, from the folder that you save it in: {', '.join(map(escaped, needed))}.")
        )
    workload = run.get("workload_hash")
    if isinstance(workload, str):
        parts.append(Paragraph(f"The same workload has the hash {escaped(workload)}."))
    if listing is None:
        parts.append(Paragraph("The result does not hold its scenario, only its name."))
    elif listing.lines_cut:
        parts.append(
            Paragraph(
                f"The scenario is long: the HTML report (batchbench report RESULT -o report.html) has all its "
                f"{len(listing.lines)} lines to copy; PDF, Markdown and paper have the first {LISTED_LINES} at most, "
                "and run.json holds it as JSON."
            )
        )
    if listing is not None:
        parts.append(listing)
    return Section("reproduce", "How to reproduce", tuple(parts))


def _call(run: Mapping[str, Any], name: str) -> list[Part]:
    """What made it, to be run again."""
    save = f"Save the scenario below as {escaped(name)}."
    arguments = _arguments(run)
    if not arguments and "command" in run:
        return [Paragraph(f"{save} This result was made from Python:"), Code("Python", _python(run, name), "python")]
    if arguments:
        said = f"{save} The command that made this result, but for its folders:"
    else:
        arguments = ["sweep", name, *_derived(run)]
        said = (
            f"{save} This result is of a version that did not keep its command; this one is derived from what it says, "
            "and options that leave no trace, such as --audit, are not known:"
        )
    command = f"batchbench {shlex.join(map(escaped, arguments))} --out out/again"
    return [Paragraph(said), Code("Command", command, "sh")]


def scenario_file(run: Mapping[str, Any]) -> str:
    """What its scenario's file was called, without folders."""
    arguments = _arguments(run)
    return arguments[1] if len(arguments) > 1 else f"{run['scenario']['name']}.toml"


def scenario_toml(scenario: Mapping[str, Any]) -> str | None:
    """A stored scenario as TOML, which has no null: what is null is left out. None where only its name was stored."""
    if "workload" not in scenario:
        return None
    return toml_text(scenario)


def _listed(name: str) -> str:
    return f"{escaped(name)}, with every default and every option of the command filled in"


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
    """Files beside the scenario's own, each once."""
    return [path for path in dict.fromkeys(_paths(scenario, path_keys(Scenario))) if path not in _OURS]


def _paths(stored: Any, keys: frozenset[str]) -> Iterator[str]:
    """What is stored under those keys, at any depth."""
    if isinstance(stored, list):
        for item in stored:
            yield from _paths(item, keys)
    elif isinstance(stored, Mapping):
        for key, value in stored.items():
            if key in keys and isinstance(value, str):
                yield value
            else:
                yield from _paths(value, keys)


@cache
def path_keys(model: type[BaseModel]) -> frozenset[str]:
    """Names of the fields that hold a path, of a scenario's model and of all models in it."""
    keys, seen, left = set[str](), set[Any](), list[Any]([model])
    while left:
        if (kind := left.pop()) in seen:
            continue
        seen.add(kind)
        left += get_args(kind)
        fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
        for name, field in fields.items():
            left.append(field.annotation)
            if field.annotation is FilePath or FilePath in get_args(field.annotation):
                keys.add(name)
    return frozenset(keys)


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
