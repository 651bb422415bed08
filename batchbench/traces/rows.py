"""What a trace gives: rows, and the books of what became of every row of the file."""

from __future__ import annotations

from dataclasses import dataclass, field

TRUNCATED = "truncated last line"
OUTSIDE = "outside the window"
BEYOND = "beyond the number of requests wanted"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace, as the file gives it. Lengths in tokens.

    line: where it stands, from 1: the line of a text file, the record of a JSON array or a Parquet file.
    arrival_ns: nanoseconds, on the file's own clock (a date counts from 1970, UTC); None where the format has no times.
    prompt_tokens, output_tokens: None where only a text is given. prefix_ids: names of the prompt's chunks of
    `Trace.prefix_tokens` positions, from its start; equal ids are equal chunks. request_id: the file's own; None where
    there is none, or where an earlier row has it. after: the file's own id of the turn before.
    """

    line: int
    arrival_ns: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    prefix_ids: tuple[int | str, ...] = ()
    request_id: str | None = None
    after: str | None = None
    prompt: str | None = None
    output: str | None = None


@dataclass
class Tally:
    """What became of the rows: always rows_read == rows_used + sum(dropped.values()).

    dropped: reason -> rows. noted: quirk that was survived -> how often (docs/traces.md has the rules).
    """

    rows_read: int = 0
    rows_used: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        """Book a row that was read and is not used."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def note(self, quirk: str) -> None:
        """Book a quirk that changes nothing, or that a stated rule took care of."""
        self.noted[quirk] = self.noted.get(quirk, 0) + 1

    def unuse(self, reason: str, rows: int = 1) -> None:
        """Book rows again, that the file gave and the caller does not want."""
        if rows:
            self.rows_used -= rows
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def lines(self) -> list[str]:
        """The books for people: the sum in the first line, then every quirk."""
        dropped = "".join(f" + {count} dropped ({reason})" for reason, count in self.dropped.items())
        return [
            f"rows: {self.rows_read} read = {self.rows_used} used{dropped}",
            *(f"noted: {quirk}: {count}" for quirk, count in self.noted.items()),
        ]
