"""A report as PDF: text that can be selected, in fonts that it carries, tables over pages, figures as pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import matplotlib as mpl
from fpdf import FPDF
from fpdf.enums import MethodReturnValue, TableBordersLayout, TextEmphasis, XPos, YPos
from fpdf.fonts import FontFace
from matplotlib.ft2font import FT2Font
from PIL import Image

from batchbench.report.document import Code, Facts, Link, Paragraph, Part, Picture, Report, Statement, Table
from batchbench.report.pictures import LINK_ABOUT, LINK_TITLE, png

_FONTS = Path(mpl.get_data_path()) / "fonts/ttf"  # ship with matplotlib: the same as in the figures
_TONES = {"good": (0, 105, 79), "caution": (138, 82, 0), "bad": (168, 32, 13), "plain": (84, 91, 100)}
_SIGNS = {"good": "✓", "caution": "!", "bad": "✗", "plain": "•"}
_MUTED, _LINE = (84, 91, 100), (190, 196, 203)
_TOGETHER = 3  # lines of a text, or first rows of a table, that stay together
_WIDEST = 34  # characters that a column is given room for before its text wraps


class _Pages(FPDF):
    """A4 with a foot on every page. Characters that the font lacks are written as escapes."""

    def __init__(self, title: str) -> None:
        super().__init__(format="A4")
        self.set_margins(16, 16)
        self.set_auto_page_break(True, margin=18)
        for style, file in (("", "DejaVuSans.ttf"), ("B", "DejaVuSans-Bold.ttf")):
            self.add_font("sans", style, _FONTS / file)
        self.add_font("mono", "", _FONTS / "DejaVuSansMono.ttf")
        self._known = {
            family: frozenset(FT2Font(str(_FONTS / file)).get_charmap())
            for family, file in (("sans", "DejaVuSans-Bold.ttf"), ("mono", "DejaVuSansMono.ttf"))
        }
        self._title = self.fit(title)
        self.set_title(self._title)
        self.set_lang("en")
        self.alias_nb_pages()
        self.add_page()

    def fit(self, text: str, family: str = "sans") -> str:
        """The text with what the font cannot show escaped."""
        known = self._known[family] | {ord("\n")}
        return "".join(c if ord(c) in known else c.encode("unicode_escape").decode("ascii") for c in text)

    def footer(self) -> None:
        self.set_y(-12)
        self.font("sans", 7, _MUTED)
        short = self._title if len(self._title) <= 90 else f"{self._title[:89]}…"
        self.cell(0, 4, f"{short}  ·  {self.page_no()} / {{nb}}", align="R")

    def font(self, family: str, size: float, colour: tuple[int, int, int] = (20, 24, 28), bold: bool = False) -> None:
        self.set_font(family, "B" if bold else "", size)
        self.set_text_color(*colour)

    def write_text(self, text: str, size: float = 9, colour: tuple[int, int, int] = (20, 24, 28), *,
                   bold: bool = False, family: str = "sans", after: float = 1.5) -> None:  # fmt: skip
        """A paragraph over the whole width. No page begins or ends with very few of its lines."""
        self.font(family, size, colour, bold)
        lines = self.lines(text, size, family)
        fit = max(0, int((self.h - self.b_margin - self.get_y()) / (size * 0.5) + 1e-6))
        page = int(self.eph / (size * 0.5) + 1e-6)
        while lines:
            if fit < len(lines) and min(fit, len(lines)) <= _TOGETHER:
                fit = 0
            elif fit < len(lines) < fit + _TOGETHER:
                fit = len(lines) - _TOGETHER
            for line in lines[:fit]:
                self.cell(0, size * 0.5, line, new_x=XPos.LMARGIN, new_y=YPos.NEXT)
            if lines := lines[fit:]:
                self.add_page()
                self.font(family, size, colour, bold)
                fit = page
        self.ln(after)

    def lines(self, text: str, size: float, family: str = "sans", width: float = 0) -> list[str]:
        """The text as it would be broken, in the font that is set. width: in millimetres; 0: of the page."""
        found = self.multi_cell(
            width, size * 0.5, self.fit(text, family), align="L", dry_run=True, output=MethodReturnValue.LINES
        )
        return cast(list[str], found) or [""]


def pdf(report: Report) -> bytes:
    """The file's bytes."""
    pages = _Pages(report.title)
    pages.write_text(report.title, 19, bold=True, after=0.5)
    pages.write_text(report.subtitle, 9, _MUTED, after=4)
    for part in report.opening:
        _write(pages, part)
    for place, chapter in enumerate(report.chapters, 1):
        if place > 1:
            pages.add_page()
        if len(report.chapters) > 1:
            pages.start_section(pages.fit(chapter.title), level=0)
            pages.write_text(f"{place}. {chapter.title}", 15, bold=True, after=2)
        for said in chapter.verdict:
            _verdict(pages, said)
        for section in chapter.sections:
            first = section.parts[0]
            drawn = png(first) if isinstance(first, Picture) else None
            _room(pages, 13 + _start(pages, first, drawn))  # a heading stays with what it is of
            pages.ln(4)
            pages.start_section(pages.fit(section.title), level=int(len(report.chapters) > 1))
            pages.write_text(section.title, 13, bold=True, after=2)
            for part in section.parts:
                _write(pages, part, drawn if part is first else None)
    return bytes(pages.output())


