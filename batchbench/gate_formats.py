"""A gate's findings for machines: JSON, JUnit XML, annotations of a GitHub run, Markdown for a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from batchbench.gating import EXIT_CODES, Finding, verdict_of

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&@])")


def as_document(name: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """For JSON. name: of the result."""
    verdict = verdict_of(findings)
    return {
        "result": name,
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "findings": [asdict(finding) for finding in findings],
    }


def as_junit(name: str, findings: Sequence[Finding]) -> str:
    """A test suite with a case for each finding: a rule that failed is a failure, what could not be judged an error."""
    suite = ElementTree.Element("testsuite", name=_xml(f"batchbench gate {name}"), tests=str(len(findings)))
    wrong = {"failure": 0, "error": 0}
    for finding in findings:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml(f"{name}.{finding.where or 'all'}"), name=_xml(finding.rule)
        )
        if finding.verdict != "passed":
            tag = "failure" if finding.verdict == "failed" else "error"
            wrong[tag] += 1
            told = ElementTree.SubElement(case, tag, type=finding.verdict, message=_xml(said(finding)))
            told.text = _xml(finding.detail)
    suite.set("failures", str(wrong["failure"]))
    suite.set("errors", str(wrong["error"]))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def as_annotations(findings: Sequence[Finding]) -> list[str]:
    """Workflow commands, a line for each finding that did not pass."""
    return [
        f"::error title={_property(f'batchbench gate: {finding.verdict}')}::{_data(f'{finding.rule}: {said(finding)}')}"
        for finding in findings
        if finding.verdict != "passed"
    ]


def as_markdown(name: str, findings: Sequence[Finding]) -> str:
    """The verdict as a heading, and a table: what did not pass first."""
    verdict = verdict_of(findings)
    lines = [f"### batchbench gate: {in_markdown(name)} {verdict}", ""]
    lines += [
        "| verdict | rule | point | value | limit | baseline | |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for finding in sorted(findings, key=lambda finding: finding.verdict == "passed"):
        cells = [
            f"**{finding.verdict}**" if finding.verdict != "passed" else "passed",
            in_markdown(finding.rule),
            in_markdown(finding.where),
            *figures_of(finding),
            in_markdown(finding.detail),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def said(finding: Finding) -> str:
    """What it found, in one line."""
    value, limit, _ = figures_of(finding)
    parts = [finding.where] if finding.where else []
    if value:
        parts.append(f"is {value}" + (f", limit {limit}" if limit else ""))
    return ": ".join(parts) + (f" ({finding.detail})" if parts else finding.detail)


def figures_of(finding: Finding) -> tuple[str, str, str]:
    """Value, limit and baseline, in as many digits as tell them apart, from six on; empty where there is none."""
    values = (finding.value, finding.limit, finding.baseline)
    different = len({value for value in values if value is not None})
    for digits in range(6, 18):
        shown = [number(value, digits) for value in values]
        if len({text for text in shown if text}) >= different:
            break
    return shown[0], shown[1], shown[2]


def number(value: float | None, digits: int = 6, missing: str = "") -> str:
    """A whole number in full, another in so many digits; `missing` where there is none."""
    if value is None:
        return missing
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.{digits}g}"


def in_markdown(text: str) -> str:
    """As text: markup and cell borders escaped, control characters and line breaks as spaces."""
    return _MARKUP.sub(r"\\\1", "".join(c if c.isprintable() else " " for c in text))


def _xml(text: str) -> str:
    """ElementTree escapes markup; what XML cannot hold at all becomes a replacement character."""
    return _NOT_XML.sub("\ufffd", text)


def _data(text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return "".join(c if c.isprintable() else " " for c in escaped)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
