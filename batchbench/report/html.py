"""A report as one HTML file that needs nothing else: its style and script inside, allowed by their hashes."""

from __future__ import annotations

import base64
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from batchbench import cost
from batchbench.figures.inline_svg import HOVERED, inline_svg
from batchbench.figures.link import REACH, bandwidths, decade_points, link_figure
from batchbench.figures.style import STYLE
from batchbench.report.document import Link, LinkPoint, Picture, Report, Table
from batchbench.report.pictures import LINK_ABOUT, LINK_TITLE
from batchbench.report.values import values
from batchbench.units import show_digits, show_small_seconds

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class _Drawn:
    svg: Markup
    values: Table | None
    hovered: bool


def html(report: Report) -> str:
    """The whole page. What is text in the report is text in it, whatever it is made of."""
    style, script = ((_HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    pages = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.tests["kind"] = lambda part, name: type(part).__name__ == name
    with mpl.rc_context(STYLE):
        return pages.get_template("page.html").render(
            report=report, policy=policy, style=Markup(style), script=Markup(script), draw=_draw, chart=_chart
        )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _draw(picture: Picture, key: str) -> _Drawn:
    svg, marks = inline_svg(picture.draw(), key, picture.title, picture.description)
    return _Drawn(Markup(svg), values(picture.title, marks), 0 < len(marks) <= HOVERED)


def _chart(link: Link, key: str) -> dict[str, Any]:
    """The picture of a position, what its script moves it by, and the sums to begin with."""
    figure = link_figure(
        link.kv_bytes_per_token, link.s_per_position, link.bandwidth_bytes_per_s, measured=link.measured
    )
    svg, _ = inline_svg(figure, key, LINK_TITLE, LINK_ABOUT)
    low, high = bandwidths(link.kv_bytes_per_token, link.s_per_position)
    right, up = decade_points(figure)
    return {
        "svg": Markup(svg),
        "low": math.log10(low),
        "high": math.log10(high),
        "reach": math.log10(REACH),
        "start": math.log10(link.bandwidth_bytes_per_s),
        "cost": show_small_seconds(link.s_per_position),
        "equal": show_digits(cost.flip_bandwidth_bytes_per_s(link.kv_bytes_per_token, link.s_per_position * 1e3) / 1e9),
        "rows": [_row(link, point) for point in link.points],
        "data": {
            "kv_bytes_per_token": link.kv_bytes_per_token,
            "s_per_position": link.s_per_position,
            "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
            "right": right,
            "up": up,
            "points": [[[one.count, one.rebuilt, one.copied] for one in point.victims] for point in link.points],
        },
    }


def _row(link: Link, point: LinkPoint) -> dict[str, str]:
    """Sums of one point at the link's own bandwidth; the script writes the same at others."""
    milliseconds = link.s_per_position * 1e3
    recompute_ms = cost.recompute_ms(point.rebuilt_tokens, milliseconds)
    swap_ms = cost.swap_ms(point.copied_tokens, link.kv_bytes_per_token, link.bandwidth_bytes_per_s)
    cheaper = sum(
        one.count
        for one in point.victims
        if cost.swap_ms(one.copied, link.kv_bytes_per_token, link.bandwidth_bytes_per_s)
        < cost.recompute_ms(one.rebuilt, milliseconds)
    )
    return {
        "name": point.name,
        "evictions": f"{point.evictions:,}",
        "recompute": show_small_seconds(recompute_ms / 1e3),
        "swap": show_small_seconds(swap_ms / 1e3),
        "cheaper": f"{cheaper:,} of {point.evictions:,}",
    }
