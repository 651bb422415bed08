"""The report in a real browser: by keyboard, on a phone, in print, in the dark, without its script."""

from __future__ import annotations

import io
import re
import shutil

import pytest
from playwright.sync_api import sync_playwright
from pypdf import PdfReader

from batchbench import cost
from batchbench.report.content import report
from batchbench.report.document import Link
from batchbench.report.html import html
from batchbench.report.link import link
from batchbench.results import load_result
from tests.batchbench.test_report import hostile  # noqa: F401  # a fixture

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory, hostile):  # noqa: F811
    """One file for each report."""
    folder = tmp_path_factory.mktemp("pages")
    contents = {
        "day34": [load_result("results/day34")],
        "swap": [load_result("results/swap")],
        "cheaper": [load_result("results/cheaper")],
        "hostile": [hostile],
        "several": [load_result("results/day34"), load_result("results/day34"), load_result("results/swap")],
    }
    for name, results in contents.items():
        (folder / f"{name}.html").write_text(html(report(results)), encoding="utf-8")
    return folder


@pytest.fixture
def opened(browser, files):
    """Opens a report; a complaint of the browser or a request for anything else fails the test."""
    contexts, heard = [], []

    def open_page(name, **options):
        contexts.append(browser.new_context(reduced_motion="reduce", **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("dialog", lambda dialog: heard.append(dialog.message))
        page.on("request", lambda request: heard.append(request.url) if request.url != address else None)
        address = (files / f"{name}.html").as_uri()
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert heard == []


def first_column(page, table):
    return table.locator("tbody tr > :first-child").all_inner_texts()


def test_a_table_is_sorted_by_keyboard_and_says_how(opened):
    page = opened("day34")
    table = page.locator("table.sortable").first
    assert first_column(page, table)[0] == "48 blocks"
    button = table.locator("th button").nth(3)
    button.focus()
    page.keyboard.press("Enter")
    head = table.locator("thead th").nth(3)
    assert head.get_attribute("aria-sort") == "ascending"
    shares = table.locator("tbody tr > :nth-child(4)").all_inner_texts()
    assert shares == ["0.0%", "21.7%", "26.3%", "32.1%", "37.5%", "39.9%"]
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    assert first_column(page, table) == [f"{n} blocks" for n in (12, 8, 16, 24, 32, 48)]
    table.locator("th button").first.press("Enter")
    assert table.locator("th[aria-sort]").count() == 1
    assert first_column(page, table) == [f"{n} blocks" for n in (8, 12, 16, 24, 32, 48)]


def test_what_is_unknown_is_last_in_either_order(opened):
    page = opened("day34")
    values = page.evaluate("""() => {
        const table = document.createElement("table");
        table.innerHTML = `<thead><tr><th>x</th></tr></thead><tbody><tr><td data-sort="">-</td></tr>
            <tr><td data-sort="10">10</td></tr><tr><td data-sort="9">9</td></tr></tbody>`;
        document.body.append(table);
        sortable(table);
        const seen = [];
        for (const _ of [1, 2]) {
            table.querySelector("button").click();
            seen.push([...table.tBodies[0].rows].map((row) => row.textContent.trim()));
        }
        return seen;
    }""")
    assert values == [["9", "10", "-"], ["10", "9", "-"]]


def parsed(text):
    """'2.1 ms' -> 0.0021"""
    value, unit = text.split()
    return float(value) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def test_the_slider_moves_by_keyboard_and_its_sums_are_those_of_the_cost_model(opened):
    page = opened("day34")
    (about,) = [part for part in link(load_result("results/day34")).parts if isinstance(part, Link)]
    rows = page.locator("table.sums tbody tr")
    slider = page.get_by_role("slider", name="Bandwidth of the link")
    assert slider.get_attribute("aria-valuetext") == "25 GB/s"
    moved = page.locator("#r1-link-link")
    assert moved.get_attribute("transform") == "translate(0 0)"
    slider.focus()
    page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext") == "0.01 GB/s"
    for place, point in enumerate(about.points):
        cells = rows.nth(place).locator("td").all_inner_texts()
        assert parsed(cells[1]) == pytest.approx(point.rebuilt_tokens * about.s_per_position, rel=0.006)
        swap_s = cost.swap_ms(point.copied_tokens, about.kv_bytes_per_token, 1e7) / 1e3
        assert parsed(cells[2]) == pytest.approx(swap_s, rel=0.006)
        assert cells[3] == f"0 of {point.evictions}"
    assert float(re.match(r"translate\((-[\d.]+) ", moved.get_attribute("transform"))[1]) < -100
    before = slider.input_value()
    page.keyboard.press("ArrowRight")
    assert float(slider.input_value()) == pytest.approx(float(before) + 0.01)


def test_a_dearer_position_moves_the_crossing_and_what_is_cheaper(opened):
    page = opened("day34")
    said = page.locator("#r1-link-equal-said")
    equal = cost.flip_bandwidth_bytes_per_s(768, 1e3 * link(load_result("results/day34")).parts[3].s_per_position)
    assert said.inner_text() == f"{equal / 1e9:.3g} GB/s"
    page.get_by_role("slider", name="Cost of a position").focus()
    page.keyboard.press("End")
    assert float(said.inner_text().split()[0]) == pytest.approx(equal / 10 / 1e9, rel=0.006)


def test_the_moving_dot_stays_on_the_line_of_swaps(opened):
    page = opened("swap")
    slider = page.get_by_role("slider", name="Bandwidth of the link")
    for key in ("Home", "End"):
        slider.press(key)
        dot, line, plot = page.locator("figure.link svg").evaluate(
            """svg => ["[id$='-swapped'] use", "[id$='-link-link'] path", "g[id$='-patch_2']"].map((one) => {
                const box = svg.querySelector(one).getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2, box.width, box.height];
            })"""
        )
        across, down = (dot[n] - (plot[n] - plot[n + 2] / 2) for n in (0, 1))
        assert dot[0] == pytest.approx(line[0], abs=1)
        assert (across, down) == pytest.approx({"Home": (0, 0), "End": (plot[2], plot[3])}[key], abs=2)


def test_of_marks_on_each_other_the_pointer_says_all(opened):
    page = opened("day34")
    figure = page.locator("figure").first
    together = 0
    for mark in figure.locator(".mark").all():
        mark.scroll_into_view_if_needed()
        box = mark.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        lines = figure.locator(".said").inner_text().splitlines()
        assert mark.locator("title").evaluate("title => title.textContent") in lines
        together += len(lines) > 1
    assert together, "some of this figure's marks coincide"


def test_a_value_is_said_under_the_pointer_and_by_keyboard(opened):
    page = opened("day34")
    figure = page.locator("figure").first
    plot, said = figure.locator(".plot"), figure.locator(".said")
    assert said.inner_text() == ""
    mark = figure.locator(".mark").nth(7)
    expected = mark.locator("title").evaluate("title => title.textContent")
    mark.hover()
    assert expected in said.inner_text().splitlines()
    plot.focus()
    page.keyboard.press("Home")
    first = said.inner_text()
    assert first == "Occupancy; no schedule can exceed, share of slots that forwarded a row; pool [blocks] 8; 0.2963"
    page.keyboard.press("ArrowRight")
    assert "pool [blocks] 12; 0.4444" in said.inner_text()
    page.keyboard.press("ArrowLeft")
    assert said.inner_text() == first and figure.locator(".mark.on").count() == 1
    page.keyboard.press("Escape")
    assert said.inner_text() == "" and figure.locator(".mark.on").count() == 0


def test_marks_lie_over_what_they_say(opened):
    """A point of the first panel, where the line of measured occupancy has its marker."""
    page = opened("day34")
    svg = page.locator("figure svg").first
    marker = svg.locator("use").evaluate_all(
        "uses => uses.filter((use) => use.getAttribute('fill') === '#0072b2').map((use) => use.getBoundingClientRect())"
        ".map((box) => [box.x + box.width / 2, box.y + box.height / 2])"
    )
    marks = svg.locator(".mark").evaluate_all(
        "marks => marks.map((mark) => mark.getBoundingClientRect())"
        ".map((box) => [box.x + box.width / 2, box.y + box.height / 2])"
    )
    assert len(marker) > 10
    for x, y in marker[:6]:
        assert min(abs(x - a) + abs(y - b) for a, b in marks) < 1


@pytest.mark.parametrize("name", ["day34", "swap", "hostile", "several"])
def test_a_phone_scrolls_only_down(opened, name):
    page = opened(name, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("visualViewport.width") == 360
    for summary in page.locator("summary").all():
        summary.evaluate("summary => summary.parentElement.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_everything_that_can_be_reached_shows_its_focus(opened):
    page = opened("day34")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("""() => {
            const at = document.activeElement, style = getComputedStyle(at);
            return [at.tagName, style.outlineStyle, parseFloat(style.outlineWidth)];
        }""")
        )
    tags = {tag for tag, _, _ in seen}
    assert tags >= {"A", "DIV", "BUTTON", "SUMMARY"}
    assert all(style == "solid" and width >= 3 for _, style, width in seen)


CONTRAST = """() => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = rgb(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const worst = {};
    const every = "h1, h3, p, strong, .detail, .note, .sign, a, caption, th, td, dt, dd, code, summary";
    for (const element of document.querySelectorAll(every)) {
        const colours = [rgb(getComputedStyle(element).color), behind(element)];
        const [a, b] = colours.map(luminance).sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05), kind = element.tagName + "." + element.className;
        worst[kind] = Math.min(worst[kind] ?? 99, ratio);
    }
    return worst;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(opened, scheme):
    worst = opened("day34", color_scheme=scheme).evaluate(CONTRAST)
    assert len(worst) > 10
    assert {kind: ratio for kind, ratio in worst.items() if ratio < 4.5} == {}


def test_dark_is_dark(opened):
    colour = opened("day34", color_scheme="dark").evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", colour))) < 48


def test_without_its_script_the_page_is_whole(opened):
    page = opened("day34", java_script_enabled=False)
    assert page.locator("button").count() == 0
    assert page.locator("#r1-link-bandwidth-said").inner_text() == "25 GB/s"
    assert page.locator("table.sums tbody tr").first.locator("td").nth(3).inner_text() == "2 of 2"
    assert page.locator("svg .mark title").count() > 100
    assert page.locator("#r1-link-recompute").count() == 1


def test_the_policy_is_in_force(browser, files):
    page = browser.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto((files / "day34.html").as_uri())
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        document.body.append(script);
        const image = new Image();
        image.src = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
        document.body.append(image);
    }""")
    assert page.evaluate("window.ran") is None
    page.wait_for_timeout(100)
    assert len([text for text in refused if "Content Security Policy" in text]) == 2
    page.close()


def test_names_from_files_run_nothing(opened):
    page = opened("hostile")
    assert page.locator("h1").inner_text().startswith('<script>alert("x")</script>|')
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0


def test_every_printed_page_of_a_table_repeats_its_headings(browser, files):
    """With the script, headings are in buttons, which a repeated table head is drawn without."""
    counts = []
    for script in (True, False):
        context = browser.new_context(java_script_enabled=script)
        page = context.new_page()
        page.goto((files / "cheaper.html").as_uri())
        printed = PdfReader(io.BytesIO(page.pdf(format="A4")))
        context.close()
        table = [sheet.extract_text() for sheet in printed.pages]
        counts.append([[text.count(word) for word in ("rebuilt", "generated", "how it left")] for text in table])
    assert counts[0] == counts[1]
    assert sum("generated" in text for text in table) >= 2, "the table should be of several pages"


def test_print_is_pages_with_text_and_without_what_is_pressed(opened):
    page = opened("day34")
    printed = PdfReader(io.BytesIO(page.pdf(format="A4")))
    text = "\n".join(sheet.extract_text() for sheet in printed.pages)
    for expected in (
        "Identical texts at all 6 points.",
        "Every eviction",
        "batchbench sweep day34.toml --engine own --out out/again",
    ):
        assert expected in text
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible() and not page.locator("input").first.is_visible()
    wide = page.evaluate(
        "[...document.querySelectorAll('.scroll')].every((box) => box.scrollWidth <= box.clientWidth + 1)"
    )
    assert wide
