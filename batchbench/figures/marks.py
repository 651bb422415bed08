"""What a figure's marks say: every value that was drawn as a point or a bar, and where it lies in the picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

_POINT = 9.0  # width of a point's box
_INCH = 72.0
_said: WeakKeyDictionary[Artist, Sequence[tuple[str, str, float]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Mark:
    """One value. box: left, top, width and height in points (1/72 inch) from the figure's top left corner."""

    panel: str
    series: str
    at: str
    value: float
    box: tuple[float, float, float, float]

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        parts = (self.panel, self.series, self.at, number(self.value))
        return "; ".join(part for part in parts if part)


def number(value: float) -> str:
    """Four digits, and every digit of a whole number: 0.4567, 12,345."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


def say(artist: PolyCollection | Line2D, said: Sequence[tuple[str, str, float]]) -> None:
    """Name the bars or points of one artist, in their order: series, place and value of each."""
    _said[artist] = said


def marks_of(figure: Figure) -> list[Mark]:
    """Every point of a line in data coordinates and every bar, in drawing order. The figure must have been laid out:
    saved, or drawn. Bands and bars that stand for many values are not values, and left out.
    """
    found: list[Mark] = []
    panel = ""
    for axes in figure.axes:
        panel = _plain(axes.get_title()) or panel
        for artist in axes.get_children():
            if isinstance(artist, Line2D) and artist.get_transform() == axes.transData:
                found += _points(axes, panel, artist, figure)
            elif isinstance(artist, PolyCollection) and artist in _said:
                found += _polygons(axes, panel, artist, figure)
        for container in axes.containers:
            if isinstance(container, BarContainer):
                found += _bars(axes, panel, container, figure)
    return found


def _points(axes: Axes, panel: str, line: Line2D, figure: Figure) -> Iterator[Mark]:
    """A step holds until the next point: the last one only ends it."""
    data = np.asarray(line.get_xydata(), dtype=float)
    data = data[:-1] if line.get_drawstyle() == "steps-post" else data
    data = data[np.isfinite(data).all(axis=1)]
    said = _said.get(line)
    name, x_name, y_name = _series(line), _label(axes, figure, "x"), _label(axes, figure, "y")
    corners = _from_top_left(axes.transData.transform(data), figure)
    rows = {} if said else _names(axes, "y")
    rows = {} if all(_is_number(row) for row in rows.values()) else rows  # of a category each: the value is x
    for n, ((x, y), (left, top)) in enumerate(zip(data, corners, strict=True)):
        box = (float(left) - _POINT / 2, float(top) - _POINT / 2, _POINT, _POINT)
        if said:
            yield Mark(panel, *said[n], box)
        elif rows:
            yield Mark(panel, _joined(name, x_name), rows.get(round(float(y), 6), number(y)), float(x), box)
        else:
            yield Mark(panel, _joined(name, y_name), _at(x_name, x), float(y), box)


def _bars(axes: Axes, panel: str, bars: BarContainer, figure: Figure) -> Iterator[Mark]:
    upright = bars.orientation == "vertical"
    names, label = _names(axes, "x" if upright else "y"), _label(axes, figure, "y" if upright else "x")
    series = _joined(_series(bars), label)
    for value, patch in zip(np.asarray(bars.datavalues, dtype=float), bars.patches, strict=True):
        if np.isfinite(value):
            middle = patch.get_x() + patch.get_width() / 2 if upright else patch.get_y() + patch.get_height() / 2
            at = names.get(round(float(middle), 6), number(float(middle)))
            corners = patch.get_window_extent().get_points()
            yield Mark(panel, series, at, float(value), _box(corners, figure))


def _polygons(axes: Axes, panel: str, bars: PolyCollection, figure: Figure) -> Iterator[Mark]:
    for (series, at, value), path in zip(_said[bars], bars.get_paths(), strict=True):
        extents = path.get_extents()
        corners = axes.transData.transform([[extents.x0, extents.y0], [extents.x1, extents.y1]])
        yield Mark(panel, series, at, value, _box(corners, figure))


def _box(corners: Any, figure: Figure) -> tuple[float, float, float, float]:
    (x0, y0), (x1, y1) = _from_top_left(np.asarray(corners), figure)
    return float(min(x0, x1)), float(min(y0, y1)), float(abs(x1 - x0)), float(abs(y1 - y0))


def _from_top_left(pixels: Any, figure: Figure) -> Any:
    """Pixels from below to points from above."""
    points = np.asarray(pixels, dtype=float).reshape(-1, 2) * (_INCH / figure.dpi)
    points[:, 1] = figure.get_figheight() * _INCH - points[:, 1]
    return points


def _names(axes: Axes, which: str) -> dict[float, str]:
    """Place -> what the axis says there; of one that shares another's, what that one says."""
    shared = axes.get_shared_x_axes() if which == "x" else axes.get_shared_y_axes()
    names: dict[float, str] = {}
    for sibling in sorted(shared.get_siblings(axes), key=axes.figure.axes.index):
        axis = sibling.xaxis if which == "x" else sibling.yaxis
        for at, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False):
            if text := _plain(label.get_text()):
                names.setdefault(round(float(at), 6), text)
    return names


def _is_number(text: str) -> bool:
    return text.replace("−", "").rstrip("kM").replace(".", "", 1).isdigit()


def _label(axes: Axes, figure: Figure, which: str) -> str:
    """An axis' name; of one that shares another's, that one's."""
    own = axes.get_xlabel() if which == "x" else axes.get_ylabel()
    if own:
        return _plain(own)
    labels = (a.get_xlabel() if which == "x" else a.get_ylabel() for a in figure.axes)
    return _plain(next((label for label in labels if label), ""))


def _series(artist: Any) -> str:
    label = str(artist.get_label())
    return "" if label.startswith("_") else _plain(label)


def _joined(series: str, label: str) -> str:
    return ", ".join(part for part in (series, label) if part)


def _at(name: str, value: float) -> str:
    return f"{name} {number(float(value))}".strip()


def _plain(text: str) -> str:
    return " ".join(text.split())
