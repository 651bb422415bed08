"""What a report is made of, in no format: chapters of sections of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.figure import Figure

LISTED_LINES = 150  # of a text to copy, where all of it would be pages
Tone = Literal["good", "caution", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Statement:
    """A fact that is to be seen first, and what it rests on. `good`: shown; `caution`, `bad`: not, or against it."""

    tone: Tone
    text: str
    detail: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Terms and what is said of each."""

    caption: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Text to copy. language: of the highlighting that a reader may have: `sh` or `toml`."""

    caption: str
    text: str
    language: str

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self.text.rstrip().split("\n"))

    @property
    def lines_cut(self) -> int:
        """How many lines are left out where it cannot be folded away."""
        return max(0, len(self.lines) - LISTED_LINES)

    @property
    def start(self) -> str:
        """Its first lines; where that is not all, with a last one that says so."""
        more = (f"# ... and {self.lines_cut} more lines",) if self.lines_cut else ()
        return "\n".join((*self.lines[:LISTED_LINES], *more))


@dataclass(frozen=True, slots=True)
class Cell:
    """sort: what it is ordered by; None: unknown, which is last."""

    text: str
    sort: float | str | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under headings. numbers: which columns are aligned as such. note: what is left out, and why."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numbers: frozenset[int]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure, drawn when it is wanted. description: what it shows, for those who do not see it."""

    key: str
    title: str
    description: str
    draw: Callable[[], Figure]


@dataclass(frozen=True, slots=True)
class Victims:
    """Evictions of one length at one point. rebuilt: positions to compute again; copied: positions of whole blocks."""

    count: int
    rebuilt: int
    copied: int


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """Of one point of a sweep, all its evictions by their lengths. spared: of these, those of victims that computed
    less again than they had cached."""

    name: str
    victims: tuple[Victims, ...]
    spared: int = 0

    @property
    def evictions(self) -> int:
        return sum(one.count for one in self.victims)

    @property
    def rebuilt_tokens(self) -> int:
        return sum(one.count * one.rebuilt for one in self.victims)

    @property
    def copied_tokens(self) -> int:
        return sum(one.count * one.copied for one in self.victims)


@dataclass(frozen=True, slots=True)
class Link:
    """Recompute against swap over the bandwidth of the link to a swap pool.

    measured: whether s_per_position is this run's, or assumed. table: the same at a few bandwidths, for those who
    cannot move anything.
    """

    points: tuple[LinkPoint, ...]
    kv_bytes_per_token: int
    s_per_position: float
    measured: bool
    bandwidth_bytes_per_s: float
    table: Table


Part = Paragraph | Facts | Code | Table | Picture | Link


@dataclass(frozen=True, slots=True)
class Section:
    """key: its name in links."""

    key: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Chapter:
    """All about one result."""

    title: str
    verdict: tuple[Statement, ...]
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """opening: what holds for all chapters together; empty for one."""

    title: str
    subtitle: str
    opening: tuple[Part, ...]
    chapters: tuple[Chapter, ...]


def words(*texts: str) -> tuple[Cell, ...]:
    """Cells that are ordered by their text."""
    return tuple(Cell(text, text) for text in texts)


def counts(*values: int | float | None, missing: str = "not reported") -> tuple[Cell, ...]:
    """Cells of whole numbers."""
    return tuple(Cell(missing, None) if value is None else Cell(f"{value:,.0f}", value) for value in values)


def table(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]], numbers: Sequence[int], note: str = ""
) -> Table:
    """A table of any sequences."""
    return Table(caption, tuple(headings), tuple(tuple(row) for row in rows), frozenset(numbers), note)
