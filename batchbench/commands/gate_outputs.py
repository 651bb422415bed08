"""Where a gate's findings go: standard output, files for machines, and annotations of a GitHub run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchbench.commands.present import Format, to_json
from batchbench.commands.shared import exit_code_of
from batchbench.errors import BatchbenchError, UsageError
from batchbench.gate_formats import as_annotations, as_document, as_junit, as_markdown, figures_of
from batchbench.gating import EXIT_CODES, Finding, verdict_of
from batchbench.sheets import Sheet, one_line


@dataclass(frozen=True, slots=True)
class Outputs:
    """What was asked for. Files: None where it was not."""

    form: Format
    junit: Path | None
    json: Path | None
    markdown: Path | None

    @property
    def files(self) -> list[Path]:
        """Those that are written."""
        return [path for path in (self.junit, self.json, self.markdown) if path is not None]

    def check(self) -> None:
        """Raise UsageError for a file that cannot be, or that one output would overwrite with another."""
        if lost := next((path for path in self.files if not path.parent.is_dir()), None):
            raise UsageError(f"{lost}: there is no folder {lost.parent}")
        if len({path.resolve() for path in self.files}) < len(self.files):
            raise UsageError("--junit, --json and --markdown: each needs a file of its own")

    def tell(self, name: str, findings: Sequence[Finding], failed: BaseException | None = None) -> None:
        """The same everywhere. failed: what ended the gate, and is in the findings: raised once all are told.

        A file that cannot be written ends it too, and then no other says that it passed.
        """
        lost = self._write(name, findings, failed)
        if lost is not None and failed is None:
            findings, failed = as_finding(lost), lost
            self._write(name, findings, failed)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in as_annotations(findings):
                print(line, file=sys.stderr)
        self._print(name, findings, failed)
        if failed is not None:
            raise failed

    def _write(self, name: str, findings: Sequence[Finding], failed: BaseException | None) -> BatchbenchError | None:
        """Every file that can be; the first refusal is returned."""
        lost = None
        for path, text in (
            (self.junit, as_junit(name, findings)),
            (self.json, _document(name, findings, failed) + "\n"),
            (self.markdown, as_markdown(name, findings)),
        ):
            try:
                if path is not None:
                    path.write_text(text, encoding="utf-8")
            except OSError as error:
                lost = lost or BatchbenchError(f"{path}: {error.strerror or error}")
        return lost

    def _print(self, name: str, findings: Sequence[Finding], failed: BaseException | None) -> None:
        """For people, what ended the gate is an error line and no table."""
        if self.form is Format.json:
            print(_document(name, findings, failed))
        elif self.form is Format.markdown:
            print(as_markdown(name, findings), end="")
        elif failed is None:
            _sheet(findings).print()
            print("\n" + one_line(f"{name}: {verdict_of(findings)}"))


def as_finding(error: BaseException) -> list[Finding]:
    """What ended a gate before it could judge."""
    said = str(error) if hasattr(error, "exit_code") else f"{type(error).__name__}: {error}"
    return [Finding("gate", "", "error", said)]


def _document(name: str, findings: Sequence[Finding], failed: BaseException | None) -> str:
    code = EXIT_CODES[verdict_of(findings)] if failed is None else exit_code_of(failed)
    return to_json(as_document(name, findings) | {"exit_code": code})


def _sheet(findings: Sequence[Finding]) -> Sheet:
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
    return Sheet(headings, rows, words=("verdict", "rule", "point", "how"))
