"""A report as Markdown, with its figures as pictures beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

from batchbench.report.document import Chapter, Code, Facts, Link, Paragraph, Part, Picture, Report, Table
from batchbench.report.pictures import LINK_ABOUT, LINK_TITLE, png

_SIGNS = {"good": "✓", "caution": "⚠", "bad": "✗", "plain": "•"}
_MARKUP = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>$@:^=])")


def markdown(report: Report, folder: str) -> tuple[str, dict[str, bytes]]:
    """The text, and the pictures that it shows by name. folder: where they will be, from the text's own place."""
    pictures: dict[str, bytes] = {}
    lines = [f"# {plain(report.title)}", plain(report.subtitle)]
    for part in report.opening:
        lines += _part(part, "all", folder, pictures)
    for place, chapter in enumerate(report.chapters, 1):
        lines += _chapter(chapter, place, len(report.chapters) > 1, folder, pictures)
    return "\n\n".join(lines) + "\n", pictures


def plain(text: str) -> str:
    """Text that means itself: nothing in it is markup, HTML or a link."""
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    return _MARKUP.sub(r"\\\1", safe)


def _chapter(chapter: Chapter, place: int, several: bool, folder: str, pictures: dict[str, bytes]) -> Iterator[str]:
    if several:
        yield f"## {place}\\. {plain(chapter.title)}"
    for said in chapter.verdict:
        yield f"{_SIGNS[said.tone]} **{plain(said.text)}** {plain(said.detail)}"
    for section in chapter.sections:
        yield f"{'###' if several else '##'} {plain(section.title)}"
        for part in section.parts:
            yield from _part(part, f"r{place}", folder, pictures)


def _part(part: Part, key: str, folder: str, pictures: dict[str, bytes]) -> Iterator[str]:
    if isinstance(part, Paragraph):
        yield plain(part.text)
    elif isinstance(part, Facts):
        yield f"**{plain(part.caption)}**"
        yield "\n".join(["| what | value |", "| --- | --- |", *(f"| {plain(a)} | {plain(b)} |" for a, b in part.pairs)])
    elif isinstance(part, Code):
        yield plain(part.caption)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", part.start)), default=0))
        yield f"{fence}{part.language}\n{part.start}\n{fence}"
    elif isinstance(part, Table):
        yield from _table(part)
    else:
        name = f"{key}-{part.key if isinstance(part, Picture) else 'link'}.png"
        title, about = (part.title, part.description) if isinstance(part, Picture) else (LINK_TITLE, LINK_ABOUT)
        pictures[name] = png(part)
        yield f"**{plain(title)}.** {plain(about)}"
        yield f"![{plain(title)}]({quote(folder)}/{name})"
        if isinstance(part, Link):
            yield from _table(part.table)


def _table(table: Table) -> Iterator[str]:
    yield f"**{plain(table.caption)}**" + (f"\\\n{plain(table.note)}" if table.note else "")
    ruler = " | ".join("---:" if n in table.numbers else "---" for n in range(len(table.headings)))
    rows = [f"| {' | '.join(plain(cell.text) for cell in row)} |" for row in table.rows]
    yield "\n".join([f"| {' | '.join(map(plain, table.headings))} |", f"| {ruler} |", *rows])
