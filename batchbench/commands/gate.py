"""`batchbench gate`: a result held to rules, for people and for CI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from batchbench.commands.gate_outputs import Outputs, as_finding
from batchbench.commands.present import Format
from batchbench.commands.shared import DebugOption, FormatOption, errors
from batchbench.comparable import engine_differences, require_same_requests
from batchbench.comparing import changed_counters, changed_settings
from batchbench.errors import UsageError
from batchbench.gate_formats import number
from batchbench.gate_rules import BOUNDS, Bound, Demands, load_demands, parse_rule
from batchbench.gating import EXIT_CODES, Finding, judge, verdict_of
from batchbench.results import Result, load_result, replace_result
from batchbench.sheets import Sheet, one_line
from batchbench.significance import ALPHA

Rules = list[str] | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(gate)


def gate(
    result_folder: Annotated[Path, typer.Argument(metavar="RESULT", help="Folder that a sweep wrote.")],
    max: Annotated[Rules, typer.Option(metavar="METRIC[@POOL]=LIMIT", help="At most that.")] = None,
    min: Annotated[Rules, typer.Option(metavar="METRIC[@POOL]=LIMIT", help="At least that.")] = None,
    max_increase: Annotated[
        Rules, typer.Option(metavar="METRIC[@POOL]=BY", help="At most so much above the baseline: 0.01, or 5%.")
    ] = None,
    max_decrease: Annotated[
        Rules, typer.Option(metavar="METRIC[@POOL]=BY", help="At most so much below the baseline.")
    ] = None,
    equal: Annotated[Rules, typer.Option(metavar="METRIC[@POOL]", help="Exactly the baseline's.")] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Every counter of every table as in the baseline, row by row.")
    ] = False,
    same_text: Annotated[bool, typer.Option("--same-text", help="Every token as in the baseline.")] = False,
    rules: Annotated[Path | None, typer.Option(metavar="FILE", help="More rules, in TOML.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="RESULT", help="What to compare with; else the rules file's.")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Judge nothing: replace the baseline by RESULT, and print what changed.")
    ] = False,
    alpha: Annotated[
        float, typer.Option(help="Largest chance of a wrong verdict on what was measured, for each rule and point.")
    ] = ALPHA,
    allow_varying_counters: Annotated[
        bool, typer.Option("--allow-varying-counters", help="Gate counters of the clock `wall`, which may differ.")
    ] = False,
    output_format: FormatOption = Format.table,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also as JUnit XML.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Also as Markdown.")] = None,
    debug: DebugOption = False,
) -> None:
    """Hold a result to rules: fixed limits, or a baseline.

    Exit code 0: passed; 3: a rule failed; 5: incomparable with the baseline; 6: inconclusive, more repetitions would
    tell; 2: a rule could not be judged, since it matched nothing, or a null.
    """
    with errors(debug):
        given: dict[Bound, Rules] = {
            "max": max,
            "min": min,
            "max_increase": max_increase,
            "max_decrease": max_decrease,
            "equal": equal,
        }
        outputs, failed = Outputs(output_format, junit, json, markdown), None
        try:
            outputs.check()
            demands = _demands(given, rules, baseline, exact, same_text)
            if update:
                _update(result_folder, demands, outputs)
                return
            name, findings = _judged(result_folder, demands, alpha, allow_varying_counters)
        except BaseException as error:  # is told to machines too, or they would find what an earlier run wrote
            name, findings, failed = str(result_folder), as_finding(error), error
        outputs.tell(name, findings, failed)
        if code := EXIT_CODES[verdict_of(findings)]:
            raise typer.Exit(code)


def _judged(result_folder: Path, demands: Demands, alpha: float, allow_varying: bool) -> tuple[str, list[Finding]]:
    """The result's name, and what every rule found."""
    result = load_result(result_folder)
    before = None if demands.baseline is None else load_result(demands.baseline)
    return str(result.run["scenario"]["name"]), judge(result, demands, before, alpha=alpha, allow_varying=allow_varying)


def _demands(
    given: Mapping[Bound, Rules], file: Path | None, baseline: Path | None, exact: bool, same_text: bool
) -> Demands:
    """The file's, and the command line's beside them; the command line's baseline goes first."""
    asked = [parse_rule(bound, text) for bound in BOUNDS for text in given[bound] or ()]
    found = Demands() if file is None else load_demands(file)
    return replace(
        found,
        rules=(*found.rules, *asked),
        baseline=baseline or found.baseline,
        exact=exact or found.exact,
        same_text=same_text or found.same_text,
    )


def _update(result_folder: Path, demands: Demands, outputs: Outputs) -> None:
    if demands.rules or demands.exact or demands.same_text or outputs.files:
        raise UsageError("--update judges nothing: it goes without rules and outputs")
    if demands.baseline is None:
        raise UsageError("--update: which baseline? give --baseline")
    result, folder = load_result(result_folder), demands.baseline
    if folder.exists() and folder.samefile(result_folder):
        raise UsageError(f"--update: {folder} is the result itself")
    before = load_result(folder) if folder.exists() and any(folder.iterdir()) else None
    changes = None if before is None else _changes(before, result)  # refuses another workload
    replace_result(folder, result_folder)
    if changes:
        Sheet(("point", "what", "was", "is"), tuple(changes), words=("point", "what")).print()
    elif changes is not None:
        print("nothing that is counted changed")
    print(one_line(f"{folder} is now {result_folder}, run {result.run['run_id']}"))


def _changes(before: Result, result: Result) -> list[tuple[str, ...]]:
    """What the baseline's reader must know: the engine and its settings, every counter, the text, points; and rows of
    tables.
    """
    was, now = before.run["schema_version"], result.run["schema_version"]
    if was != now:
        require_same_requests(before, result)
        return [("every", "schema version", str(was), f"{now}; counters are not compared")]
    changes = [("every", difference.split(" ")[0], "", difference) for difference in engine_differences(before, result)]
    changes += [
        (point, what, _value(one), _value(other)) for point, what, one, other in changed_settings(before, result)
    ]
    changes += [
        (point, what, _value(one), _value(other)) for point, what, one, other in changed_counters(before, result)
    ]
    if not changes:
        findings = judge(result, Demands(exact=True), before, allow_varying=True)
        changes += [(finding.where, "rows", "", finding.detail) for finding in findings if finding.verdict != "passed"]
    return [tuple(map(one_line, change)) for change in changes]


def _value(value: object) -> str:
    return number(value, missing="null") if value is None or isinstance(value, float) else str(value)