def _verdict(pages: _Pages, said: Statement) -> None:
    _room(pages, 18)
    top, page = pages.get_y(), pages.page
    pages.set_left_margin(21)
    pages.write_text(f"{_SIGNS[said.tone]} {said.text}", 10.5, _TONES[said.tone], bold=True, after=0.3)
    pages.write_text(said.detail, 8, _MUTED, after=0)
    if pages.page == page:
        pages.set_draw_color(*_TONES[said.tone])
        pages.set_line_width(0.9)
        pages.line(17.5, top, 17.5, pages.get_y())
    pages.set_left_margin(16)
    pages.set_x(16)
    pages.ln(3)


def _write(pages: _Pages, part: Part, drawn: bytes | None = None) -> None:
    """drawn: the part's picture, where it has been drawn already."""
    if isinstance(part, Paragraph):
        pages.write_text(part.text)
    elif isinstance(part, Facts):
        pages.write_text(part.caption, 9, bold=True, after=0.5)
        _rows(pages, (), part.pairs, frozenset(), 8, (1, 3))
    elif isinstance(part, Code):
        _room(pages, 20)
        pages.write_text(part.caption, 8, _MUTED, after=0.5)
        pages.write_text(part.start, 7, family="mono", after=3)
    elif isinstance(part, Table):
        _table(pages, part)
    else:
        title, about = (part.title, part.description) if isinstance(part, Picture) else (LINK_TITLE, LINK_ABOUT)
        _picture(pages, drawn or png(part), title, about)
        if isinstance(part, Link):
            _table(pages, part.table)


def _picture(pages: _Pages, data: bytes, title: str, about: str) -> None:
    """As wide as the page; smaller only where it would be taller than that."""
    height = _height(pages, data)
    _room(pages, height + 14)
    pages.write_text(title, 9, bold=True, after=0)
    pages.write_text(about, 8, _MUTED, after=1)
    pages.image(
        io.BytesIO(data), w=pages.epw, h=height, keep_aspect_ratio=True, alt_text=f"{title}. {about}", title=title
    )
    pages.ln(5)


def _height(pages: _Pages, data: bytes) -> float:
    """Of a picture, in millimetres."""
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
    return float(min(pages.epw * height / width, pages.eph - 40))


def _table(pages: _Pages, table: Table) -> None:
    _room(pages, _start(pages, table))
    pages.write_text(table.caption, 9, bold=True, after=0.2)
    if table.note:
        pages.write_text(table.note, 8, _MUTED, after=0.5)
    lengths, size = _columns(table)
    rows = [tuple(cell.text for cell in row) for row in table.rows]
    _rows(pages, table.headings, rows, table.numbers, size, lengths)


def _columns(table: Table) -> tuple[list[int], float]:
    """The characters that each column gets, and the size of the font that makes room for them."""
    columns = list(zip(table.headings, *(tuple(cell.text for cell in row) for row in table.rows), strict=True))
    lengths = [_length(heading, [len(text) for text in texts]) for heading, *texts in columns]
    return lengths, min(8.0, max(5.0, 8.0 * 88 / sum(lengths)))


def _start(pages: _Pages, part: Part, drawn: bytes | None = None) -> float:
    """Millimetres that a part needs on the page that it begins on: of a table, down to its third row."""
    if drawn is not None:
        return 14 + _height(pages, drawn)
    if not isinstance(part, Table):
        return 27
    lengths, size = _columns(part)
    pages.font("sans", 8)
    lines = len(pages.lines(part.note, 8)) if part.note else 0
    pages.font("sans", size, bold=True)  # wider than most rows are
    height = 6.0 + 4 * lines
    for row in (part.headings, *(tuple(cell.text for cell in row) for row in part.rows[:_TOGETHER])):
        wraps = [
            len(pages.lines(text, size, width=pages.epw * length / sum(lengths) - 1.6))
            for text, length in zip(row, lengths, strict=True)
        ]
        height += max(wraps) * size * 0.5 + 1
    return height


def _length(heading: str, lengths: Sequence[int]) -> int:
    """Characters that a column gets: its texts', up to a limit, and every word of its heading, which is bold."""
    return max(min(_WIDEST, max(lengths, default=0)), 2 + max(map(len, heading.split())), 5)


def _rows(pages: _Pages, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[int],
          size: float, widths: Sequence[int]) -> None:  # fmt: skip
    pages.font("sans", size)
    pages.set_draw_color(*_LINE)
    pages.set_line_width(0.15)
    aligned = tuple("RIGHT" if n in numbers else "LEFT" for n in range(len(widths)))
    with pages.table(
        width=pages.epw, col_widths=tuple(widths), text_align=aligned, line_height=size * 0.5, padding=(0.5, 0.8),
        borders_layout=TableBordersLayout.HORIZONTAL_LINES, first_row_as_headings=bool(headings),
        headings_style=FontFace(emphasis=TextEmphasis.B), align="LEFT",
    ) as drawn:  # fmt: skip
        for cells in ([headings] if headings else []) + list(rows):
            row = drawn.row()
            for text in cells:
                row.cell(pages.fit(text))
    pages.ln(4)


def _room(pages: _Pages, height: float) -> None:
    """A new page unless that many millimetres are left on this one."""
    if pages.get_y() + height > pages.h - pages.b_margin:
        pages.add_page()
