"""`batchbench gate`: a result held to rules, for people and for CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from batchbench.commands.present import Format, to_json
from batchbench.commands.shared import DebugOption, FormatOption, errors
from batchbench.comparable import engine_differences, require_same_requests
from batchbench.comparing import changed_counters
from batchbench.errors import BatchbenchError, UsageError
from batchbench.gate_formats import as_annotations, as_document, as_junit, as_markdown, figures_of, number
from batchbench.gate_rules import BOUNDS, Demands, Rule, load_demands, parse_rule
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
        if not 0 < alpha < 0.5:
            raise UsageError(f"--alpha {alpha:g}: must be above 0 and below 0.5")
        given = {"max": max, "min": min, "max_increase": max_increase, "max_decrease": max_decrease, "equal": equal}
        asked = [parse_rule(bound, text) for bound in BOUNDS for text in given[bound] or ()]
        demands = _demands(asked, rules, baseline, exact, same_text)
        outputs = [path for path in (junit, json, markdown) if path is not None]
        if update:
            if demands.rules or demands.exact or demands.same_text or outputs:
                raise UsageError("--update judges nothing: it goes without rules and outputs")
            _update(result_folder, demands)
            return
        if lost := next((path for path in outputs if not path.parent.is_dir()), None):
            raise UsageError(f"{lost}: there is no folder {lost.parent}")
        name, findings, failed = str(result_folder), list[Finding](), None
        try:
            result = load_result(result_folder)
            name = str(result.run["scenario"]["name"])
            before = None if demands.baseline is None else load_result(demands.baseline)
            findings = judge(result, demands, before, alpha=alpha, allow_varying=allow_varying_counters)
            _print(name, findings, output_format)
        except BatchbenchError as error:  # is told to machines too, or they would find what an earlier run wrote
            failed, findings = error, [Finding("gate", "", "error", str(error))]
        if os.environ.get("GITHUB_ACTIONS") == "true":
            print("\n".join(as_annotations(findings)), file=sys.stderr, end="")
        _write({junit: as_junit(name, findings), json: to_json(as_document(name, findings)) + "\n",
                markdown: as_markdown(name, findings)})  # fmt: skip
        if failed is not None:
            raise failed
        if code := EXIT_CODES[verdict_of(findings)]:
            raise typer.Exit(code)


def _demands(asked: Sequence[Rule], file: Path | None, baseline: Path | None, exact: bool, same_text: bool) -> Demands:
    """The file's, and the command line's beside them; the command line's baseline goes first."""
    found = Demands() if file is None else load_demands(file)
    return replace(
        found,
        rules=(*found.rules, *asked),
        baseline=baseline or found.baseline,
        exact=exact or found.exact,
        same_text=same_text or found.same_text,
    )


def _update(result_folder: Path, demands: Demands) -> None:
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
    """What the baseline's reader must know: the engine, every counter, the text, points; and rows of tables."""
    was, now = before.run["schema_version"], result.run["schema_version"]
    if was != now:
        require_same_requests(before, result)
        return [("every", "schema version", str(was), f"{now}; counters are not compared")]
    changes = [("every", difference.split(" ")[0], "", difference) for difference in engine_differences(before, result)]
    changes += [
        (point, what, _value(one), _value(other)) for point, what, one, other in changed_counters(before, result)
    ]
    if not changes:
        findings = judge(result, Demands(exact=True), before, allow_varying=True)
        changes += [(finding.where, "rows", "", finding.detail) for finding in findings if finding.verdict != "passed"]
    return [tuple(map(one_line, change)) for change in changes]


def _value(value: object) -> str:
    return number(value, missing="null") if value is None or isinstance(value, float) else str(value)


def _print(name: str, findings: Sequence[Finding], output_format: Format) -> None:
    if output_format is Format.json:
        print(to_json(as_document(name, findings)))
    elif output_format is Format.markdown:
        print(as_markdown(name, findings), end="")
    else:
        rows = tuple(
            (
                finding.verdict if finding.verdict == "passed" else finding.verdict.upper(),
                one_line(finding.rule),
                one_line(finding.where),
                *figures_of(finding),
                one_line(finding.detail),
            )
            for finding in findings
        )
        headings = ("verdict", "rule", "point", "value", "limit", "baseline", "how")
        Sheet(headings, rows, words=("verdict", "rule", "point", "how")).print()
        print("\n" + one_line(f"{name}: {verdict_of(findings)}"))


def _write(outputs: dict[Path | None, str]) -> None:
    for path, text in outputs.items():
        if path is None:
            continue
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BatchbenchError(f"{path}: {error.strerror or error}") from None
