"""A figure as SVG to put into a page: text as text, no style attribute, nothing from elsewhere, a value per mark."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from xml.etree import ElementTree

from matplotlib.figure import Figure

from batchbench.figures.marks import Mark, marks_of

HOVERED = 1500  # more marks than these would be too small to point at, and a burden to a page
_PLACE = re.compile(r"-?\d+\.\d{3,}")
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")  # in XML, whatever a name has in it
_FONTS = "'DejaVu Sans', Verdana, 'Bitstream Vera Sans', sans-serif"  # of the same widths, as far as there are any


def inline_svg(figure: Figure, key: str, title: str, description: str) -> tuple[str, list[Mark]]:
    """The picture, and the values in it. key: begins every id in it, so that a page may hold several pictures."""
    written = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's own fonts show it
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(_UNFIT.sub("\ufffd", written.getvalue()))
    marks = marks_of(figure)
    for parent in root.iter():
        for child in [c for c in parent if _local(c.tag) in ("metadata", "style")]:
            parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {name: _local_ids(name, value, key) for name, value in _attributes(element)}
        element.tail = None
    root.attrib = {
        "viewBox": root.attrib["viewBox"], "role": "img", "aria-labelledby": f"{key}-title {key}-desc",
        "class": "figure", "stroke-linejoin": "round",
    }  # fmt: skip
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        said = ElementTree.Element(tag, {"id": f"{key}-{tag}"})
        said.text = _UNFIT.sub("\ufffd", text)
        root.insert(place, said)
    if len(marks) <= HOVERED:
        root.append(_targets(marks))
    return ElementTree.tostring(root, encoding="unicode"), marks


def _targets(marks: Sequence[Mark]) -> ElementTree.Element:
    """Something to point at over every mark, that says its value."""
    group = ElementTree.Element("g", {"class": "marks"})
    for mark in marks:
        names = ("x", "y", "width", "height")
        box = {name: f"{round(value, 1):g}" for name, value in zip(names, mark.box, strict=True)}
        target = ElementTree.SubElement(group, "rect", {"class": "mark", **box})
        ElementTree.SubElement(target, "title").text = _UNFIT.sub("\ufffd", mark.sentence)
    return group


def _attributes(element: ElementTree.Element) -> list[tuple[str, str]]:
    """Its own, without namespaces; what `style` holds as attributes too, which a strict page allows."""
    found = {_local(name): value for name, value in element.attrib.items() if name != "style"}
    for part in element.attrib.get("style", "").split(";"):
        name, colon, value = part.partition(":")
        if colon:
            found[name.strip()] = _FONTS if name.strip() == "font-family" else value.strip()
    return [(name, _PLACE.sub(lambda m: f"{float(m[0]):.2f}", value)) for name, value in found.items()]


def _local_ids(name: str, value: str, key: str) -> str:
    if name == "id":
        return f"{key}-{value}"
    if name == "href":
        return f"#{key}-{value.removeprefix('#')}"
    return value.replace("url(#", f"url(#{key}-")


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]
