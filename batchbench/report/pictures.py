"""The pictures of a report as PNG, for formats that hold no drawing of their own."""

from __future__ import annotations

import io

import matplotlib as mpl

from batchbench.figures.drawing import FORMATS
from batchbench.figures.link import link_figure
from batchbench.figures.style import STYLE
from batchbench.report.document import Link, Picture

LINK_TITLE = "One position, recomputed or swapped"
LINK_ABOUT = (
    "Time per position over the bandwidth of the link, both logarithmic: swapping falls with bandwidth, recomputing "
    "does not depend on it. They cross at the bandwidth where both take as long."
)


def png(part: Picture | Link) -> bytes:
    """The same bytes for the same figure."""
    written = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = part.draw() if isinstance(part, Picture) else _of_link(part)
        figure.savefig(written, format="png", metadata=FORMATS["png"])
    return written.getvalue()


def _of_link(link: Link) -> mpl.figure.Figure:
    costs = (link.kv_bytes_per_token, link.s_per_position, link.bandwidth_bytes_per_s)
    return link_figure(*costs, measured=link.measured)
